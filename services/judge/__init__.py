"""The judge: turns what followed an answer into a score.

Reads: next-states, config, llm-calls. Writes: scores, llm-calls, judge.dlq, skips.
"""
