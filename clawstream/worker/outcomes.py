"""What becomes of an input. There is no fourth way: nothing is dropped silently."""

from dataclasses import dataclass

from clawstream.bus.interface import OutgoingRecord


@dataclass(frozen=True, slots=True)
class Output:
    """Records that replace the input. They become visible together with its offset."""

    records: tuple[OutgoingRecord, ...]


@dataclass(frozen=True, slots=True)
class Skip:
    """Nothing follows from the input, on purpose. Counted under `reason`."""

    reason: str
    """A short word from a fixed set, for a metric's label: `session_end`, `abstained`."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """The input can never be handled. It goes to the dead-letter topic, and the partition goes on."""

    reason: str
    """A short word from a fixed set, for a metric's label: `undecodable`, `deadline`."""
    error: BaseException
    """Why."""
    attempts: int = 1
    """How often handling was tried."""
    without_value: bool = False
    """The value does not fit into the dead-letter topic; the headers say where the original is."""


Outcome = Output | Skip | DeadLetter
