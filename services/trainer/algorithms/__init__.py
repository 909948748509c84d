"""Losses, one per file. `base` says what one is; anyone's own is loaded by its import path."""
