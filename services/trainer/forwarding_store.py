"""A store that passes everything on to another one: what changes some of it derives from it."""

from datetime import datetime
from pathlib import Path
from typing import Any

from services.trainer.ports import Snapshot, Store
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

    def publish(
        self,
        snapshot: Snapshot,
        *,
        weight_version: int,
        base_version: int | None,
        lineage: str,
        train_step_id: str | None,
        created_at: datetime,
    ) -> tuple[Path, str]:
        return self._inner.publish(
            snapshot,
            weight_version=weight_version,
            base_version=base_version,
            lineage=lineage,
            train_step_id=train_step_id,
            created_at=created_at,
        )

    def versions(self) -> list[int]:
        return self._inner.versions()

    def delete(self, weight_version: int) -> None:
        self._inner.delete(weight_version)
