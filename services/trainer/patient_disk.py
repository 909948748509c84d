"""A full disk is waited for: what is to be written is in memory, and a restart would only have to train it again.

A used-up quota is one, too. Training stands still meanwhile, with a line in the log every few seconds; it goes on when
there is space. Everything is written whole or not at all, so that trying again is safe.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clawstream.disk_patience import DiskPatience
from services.trainer.batch_archive import ArchivedBatch
from services.trainer.forwarding_store import ForwardingStore
from services.trainer.ports import Archive, NewVersion, Snapshot, Store
from services.trainer.sample import TrainingSample
from services.trainer.turn_ledger import LedgerAddition


class PatientStore(ForwardingStore):
    """`services.trainer.ports.Store` that waits for space."""

    def __init__(self, inner: Store, patience: DiskPatience) -> None:
        super().__init__(inner)
        self._patience = patience

    def append_turns(self, addition: LedgerAddition) -> None:
        self._patience.write("turn ledger", lambda: self._inner.append_turns(addition))

    def save_checkpoint(self, snapshot: Snapshot, progress: dict[str, Any], step: int) -> None:
        self._patience.write("checkpoint", lambda: self._inner.save_checkpoint(snapshot, progress, step))

    def publish(self, snapshot: Snapshot, version: NewVersion) -> tuple[Path, str]:
        return self._patience.write("weights", lambda: self._inner.publish(snapshot, version))


class PatientArchive:
    """`services.trainer.ports.Archive` that waits for space."""

    def __init__(self, inner: Archive, patience: DiskPatience) -> None:
        self._inner = inner
        self._patience = patience

    def write(self, lineage: str, step: int, samples: Sequence[TrainingSample]) -> ArchivedBatch:
        return self._patience.write("batch", lambda: self._inner.write(lineage, step, samples))
