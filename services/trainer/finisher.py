"""Everything after the update, on a thread of its own, in this order:

    turn ledger -> checkpoint -> artefact -> one transaction of weight-version, pointer, train-steps and dead letters
    -> removal of old artefacts

One step is finished before the next is taken on, so that after a crash at most the newest checkpoint's events are
missing; the trainer writes them when it starts again. Reading and the next update go on meanwhile.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from clawstream.bus.interface import OutgoingRecord
from clawstream.clock import Clock
from clawstream.log import Logger
from clawstream.metrics import Metrics
from schemas.events import WeightVersionEvent
from services.trainer.announcer import Announcer
from services.trainer.events import EventRecords
from services.trainer.history import History
from services.trainer.ports import NewVersion, Snapshot, Store
from services.trainer.progress import Progress
from services.trainer.retention import ArtefactRetention
from services.trainer.turn_ledger import LedgerAddition


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """What is to be made durable."""

    snapshot: Snapshot
    progress: Progress
    """With the events that are to be announced."""
    turns: LedgerAddition
    """What the progress counts and the disk does not hold yet."""


class Finisher:
    """Makes steps durable and known."""

    def __init__(
        self,
        *,
        store: Store,
        announcer: Announcer,
        records: EventRecords,
        retention: ArtefactRetention,
        read_history: Callable[[], History],
        policy: str,
        clock: Clock,
        metrics: Metrics,
        logger: Logger,
    ) -> None:
        self._store = store
        self._announcer = announcer
        self._records = records
        self._retention = retention
        self._read_history = read_history
        self._policy = policy
        self._clock = clock
        self._metrics = metrics
        self._logger = logger
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def submit(self, step: FinishedStep) -> None:
        """Takes a step on; waits while the one before is not finished. Raises what that one raised."""
        self.join()
        self._thread = threading.Thread(target=self._run, args=(step,), name="finisher", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Waits for the step that is being finished. Raises what it raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raises what the last step raised, if it has ended so. Does not wait."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _run(self, step: FinishedStep) -> None:
        try:
            self.finish(step)
        except BaseException as error:  # handed to the main thread by `check`, which ends the process
            self._failure = error

    def finish(self, step: FinishedStep, history: History | None = None) -> None:
        """In the calling thread: turn ledger, checkpoint, then all that follows from it and is not in `history`."""
        progress = step.progress
        started = self._clock.monotonic_seconds()
        self._store.append_turns(step.turns)
        self._store.save_checkpoint(step.snapshot, progress.document(), progress.step)
        self._metrics.observe("checkpoint_seconds", self._clock.monotonic_seconds() - started)
        self.announce(step.snapshot, progress, history)

    def announce(self, snapshot: Snapshot, progress: Progress, history: History | None) -> None:
        """Publishes and writes what belongs to a checkpoint on the disk; with `history`, what of it is missing."""
        known_steps = history.steps if history is not None else {}
        missing = [event for event in progress.unannounced if event.train_step_id not in known_steps]
        records: list[OutgoingRecord] = []
        version = progress.weight_version
        makers = [event for event in progress.unannounced if event.weight_version == version]
        is_new = bool(makers) or (version == 0 and progress.step == 0)
        if is_new and not (history is not None and version <= history.newest_number):
            records.extend(self._published(snapshot, progress, makers[-1].train_step_id if makers else None))
        records.extend(self._records.train_step(event) for event in missing)
        if missing:  # they are of these steps, so they are on the log when the steps are
            records.extend(self._records.dead_letter(letter) for letter in progress.dead_letters)
        if records:
            self._announcer.write(records, lambda: self._is_on_log(progress))
        self._metrics.set("weight_version", version)
        self._retention.sweep(newest_version=version, base_version=progress.base_version)

    def _published(self, snapshot: Snapshot, progress: Progress, train_step_id: str | None) -> list[OutgoingRecord]:
        started = self._clock.monotonic_seconds()
        now = self._clock.now()
        version = NewVersion(
            weight_version=progress.weight_version,
            base_version=progress.base_version,
            lineage=progress.lineage,
            train_step_id=train_step_id,
            created_at=now,
        )
        directory, manifest_sha256 = self._store.publish(snapshot, version)
        self._metrics.observe("publish_seconds", self._clock.monotonic_seconds() - started)
        self._logger.info("published weights", version=progress.weight_version, directory=str(directory))
        event = WeightVersionEvent(
            policy=self._policy,
            weight_version=progress.weight_version,
            base_version=progress.base_version,
            lineage=progress.lineage,
            train_step_id=train_step_id,
            artefact_uri=directory.resolve().as_uri(),
            manifest_sha256=manifest_sha256,
            published_at=now,
        )
        return [
            self._records.weight_version(event),
            self._records.pointer(progress.weight_version, progress.lineage, now),
        ]

    def _is_on_log(self, progress: Progress) -> bool:
        """Whether the transaction, which is there whole or not at all, is there."""
        history = self._read_history()
        if progress.unannounced:
            return progress.unannounced[-1].train_step_id in history.steps
        return progress.weight_version <= history.newest_number
