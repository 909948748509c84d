"""The store with a crash point around its checkpoints, for tests that kill the trainer at the worst moments."""

from typing import Any

from clawstream.crash_points import CrashPoint
from clawstream.crash_points.point import AFTER_CHECKPOINT, BEFORE_CHECKPOINT
from services.trainer.forwarding_store import ForwardingStore
from services.trainer.ports import Snapshot, Store


def with_store_crash(store: Store, point: CrashPoint | None) -> Store:
    """The store itself when there is no crash point."""
    return store if point is None else _CrashingStore(store, point)


class _CrashingStore(ForwardingStore):
    def __init__(self, inner: Store, point: CrashPoint) -> None:
        super().__init__(inner)
        self._point = point

    def save_checkpoint(self, snapshot: Snapshot, progress: dict[str, Any], step: int) -> None:
        self._point.reach(BEFORE_CHECKPOINT)
        super().save_checkpoint(snapshot, progress, step)
        self._point.reach(AFTER_CHECKPOINT)
