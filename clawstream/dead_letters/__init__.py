"""Reading the dead-letter topics, and driving their records through their stage once more."""
