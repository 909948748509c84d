"""Lineage: from any turn, sample, step or version along the whole chain, read from the log."""
