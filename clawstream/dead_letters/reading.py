"""Reads dead letters from the log."""

from collections.abc import Iterable
from concurrent.futures import Future

from clawstream.bus.fold import LogReader
from clawstream.bus.interface import Bus, Record
from clawstream.bus.record_fetcher import RecordFetcher
from clawstream.dead_letters.letter import Letter, Letters
from clawstream.stages import Stage
from clawstream.topics import full_name


def read_letters(bus: Bus, namespace: str, stages: Iterable[Stage]) -> list[Letter]:
    """Every dead letter of these stages that is retained, without values. Raises BusError."""
    found: list[Letter] = []
    for stage in stages:
        letters = Letters(stage)
        reader = LogReader(bus, [full_name(namespace, stage.dead_letter_topic)])
        try:
            reader.bootstrap(letters.apply)
        finally:
            reader.close()
        found += letters.all()
    return found


class ValueReader:
    """Reads the values of letters; of one that did not fit into its topic, from where the input was."""

    def __init__(self, bus: Bus) -> None:
        self._records = RecordFetcher(bus)

    def start(self, letter: Letter) -> Future[Record]:
        """The record that has the value, read in the background: several are read in one pass.

        The future fails with OffsetNotRetained when it is gone, and with BusError.
        """
        if letter.is_value_omitted and letter.origin is not None:
            return self._records.fetch(letter.origin)
        return self._records.fetch(letter.record)

    def close(self) -> None:
        """Stops reading."""
        self._records.close()
