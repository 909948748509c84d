"""The store with a crash point around its checkpoints, for tests that kill the trainer at the worst moments."""

from typing import Any

from clawstream.crash_points import CrashPoint
from clawstream.crash_points.point import AFTER_CHECKPOINT, AFTER_TURN_LEDGER, BEFORE_CHECKPOINT
from services.trainer.forwarding_store import ForwardingStore
from services.trainer.ports import Snapshot, Store
from services.trainer.turn_ledger import LedgerAddition


def with_store_crash(store: Store, point: CrashPoint | None) -> Store:
    """The store itself when there is no crash point."""
    return store if point is None else _CrashingStore(store, point)


class _CrashingStore(ForwardingStore):
    def __init__(self, inner: Store, point: CrashPoint) -> None:
        super().__init__(inner)
        self._point = point

    def append_turns(self, addition: LedgerAddition) -> None:
        self._point.reach(BEFORE_CHECKPOINT)
        super().append_turns(addition)
        self._point.reach(AFTER_TURN_LEDGER)

    def save_checkpoint(self, snapshot: Snapshot, progress: dict[str, Any], step: int) -> None:
        super().save_checkpoint(snapshot, progress, step)
        self._point.reach(AFTER_CHECKPOINT)
