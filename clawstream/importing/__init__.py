"""Chat logs that something else wrote become turns and next states, with log-probs scored by an engine."""
