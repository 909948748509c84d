"""Decisions about which judge spec counts: promote, roll back, list.

Reads: config, scores-replay, train-steps. Writes: config, and scores when a replay is promoted.
"""
