"""Records that are no samples, on their way to the dead-letter topic. Pure.

They are announced as train-steps are: they wait in the checkpoint's progress, and go on the log in the transaction of
the step that took them out of the reading. So each is there exactly once per lineage, whenever the process dies; what a
lineage from an older checkpoint reads again has the same `dlq.id`.
"""

from base64 import b64decode, b64encode

from pydantic import BaseModel, ConfigDict

from clawstream import ids
from clawstream.bus.interface import OutgoingRecord, Record
from clawstream.codec import header
from clawstream.errors import DecodeError, UntrainableSample


class DeadLetter(BaseModel):
    """A record of the dead-letter topic as a checkpoint's document holds it. Bytes are base64."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str | None
    value: str | None
    headers: list[tuple[str, str]]

    @classmethod
    def of(cls, record: Record, error: DecodeError, *, process: str, now_iso: str) -> "DeadLetter":
        """Original key, value and headers, and where and why."""
        added = {
            "dlq.id": ids.derive("dead-letter", record.topic, record.partition, record.offset),
            "dlq.topic": record.topic,
            "dlq.partition": str(record.partition),
            "dlq.offset": str(record.offset),
            "dlq.timestamp": str(record.timestamp_milliseconds),
            "dlq.reason": "untrainable" if isinstance(error, UntrainableSample) else "undecodable",
            "dlq.error.type": type(error).__name__,
            "dlq.error.message": str(error)[:512],
            "dlq.process": process,
            "dlq.time": now_iso,
            "dlq.event": header(record.headers, "ce_type") or "",
        }
        headers = (*record.headers, *((name, value.encode()) for name, value in added.items()))
        return cls(
            key=None if record.key is None else _text(record.key),
            value=None if record.value_on_log is None else _text(record.value_on_log),
            headers=[(name, _text(value)) for name, value in headers],
        )

    def outgoing(self, topic: str) -> OutgoingRecord:
        """The record for the dead-letter `topic`."""
        return OutgoingRecord(
            topic=topic,
            key=None if self.key is None else b64decode(self.key),
            value=None if self.value is None else b64decode(self.value),
            headers=tuple((name, b64decode(value)) for name, value in self.headers),
        )


def _text(value: bytes) -> str:
    return b64encode(value).decode()
