"""Replay: history judged again under another spec, beside the scores that count, and compared with them.

Reads: next-states, llm-calls, scores, config. Writes: scores-replay, llm-calls.
"""
