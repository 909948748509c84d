"""The training loop: read, close a batch, train, hand over to be finished, go on reading.

Crash consistency rests on three things. What a step took out of the batcher is in its checkpoint's progress; nothing
is announced that is not in a checkpoint; and ids, numbers and artefacts follow from the progress, so that what a crash
left unannounced is announced the same when the trainer starts again.
"""

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clawstream.clock import Clock
from clawstream.errors import StepInterrupted
from clawstream.log import Logger
from clawstream.metrics import Metrics
from schemas.events.train_step import DroppedSample, DropReason, GuardAction
from services.trainer.batch_archive import ArchivedBatch
from services.trainer.batcher import Batcher, ClosedBatch
from services.trainer.events import train_step_event
from services.trainer.finisher import FinishedStep, Finisher
from services.trainer.guards.bounds import Breach
from services.trainer.guards.watch import DECAY, Guards, guard_drop
from services.trainer.learning_rate import LearningRateSchedule
from services.trainer.ports import Archive, Policy
from services.trainer.progress import Progress, waiting_samples
from services.trainer.progress_report import ProgressReport
from services.trainer.reader import SampleReader
from services.trainer.sample import StepResult, UnchangedReason
from services.trainer.turn_ledger import TurnLedger

NO_SAMPLES = "no_samples"
"""`unchanged_reason` of a step that only lists drops."""
_SECONDS_PER_DAY = 86400.0
_READ_AHEAD_SAMPLES = 1024
"""Held beside what a batch is made of: a long backlog stays on the log, not in memory and in every checkpoint."""


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """What the loop itself needs to know."""

    policy_name: str
    checkpoint_every_steps: int
    trained_retention_days: float
    poll_seconds: float = 0.2


class TrainerLoop:
    """Runs on the main thread of the first rank."""

    def __init__(
        self,
        settings: LoopSettings,
        *,
        progress: Progress,
        ledger: TurnLedger,
        policy: Policy,
        schedule: LearningRateSchedule,
        reader: SampleReader,
        batcher: Batcher,
        guards: Guards,
        archive: Archive,
        finisher: Finisher,
        report: ProgressReport,
        clock: Clock,
        metrics: Metrics,
        logger: Logger,
    ) -> None:
        self._settings = settings
        self._progress = progress
        self._ledger = ledger
        self._policy = policy
        self._schedule = schedule
        self._reader = reader
        self._batcher = batcher
        self._guards = guards
        self._archive = archive
        self._finisher = finisher
        self._report = report
        self._clock = clock
        self._metrics = metrics
        self._logger = logger
        self._group_version: int | None = None
        """Number of the version that the steps since the last checkpoint make."""

    @property
    def progress(self) -> Progress:
        """As of the last step."""
        return self._progress

    def run(self, stop: threading.Event) -> None:
        """Trains until `stop` is set. Samples that wait, and those of a step that is given up, are read next time."""
        self._show_position()
        try:
            while not stop.is_set():
                self.advance()
        except StepInterrupted:
            self._logger.info("the step in hand was given up: its samples are read again", step=self._progress.step + 1)
        if self._progress.unannounced:
            self._hand_over()
        self._finisher.join()

    def advance(self) -> bool:
        """Reads once, and makes a step when a batch closes. Returns whether it made one.

        With plenty in memory, and a batch among it, the step comes first. Raises StepInterrupted: then nothing can be
        done but to end.
        """
        self._finisher.check()
        now = self._clock.monotonic_seconds()
        closed_by = self._batcher.closes(now) if self._batcher.num_waiting >= _READ_AHEAD_SAMPLES else None
        if closed_by is None:
            newest = self._progress.newest_version
            self._reader.poll(self._settings.poll_seconds, newest_published=newest, now_seconds=now)
            now = self._clock.monotonic_seconds()
            closed_by = self._batcher.closes(now)
        self._report.waiting(self._batcher.have, self._batcher.drop_counts, now)
        if closed_by is not None:
            num_left = self._ledger.num_new
            try:
                self._step(closed_by)
            except StepInterrupted:
                # A checkpoint of the steps before must not say that this one's turns were trained.
                self._ledger.take_back(num_left)
                raise
            return True
        return False

    def _step(self, closed_by: str) -> None:
        started_at = self._clock.now()
        started = self._clock.monotonic_seconds()
        before = self._progress
        closed = self._batcher.close(closed_by, started, started_at.timestamp())
        self._report.batch_closed()
        inspection = self._guards.inspect(closed, self._group_version or before.newest_version)
        batch, knobs = inspection.batch, self._guards.state
        step = before.step + 1
        archived: ArchivedBatch | None = None
        result: StepResult | None = None
        if batch.candidates:
            samples = self._policy.taught([candidate.sample for candidate in batch.candidates])
            archived = self._archive.write(before.lineage, step, samples)
            if not inspection.held:
                rate = self._schedule.at(self._policy.num_updates) * self._guards.learning_rate_factor
                result = self._policy.train_step(samples, archived, rate, self._guards.controls())
        changed = result is not None and result.changed
        if changed and self._group_version is None:
            self._group_version = before.newest_version + 1
        measured = _finite({**(result.metrics if result is not None else {}), **inspection.measurements})
        blamed: dict[str, Breach] = {} if result is None else dict(result.dropped)
        held = [*inspection.held, *(result.held if result is not None else ())]
        actions = self._guards.conclude(measured, dropped=[*inspection.reasons, *blamed.values()], held=held)
        by_guards = [
            guard_drop(each, blamed[each.sample.sample_id])
            for each in batch.candidates
            if each.sample.sample_id in blamed
        ]
        culprits = [*_non_finite(batch, result), *inspection.dropped, *by_guards]
        unchanged_reason = "" if changed else _unchanged_reason(result, bool(inspection.held))
        self._count_drops(batch, culprits)
        num_trained = 0 if unchanged_reason == UnchangedReason.HELD else len(closed.candidates) - len(culprits)
        waiting = [*waiting_samples(self._batcher.waiting()), *self._reader.expected]
        self._batcher.forget_before(self._retained_since())
        after = before.model_copy(
            update={
                "step": step,
                "seen_offsets": self._reader.seen_offsets,
                "waiting": waiting,
                "baselines": self._batcher.baselines,
                "knobs": self._guards.state,
                "drop_counts": dict(self._batcher.drop_counts),
                "samples_trained": before.samples_trained + num_trained,
            }
        )
        finished_at = self._clock.now()
        event = train_step_event(
            batch,
            culprits,
            lineage=before.lineage,
            policy=self._settings.policy_name,
            step=step,
            base_version=before.weight_version,
            weight_version=self._group_version if changed else None,
            unchanged_reason=unchanged_reason,
            batch_uri=archived.path.resolve().as_uri() if archived is not None else "",
            batch_sha256=archived.sha256 if archived is not None else "",
            next_offsets={str(partition): offset for partition, offset in sorted(after.next_offsets.items())},
            metrics=measured,
            guards=actions,
            knobs=knobs,
            started_at=started_at,
            finished_at=finished_at,
        )
        dead_letters = [*before.dead_letters, *self._reader.take_dead_letters()]
        after = after.model_copy(update={"unannounced": [*before.unannounced, event], "dead_letters": dead_letters})
        self._progress = after
        seconds = self._clock.monotonic_seconds() - started
        self._tell(actions, step)
        self._observe(event.metrics, "changed" if changed else event.unchanged_reason, seconds, result is not None)
        self._logger.info(
            "step",
            step=step,
            closed_by=closed_by,
            samples=len(event.samples),
            drops=len(event.drops),
            makes_version=event.weight_version,
            unchanged_reason=event.unchanged_reason or None,
            seconds=round(seconds, 2),
        )
        if len(after.unannounced) >= self._settings.checkpoint_every_steps:
            self._hand_over()
        elif self._group_version is not None:
            # Not published yet, but no longer the version before: what waits is older by one.
            self._batcher.set_version(self._group_version, self._clock.monotonic_seconds())
        self._show_position()

    def _hand_over(self) -> None:
        """Checkpoint, artefact and events, on the finisher's thread; then the next group of steps begins."""
        self._finisher.join()  # before the snapshot, so that never more than one is in memory
        turns = self._ledger.take(forget_before=self._retained_since())  # after the join: those before are on the disk
        progress = self._progress.model_copy(update={"turns": turns.mark})
        if self._group_version is not None:
            progress = progress.model_copy(
                update={
                    "base_version": progress.weight_version,
                    "weight_version": self._group_version,
                    "newest_version": self._group_version,
                }
            )
            self._group_version = None
        started = self._clock.monotonic_seconds()
        snapshot = self._policy.snapshot()
        self._metrics.observe("snapshot_seconds", self._clock.monotonic_seconds() - started)
        self._finisher.submit(FinishedStep(snapshot, progress, turns))
        self._progress = progress.announced()
        self._batcher.set_version(progress.newest_version, self._clock.monotonic_seconds())

    def _retained_since(self) -> float:
        """What is older need not be remembered, in seconds since 1970."""
        return self._clock.now().timestamp() - self._settings.trained_retention_days * _SECONDS_PER_DAY

    def _count_drops(self, batch: ClosedBatch, culprits: list[DroppedSample]) -> None:
        for dropped in culprits:
            self._batcher.drop_counts[dropped.reason.value] += 1
        for dropped in [*batch.drops, *culprits]:
            self._metrics.increment("samples_dropped_total", reason=dropped.reason)

    def _tell(self, actions: Sequence[GuardAction], step: int) -> None:
        for action in actions:
            self._metrics.increment("guard_actions_total", guard=action.guard, action=action.action)
            told = action.model_dump(exclude_defaults=True)
            (self._logger.info if action.action == DECAY else self._logger.warning)("guard", step=step, **told)
        for name, value in self._guards.state.items():
            self._metrics.set("guard_knob", value, knob=name)

    def _observe(self, values: Mapping[str, float], outcome: str, seconds: float, trained: bool) -> None:
        self._metrics.increment("train_steps_total", result=outcome)
        if trained:
            self._metrics.observe("train_step_seconds", seconds)
        for name, value in values.items():
            self._metrics.set("train_metric", value, measurement=name)
        self._report.update(last_step_metrics=dict(values), last_step_outcome=outcome, last_step_seconds=seconds)

    def _show_position(self) -> None:
        progress = self._progress
        self._metrics.set("train_step", progress.step)
        self._report.update(
            lineage=progress.lineage,
            step=progress.step,
            weight_version=progress.weight_version,
            samples_trained=progress.samples_trained,
            drops=dict(self._batcher.drop_counts),
            next_offsets={str(partition): offset for partition, offset in sorted(progress.next_offsets.items())},
        )


def _unchanged_reason(result: StepResult | None, is_held: bool) -> str:
    if is_held:
        return UnchangedReason.HELD.value
    if result is None:
        return NO_SAMPLES
    return str(result.unchanged_reason or "")


def _non_finite(batch: ClosedBatch, result: StepResult | None) -> list[DroppedSample]:
    blamed = set(result.non_finite_samples) if result is not None else set[str]()
    return [
        DroppedSample(
            sample_id=candidate.sample.sample_id,
            turn_id=candidate.turn_id,
            ref=candidate.ref,
            reason=DropReason.NON_FINITE,
            detail=f"its loss is not finite ({candidate.sample.response_ids.size} response tokens)",
        )
        for candidate in batch.candidates
        if candidate.sample.sample_id in blamed
    ]


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    """JSON has no NaN: a measurement that is not a number is left out."""
    return {name: value for name, value in values.items() if math.isfinite(value)}
