"""Published weights: what is in the directory, and which old ones may go. No torch."""
