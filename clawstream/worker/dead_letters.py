"""Dead letters: the original record untouched, with headers that say where it came from and why it is here."""

from collections import deque
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version

from clawstream.bus.interface import OutgoingRecord, Record
from clawstream.errors import ClawstreamError, EngineError, TooManyDeadLetters
from clawstream.worker.outcomes import DeadLetter

_MAX_MESSAGE_BYTES = 512


def dead_letter_record(
    record: Record, outcome: DeadLetter, *, topic: str, group: str, service_version: str, now: datetime
) -> OutgoingRecord:
    """The record for the dead-letter topic `topic` (full name). The key decides its partition."""
    message = _message(record, outcome.error).encode()[:_MAX_MESSAGE_BYTES].decode(errors="ignore").encode()
    headers = {
        "dlq.topic": record.topic.encode(),
        "dlq.partition": str(record.partition).encode(),
        "dlq.offset": str(record.offset).encode(),
        "dlq.timestamp": str(record.timestamp_milliseconds).encode(),
        "dlq.group": group.encode(),
        "dlq.reason": outcome.reason.encode(),
        "dlq.error.type": type(outcome.error).__name__.encode(),
        "dlq.error.message": message,
        "dlq.attempts": str(outcome.attempts).encode(),
        "dlq.service.version": service_version.encode(),
        "dlq.time": now.isoformat().encode(),
    }
    if outcome.without_value:
        headers["dlq.value.omitted"] = b"the value does not fit into the dead-letter topic"
    return OutgoingRecord(
        topic=topic,
        key=record.key,
        value=None if outcome.without_value else record.value_on_log,
        headers=(*record.headers, *headers.items()),
    )


def _message(record: Record, error: BaseException) -> str:
    """Our own errors name positions and fields; what engines answer, and others raise, may quote what was encrypted."""
    is_ours = isinstance(error, ClawstreamError) and not isinstance(error, EngineError)
    if record.encrypted_value is None or is_ours:
        return str(error)
    return "withheld: the record is encrypted, and the message may quote it"


def installed_version() -> str:
    """Our own version, or `unknown` when run from a checkout without installation."""
    try:
        return version("clawstream")
    except PackageNotFoundError:
        return "unknown"


class DeadLetterLimit:
    """Stops a worker whose inputs fail one after the other: then the fault is more likely ours than theirs."""

    def __init__(self, *, max_share: float, window: int) -> None:
        self._max_share = max_share
        self._last: deque[bool] = deque(maxlen=window)

    def add(self, is_dead_letter: bool) -> None:
        """Counts one committed input. Raises TooManyDeadLetters."""
        self._last.append(is_dead_letter)
        dead = sum(self._last) if is_dead_letter and len(self._last) == self._last.maxlen else 0
        if dead > self._max_share * len(self._last):
            raise TooManyDeadLetters(
                f"{dead} of the last {len(self._last)} inputs became dead letters; see their dlq.error.message "
                "headers. Mend the cause and start again: reading goes on behind them"
            )
