"""Retraining: archived batches once more, from chosen weights, into a lineage of its own.

Reads: train-steps, weights and the archive. Writes files only: what was served and trained stays what it was.
"""
