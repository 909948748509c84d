"""`clawstream audit`: proves from the log alone that nothing was lost and nothing was counted twice.

It reads with kafka-python, a client that shares no code with the one that wrote the log, parses values by itself, and
keeps what it has to remember in SQLite on the disk: its memory does not grow with the log.
"""
