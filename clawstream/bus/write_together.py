"""Records that are on the log all or not at all."""

from collections.abc import Iterable

from clawstream.bus.interface import OutgoingRecord, TransactionalProducer


def write_together(producer: TransactionalProducer, records: Iterable[OutgoingRecord]) -> None:
    """One transaction, and nothing else in it. Raises what the producer raises."""
    producer.begin()
    for record in records:
        producer.produce(record)
    producer.commit()
