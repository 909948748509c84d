"""`clawstream.sample`: what the trainer learns from."""

from typing import ClassVar

from pydantic import AwareDatetime, Field, model_validator

from schemas.arrays import NumberArray
from schemas.events.base import Event, Part, RecordReference, RolloutPosition, VersionSpan


class SampleRevision(Part):
    """Orders the samples of one turn. Compared field by field, in this order."""

    promotion_epoch: int = Field(ge=0)
    """Promotion epoch of the judge spec."""
    explicit: bool
    """Explicit evidence outranks what a judge inferred."""
    next_state_offset: int = Field(ge=0)
    """A later next state outranks an earlier one."""

    @property
    def order(self) -> tuple[int, bool, int]:
        """What to compare."""
        return (self.promotion_epoch, self.explicit, self.next_state_offset)


class TeacherSignal(Part):
    """Log-probs of the response's own ids under the hinted prompt. Always at temperature 1."""

    logprobs: NumberArray
    """float32 [response_tokens] in nats."""
    top_ids: NumberArray | None = None
    """int32 [response_tokens, k]: the teacher's k likeliest ids."""
    top_logprobs: NumberArray | None = None
    """float32 [response_tokens, k] in nats."""
    support_ids: NumberArray | None = None
    """int32 [response_tokens, k]: the student's k likeliest ids when the teacher looked, for losses on those."""
    support_logprobs: NumberArray | None = None
    """float32 [response_tokens, k] in nats: the teacher's log-probs of `support_ids`."""
    hint: str
    """The hint that was used; empty for a teacher without one. With several, that of the most tokens."""
    hint_source: str
    """`user` or `judge`."""
    hints: list[str] = Field(default=[])
    """All hints that were used, when every token has one of its own; else empty."""
    hint_of_token: NumberArray | None = None
    """int32 [response_tokens]: index into `hints`."""
    selection: str = ""
    """How the hint was chosen: `longest`, `sequence_optimal`..., or an import path."""
    model: str
    """Name and revision of the teacher."""
    engine: str
    """What computed the log-probs."""

    @model_validator(mode="after")
    def _shapes_agree(self) -> "TeacherSignal":
        tokens = self.logprobs.element_count
        pairs = (("top", self.top_ids, self.top_logprobs), ("support", self.support_ids, self.support_logprobs))
        for name, ids, logprobs in pairs:
            shapes = (None if ids is None else ids.shape, None if logprobs is None else logprobs.shape)
            if shapes[0] != shapes[1] or (shapes[0] is not None and (len(shapes[0]) != 2 or shapes[0][0] != tokens)):
                raise ValueError(f"teacher: {name} ids and log-probs have shapes {shapes}, not [{tokens}, k] both")
        if self.hint_of_token is not None and self.hint_of_token.shape != [tokens]:
            raise ValueError(f"teacher: hint_of_token has shape {self.hint_of_token.shape}, not [{tokens}]")
        return self


class TeacherRequest(Part):
    """What a teacher inside the trainer is to compute: the log-probs of the response under this prompt."""

    prompt_ids: NumberArray
    """int32 [hinted_prompt_tokens]."""
    hint: str
    """The hint in that prompt."""
    hint_source: str
    """`user` or `judge`."""
    selection: str = ""
    """How the hint was chosen."""


class SampleEvent(Event):
    """A turn, a score and the teacher's signal. Self-contained for training."""

    event_type: ClassVar[str] = "clawstream.sample"
    content_fields: ClassVar[frozenset[str]] = frozenset(
        {
            "prompt_ids",
            "response_ids",
            "behaviour_logprobs",
            "teacher",
            "teacher_request",
        }
    )

    sample_id: str = Field(min_length=1)
    """Derived from turn and score."""
    turn_id: str = Field(min_length=1)
    """The key on the log: a later revision replaces an earlier one."""
    session_id: str = Field(min_length=1)
    """The conversation; decides the partition."""
    principal: str = Field(min_length=1)
    """Whom the API key belongs to."""
    policy: str = Field(min_length=1)
    """The policy that answered."""
    revision: SampleRevision
    """The highest that the trainer has seen counts."""
    turn_ref: RecordReference
    """Where the turn is on the log."""
    next_state_ref: RecordReference
    """Where the evidence is on the log."""
    score_id: str = Field(min_length=1)
    """The score behind the reward."""
    judge_spec_hash: str = Field(min_length=1)
    """The judge spec behind the score."""
    prompt_ids: NumberArray
    """int32 [prompt_tokens]."""
    response_ids: NumberArray
    """int32 [response_tokens]: every one of them is trained, and nothing else."""
    behaviour_logprobs: NumberArray
    """float32 [response_tokens] in nats, at `sampling_temperature`."""
    sampling_temperature: float = Field(gt=0)
    """Temperature of the behaviour log-probs."""
    version_spans: list[VersionSpan]
    """The weights of every response token."""
    truncated: bool = False
    """True when the token cap ended the answer."""
    reward: float | None = Field(default=None, ge=-1, le=1)
    """The RL component's reward; null when the sample has no RL component. In a rollout: its outcome."""
    step_reward: float | None = Field(default=None, ge=-1, le=1)
    """A judge's or the environment's reward for this step of a rollout, kept apart from the outcome."""
    teacher: TeacherSignal | None = None
    """The distillation component's signal; null when the sample has none."""
    teacher_request: TeacherRequest | None = None
    """In place of `teacher`, when the trainer's own frozen copy of the model is the teacher: it computes the log-probs.
    A trainer without such a copy (`trainer.own_teacher`) has no distillation component for this sample."""
    rollout: RolloutPosition | None = None
    """Position in an environment's rollout, if any. A sample of an outcome knows where the rollout ended."""
    tokenizer_fingerprint: str
    """Copied from the turn."""
    created_at: AwareDatetime
    """When the sample was assembled."""

    @model_validator(mode="after")
    def _lengths_agree(self) -> "SampleEvent":
        tokens = self.response_ids.element_count
        lengths = {"behaviour_logprobs": self.behaviour_logprobs.element_count}
        if self.teacher is not None:
            lengths["teacher.logprobs"] = self.teacher.logprobs.element_count
        wrong = {name: length for name, length in lengths.items() if length != tokens}
        if wrong:
            raise ValueError(f"sample {self.sample_id}: {tokens} response ids but lengths {wrong}")
        if tokens == 0 or self.prompt_ids.element_count == 0:
            raise ValueError(f"sample {self.sample_id}: prompt and response need at least one token each")
        if not self.version_spans or self.version_spans[-1].end != tokens:
            raise ValueError(f"sample {self.sample_id}: version spans do not cover {tokens} tokens")
        if self.teacher is not None and self.teacher_request is not None:
            raise ValueError(f"sample {self.sample_id}: a teacher's signal and a request for one")
        if all(one is None for one in (self.reward, self.step_reward, self.teacher, self.teacher_request)):
            raise ValueError(f"sample {self.sample_id}: neither a reward nor a step's reward nor a teacher's signal")
        return self
