# pyright: basic
# Reason: hands torch snapshots on to stores that are written in torch.
"""`services.trainer.ports.Store` on a file system."""

from pathlib import Path
from typing import Any

from services.trainer.checkpoint import CheckpointStore
from services.trainer.ledger_file import LedgerFile
from services.trainer.policy_snapshot import PolicySnapshot
from services.trainer.ports import NewVersion, Snapshot
from services.trainer.publish import WeightStore
from services.trainer.turn_ledger import LedgerAddition, LedgerEntry


class DiskStore:
    """Checkpoints, turn ledger and published weights of one policy."""

    def __init__(
        self, checkpoints: CheckpointStore, turns: LedgerFile, weights: WeightStore, base_directory: Path
    ) -> None:
        """`base_directory` gives published versions their configuration and tokenizer files."""
        self._checkpoints = checkpoints
        self._turns = turns
        self._weights = weights
        self._base_directory = base_directory

    def find_turn(self, turn_id: str, entries: int) -> LedgerEntry | None:
        return self._turns.find_turn(turn_id, entries)

    def append_turns(self, addition: LedgerAddition) -> None:
        self._turns.append(addition)

    def save_checkpoint(self, snapshot: Snapshot, progress: dict[str, Any], step: int) -> None:
        assert isinstance(snapshot, PolicySnapshot)
        self._checkpoints.save(snapshot, progress, step)

    def publish(self, snapshot: Snapshot, version: NewVersion) -> tuple[Path, str]:
        assert isinstance(snapshot, PolicySnapshot)
        published = self._weights.publish(
            snapshot,
            self._base_directory,
            weight_version=version.weight_version,
            base_version=version.base_version,
            lineage=version.lineage,
            train_step_id=version.train_step_id,
            created_at=version.created_at,
        )
        return published.directory, published.manifest_sha256

    def versions(self) -> list[int]:
        return self._weights.versions()

    def delete(self, weight_version: int) -> None:
        self._weights.delete(weight_version)
