"""The teacher: turns a score and its turn into a sample.

Reads: scores, turns. Writes: samples, teacher.dlq, skips.
"""
