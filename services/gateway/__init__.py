"""The gateway: an OpenAI-compatible endpoint that serves the policy and writes down every turn.

Reads: weights, weights-applied, turn-index, outbox. Writes: turns, next-states, turn-index, outbox, weights-applied.
"""
