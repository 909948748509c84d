"""Which batches are trained again, from where, and what the new lineage is called. Pure.

A lineage's id follows from everything that decides its weights: the same retraining has the same id on every machine.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from clawstream import ids
from clawstream.errors import LineageError, SettingsError
from clawstream.tracing.archive import batch_path
from schemas.events import TrainStepEvent
from schemas.events.train_step import DropReason
from services.trainer.batch_archive import ArchivedBatch
from services.trainer.guards.bounds import Bound
from services.trainer.guards.controls import StepControls
from services.trainer.guards.knobs import Knob
from services.trainer.guards.settings import GuardPolicy
from services.trainer.sample import UnchangedReason
from services.trainer.settings import TrainerSettings

DECIDING_SETTINGS = (
    "seed",
    "dtype",
    "lora",
    "tensor_parallel_size",
    "tokens_per_micro_batch",
    "recompute_activations",
    "algorithm",
    "learning_rate",
    "updates_per_batch",
    "optimizer",
)
"""Settings of the trainer that change weights, given the batches."""


@dataclass(frozen=True, slots=True)
class Guarded:
    """What guards did to a step, as its event says."""

    knobs: Mapping[str, float] = field(default_factory=dict[str, float])
    """What they had turned: the learning rate's factor, and options of the loss."""
    dropped: frozenset[str] = frozenset()
    """Samples that they left out."""
    held: bool = False
    """Whether they allowed no update at all."""
    bounds: tuple[Bound, ...] = ()
    """What held a part of the batch, where it was cut into several."""

    @classmethod
    def of(cls, step: TrainStepEvent) -> "Guarded":
        """Everything that changed the step's weights."""
        holds = [action for action in step.guards if action.action == GuardPolicy.HOLD]
        return cls(
            dict(step.knobs),
            frozenset(each.sample_id for each in step.drops if each.reason is DropReason.GUARD),
            step.unchanged_reason == UnchangedReason.HELD,
            tuple(
                Bound(action.guard, action.measurement, low=action.limit)
                if action.value < action.limit
                else Bound(action.guard, action.measurement, high=action.limit)
                for action in holds
                if action.value is not None and action.limit is not None
            ),
        )

    @property
    def learning_rate_factor(self) -> float:
        """Of the scheduled learning rate."""
        return self.knobs.get(Knob.LEARNING_RATE.value, 1.0)

    def controls(self) -> StepControls:
        """For the step that is made again."""
        coefficients = {name: value for name, value in self.knobs.items() if name != Knob.LEARNING_RATE.value}
        return StepControls(coefficients, hold=self.bounds)

    def as_document(self) -> dict[str, Any]:
        """As JSON; empty where nothing was done."""
        found = {
            "knobs": dict(self.knobs),
            "dropped": sorted(self.dropped),
            "held": self.held,
            "bounds": [bound.as_document() for bound in self.bounds],
        }
        return {name: value for name, value in found.items() if value}


@dataclass(frozen=True, slots=True)
class RetrainingBatch:
    """One batch of the run that is repeated."""

    step: int
    """Its step there."""
    archived: ArchivedBatch
    weight_version: int | None
    """The version that it made there; null when it changed nothing."""
    lineage: str
    guarded: Guarded = field(default_factory=Guarded)
    """What guards did there, and do again."""


@dataclass(frozen=True, slots=True)
class StepRange:
    """Steps of a lineage, both ends included."""

    first: int
    last: int | None
    """None: to the newest."""


def step_range(text: str) -> StepRange:
    """`3-7`, `3-` or `5`. Raises SettingsError."""
    found = re.fullmatch(r"(\d+)(-(\d*))?", text.strip())
    if found is None:
        raise SettingsError(f"{text!r} is no range of steps: write 3-7, 3- or 5")
    first = int(found[1])
    last = first if found[2] is None else (int(found[3]) if found[3] else None)
    if first < 1 or (last is not None and last < first):
        raise SettingsError(f"{text!r} is no range of steps: they count from 1, and the first is not after the last")
    return StepRange(first, last)


def choose_batches(
    steps: Iterable[TrainStepEvent],
    policy: str,
    lineage: str | None,
    wanted: StepRange,
    *,
    with_guards: bool = True,
) -> list[RetrainingBatch]:
    """The batches of a lineage's steps, in order, each `with_guards` as they were or without what they did. Steps
    without a batch (only drops) have nothing to train.

    Without `lineage` the policy must have one only. Raises LineageError when that is not so, when a step inside the
    range is not on the log, and when there is no batch at all.
    """
    of_policy = [step for step in steps if step.policy == policy]
    lineages = sorted({step.lineage for step in of_policy})
    if lineage is None:
        if len(lineages) != 1:
            raise LineageError(
                f"policy {policy!r} has {len(lineages)} lineages on the log ({', '.join(lineages) or 'no step at all'})"
                ": name one with --lineage"
            )
        lineage = lineages[0]
    chosen = {step.step: step for step in of_policy if step.lineage == lineage}
    if not chosen:
        raise LineageError(f"no step of lineage {lineage!r} of policy {policy!r} is on the log")
    last = wanted.last if wanted.last is not None else max(chosen)
    missing = [number for number in range(wanted.first, last + 1) if number not in chosen]
    if missing:
        raise LineageError(
            f"lineage {lineage!r}: {len(missing)} of the steps {wanted.first} to {last} are not on the log, first step "
            f"{missing[0]}: their retention has passed, or they were never made"
        )
    batches = [
        RetrainingBatch(
            step.step,
            ArchivedBatch(batch_path(step.batch_uri), step.batch_sha256),
            step.weight_version,
            step.lineage,
            Guarded.of(step) if with_guards else Guarded(),
        )
        for step in (chosen[number] for number in range(wanted.first, last + 1))
        if step.batch_uri
    ]
    if not batches:
        raise LineageError(f"lineage {lineage!r}: steps {wanted.first} to {last} have no batch")
    return batches


def lineage_of(start: str, batches: Sequence[RetrainingBatch], settings: TrainerSettings) -> str:
    """The new lineage's id. `start` names the weights by their content."""
    deciding = settings.model_dump(mode="json", include=set(DECIDING_SETTINGS))
    canonical = orjson.dumps(deciding, option=orjson.OPT_SORT_KEYS).decode()
    guarded = [
        orjson.dumps([batch.step, batch.guarded.as_document()], option=orjson.OPT_SORT_KEYS).decode()
        for batch in batches
        if batch.guarded.as_document()
    ]
    return ids.derive("retraining", start, canonical, *(batch.archived.sha256 for batch in batches), *guarded)
