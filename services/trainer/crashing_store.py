"""The store with a crash point around its checkpoints, for tests that kill the trainer at the worst moments."""

from datetime import datetime
from pathlib import Path
from typing import Any

from clawstream.crash_points import CrashPoint
from clawstream.crash_points.point import AFTER_CHECKPOINT, BEFORE_CHECKPOINT
from services.trainer.ports import Snapshot, Store


def with_store_crash(store: Store, point: CrashPoint | None) -> Store:
    """The store itself when there is no crash point."""
    return store if point is None else _CrashingStore(store, point)


class _CrashingStore:
    def __init__(self, inner: Store, point: CrashPoint) -> None:
        self._inner = inner
        self._point = point

    def save_checkpoint(self, snapshot: Snapshot, progress: dict[str, Any], step: int) -> None:
        self._point.reach(BEFORE_CHECKPOINT)
        self._inner.save_checkpoint(snapshot, progress, step)
        self._point.reach(AFTER_CHECKPOINT)

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
