"""`clawstream.train-step`: what a training step did, with every sample and every drop."""

from enum import StrEnum
from typing import ClassVar

from pydantic import AwareDatetime, Field

from schemas.events.base import Event, Part, RecordReference
from schemas.events.sample import SampleRevision


class DropReason(StrEnum):
    """Why a sample was not trained."""

    SUPERSEDED = "superseded"
    """A higher revision of the same turn came before it was trained."""
    ALREADY_TRAINED = "already_trained"
    """The turn was trained before: a fact that a later revision cannot undo."""
    TOO_OLD = "too_old"
    """Older than the largest age allowed."""
    FUTURE_VERSION = "future_version"
    """Claims a version that was never published."""
    ZERO_ADVANTAGE = "zero_advantage"
    """A neutral reward, or the same as all others of its group, and no teacher: nothing to learn. Trained ids do not
    hold it."""
    TOO_LONG = "too_long"
    """Prompt and response exceed the token budget."""
    NON_FINITE = "non_finite"
    """A number is NaN or infinite."""
    OTHER_POLICY = "other_policy"
    """Belongs to another policy."""
    OTHER_TOKENIZER = "other_tokenizer"
    """Was made with another vocabulary or chat template."""
    NO_COMPONENT = "no_component"
    """The loss learns nothing from what the sample carries, for example a hint alone under `binary`."""
    GUARD = "guard"
    """A guard of policy `drop` found it beyond a limit."""
    TOMBSTONE = "tombstone"
    """The sample was removed before it was trained."""


class TrainedSample(Part):
    """One sample of a step."""

    sample_id: str
    """The sample."""
    turn_id: str
    """Its turn: trained at most once per lineage."""
    revision: SampleRevision
    """The revision that was trained."""
    ref: RecordReference
    """Where the sample was on the log."""
    age: int
    """Version at the step minus the version of the turn's oldest token."""
    reward: float | None = None
    """RL reward, if any."""
    response_tokens: int = Field(ge=0)
    """Number of tokens of the answer."""
    advantage: float | None = None
    """What the RL component made of the reward; null without one."""
    stale_tokens: int = Field(default=0, ge=0)
    """Tokens that were left out because their weights were too old."""
    has_teacher: bool = False
    """Whether it had a part in distillation."""
    principal: str = ""
    """Whose turn it is; empty in events that did not say it yet."""
    sampling_temperature: float | None = None
    """Temperature that the answer was sampled with; null in events that did not say it yet."""


class DroppedSample(Part):
    """One sample that was read and not trained."""

    sample_id: str
    """The sample; empty for a tombstone."""
    turn_id: str
    """Its turn."""
    ref: RecordReference
    """Where it was on the log."""
    reason: DropReason
    """Why."""
    detail: str = ""
    """The numbers behind the reason."""


class GuardAction(Part):
    """What a guard of one of the invariants found in a step, and did."""

    guard: str
    """`exploration`, `signal`, `shift` or `effective_samples`."""
    action: str
    """`alert`, `adapt`, `hold`, `drop`, or `decay`: all is well again, and a knob goes back toward its configured
    value."""
    measurement: str = ""
    """What was beyond its limit; empty for `decay`."""
    value: float | None = None
    """What was measured."""
    limit: float | None = None
    """The limit that it was beyond."""
    knob: str = ""
    """What was turned: `entropy_coefficient`, `learning_rate` (a factor on the schedule) or `kl_coefficient`."""
    before: float | None = None
    """The knob's value in this step."""
    after: float | None = None
    """Its value from the next step on."""
    samples: int = Field(default=0, ge=0)
    """Samples that were dropped."""


class TrainStepEvent(Event):
    """A training step. With the archived batch, the whole lineage can be told without the compacted topic."""

    event_type: ClassVar[str] = "clawstream.train-step"

    train_step_id: str = Field(min_length=1)
    """Derived from lineage and step."""
    lineage: str = Field(min_length=1)
    """The training run."""
    policy: str = Field(min_length=1)
    """The policy."""
    step: int = Field(ge=1)
    """Number of the step in the lineage, from 1."""
    base_version: int = Field(ge=0)
    """The version that the step started from."""
    weight_version: int | None = Field(default=None, ge=0)
    """The version that it made; null when the weights did not change."""
    closed_by: str
    """What closed the batch: `count`, `age`, or `drops` (so many that they would not fit into one event)."""
    samples: list[TrainedSample]
    """Every sample that was trained."""
    drops: list[DroppedSample]
    """Every sample that was read since the step before and not trained."""
    unchanged_reason: str = ""
    """Why the weights did not change: `no_samples` (only drops), `all_masked`, `zero_advantage`, `zero_gradient`,
    `non_finite`, `held` (by a guard); empty when they did."""
    batch_uri: str = ""
    """Where the packed batch is kept (safetensors); empty when there was none."""
    batch_sha256: str = ""
    """Its checksum in hexadecimal."""
    next_offsets: dict[str, int] = Field(default={})
    """Partition of `samples` (as text) to the next offset to read: the same numbers as in the checkpoint."""
    metrics: dict[str, float] = Field(default={})
    """Named measurements of the step."""
    guards: list[GuardAction] = Field(default=[])
    """What the guards found and did; empty when every measurement was within its limits."""
    knobs: dict[str, float] = Field(default={})
    """What guards may turn, as it was in this step; `learning_rate` is a factor on the schedule."""
    started_at: AwareDatetime
    """When the batch was closed."""
    finished_at: AwareDatetime
    """When the weights were updated."""
