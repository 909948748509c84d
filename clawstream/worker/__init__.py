"""Consume, handle, produce: exactly once within Kafka, with slow calls outside of transactions.

A Kafka thread owns the consumer and the transactional producer; handlers run concurrently in an asyncio loop. Each
transaction is short: outputs, dead letters and offsets of inputs that are done. What is read, handled and lost on the
way (a crash, a rebalance) is read again; what was committed is never handled twice.
"""
