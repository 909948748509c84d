"""A store that passes everything on to another one: what changes some of it derives from it."""

from pathlib import Path
from typing import Any

from services.trainer.ports import NewVersion, Snapshot, Store
from services.trainer.turn_ledger import LedgerAddition, LedgerEntry


class ForwardingStore:
    """Implements `services.trainer.ports.Store`."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner

    def find_turn(self, turn_id: str, entries: int) -> LedgerEntry | None:
        return self._inner.find_turn(turn_id, entries)

    def append_turns(self, addition: LedgerAddition) -> None:
        self._inner.append_turns(addition)

    def save_checkpoint(self, snapshot: Snapshot, progress: dict[str, Any], step: int) -> None:
        self._inner.save_checkpoint(snapshot, progress, step)

    def publish(self, snapshot: Snapshot, version: NewVersion) -> tuple[Path, str]:
        return self._inner.publish(snapshot, version)

    def versions(self) -> list[int]:
        return self._inner.versions()

    def delete(self, weight_version: int) -> None:
        self._inner.delete(weight_version)
