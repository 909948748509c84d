"""`clawstream.turn`: one generation, exactly as the engine ran it."""

from enum import StrEnum
from typing import ClassVar

from pydantic import AwareDatetime, Field, model_validator

from schemas.arrays import NumberArray
from schemas.events.base import Event, Message, Part, RolloutPosition, TurnType, VersionSpan


class UntrainableReason(StrEnum):
    """Why the trainer must not learn from a turn although it was served."""

    SIDE_TURN = "side_turn"
    """It is not part of the conversation proper."""
    LENGTH_MISMATCH = "length_mismatch"
    """The engine gave another number of log-probs than of ids."""
    NON_FINITE_LOGPROB = "non_finite_logprob"
    """A log-prob is NaN, infinite or missing."""
    EMPTY_RESPONSE = "empty_response"
    """Nothing was sampled."""
    UNKNOWN_VERSION = "unknown_version"
    """The engine did not say which weights it used, or the spans do not cover every token."""
    ALTERED_DISTRIBUTION = "altered_distribution"
    """T = 0, top-p, top-k, a penalty or a grammar changed what was sampled from: the log-probs are not exact."""
    CLIENT_GONE = "client_gone"
    """The client left before the answer was complete."""
    ENGINE_ABORTED = "engine_aborted"
    """The engine ended the generation by itself."""
    RENDERING_REPAIRED = "rendering_repaired"
    """The history could not be rendered as sent (for example unparsable tool arguments)."""
    NO_LOGPROBS = "no_logprobs"
    """The engine cannot give exact ids and log-probs."""
    IMPORTED = "imported"
    """It comes from a chat log: something else wrote it, and its log-probs are not those of a sampler."""
    OVERSIZED = "oversized"
    """The request is too large for the log: its messages and tools were left out of the event."""


class SamplingParameters(Part):
    """What the response was sampled with, as the engine was told."""

    temperature: float = Field(ge=0)
    """Softmax temperature. The log-probs are of the distribution at this temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass; 1 is off."""
    top_k: int = Field(default=-1)
    """Number of candidates; -1 is off."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Smallest probability relative to the best; 0 is off."""
    frequency_penalty: float = 0.0
    """0 is off."""
    presence_penalty: float = 0.0
    """0 is off."""
    repetition_penalty: float = 1.0
    """1 is off."""
    seed: int | None = None
    """The client's seed, if it gave one."""
    max_new_tokens: int = Field(ge=0)
    """Cap on the number of sampled tokens."""
    stop: list[str] = Field(default=[])
    """Stop strings that the client gave."""
    constrained: bool = False
    """True when a grammar or a JSON schema restricted the tokens."""

    @property
    def is_exact(self) -> bool:
        """Whether the log-probs at `temperature` are those of the distribution that was sampled."""
        return (
            self.temperature > 0
            and self.top_p == 1.0
            and self.top_k == -1
            and self.min_p == 0.0
            and self.frequency_penalty == 0.0
            and self.presence_penalty == 0.0
            and self.repetition_penalty == 1.0
            and not self.constrained
        )


class ParentEvidence(Part):
    """How the parent turn was found."""

    rule: str
    """The strongest evidence: `answer`, `session_header`, `session_hint`, `summary`, or `none` for a new session."""
    candidates: int = Field(default=0, ge=0)
    """How many turns had the same answer."""
    ambiguous: bool = False
    """True when more than one candidate fitted equally well and the newest was taken."""


class TurnEvent(Event):
    """One generation: what was asked, what the engine saw, what it sampled, and under which weights."""

    event_type: ClassVar[str] = "clawstream.turn"
    content_fields: ClassVar[frozenset[str]] = frozenset(
        {
            "request_messages",
            "tools",
            "response_message",
            "prompt_ids",
            "response_ids",
            "response_logprobs",
            "sampling",
        }
    )

    turn_id: str = Field(min_length=1)
    """Minted at the gateway."""
    session_id: str = Field(min_length=1)
    """The conversation: a tree of turns."""
    parent_turn_id: str | None = None
    """The turn whose answer this one follows; null for the first."""
    parent_evidence: ParentEvidence
    """How the parent was found."""
    depth: int = Field(default=0, ge=0)
    """Number of ancestors."""
    principal: str = Field(min_length=1)
    """Whom the API key belongs to. Never the key itself."""
    turn_type: TurnType = TurnType.MAIN
    """main or side."""
    turn_type_reason: str = "default"
    """What decided the type: `default`, `header`, or the name of a client profile's rule."""
    client_profile: str = "generic"
    """Name of the profile that recognised the client."""
    response_id: str = Field(min_length=1)
    """The OpenAI response id that the client was given. Feedback refers to it."""
    policy: str = Field(min_length=1)
    """Name of the policy that answered."""
    request_messages: list[Message]
    """The messages of the request, as the client sent them."""
    tools: list[Message] = Field(default=[])
    """The tool definitions of the request."""
    response_message: Message
    """The assistant message that the client received."""
    prompt_ids: NumberArray
    """int32 [prompt_tokens]: the ids that the engine was given."""
    response_ids: NumberArray
    """int32 [response_tokens]: the ids that the engine sampled, with the terminator when one was sampled."""
    response_logprobs: NumberArray
    """float32 [response_tokens]: behaviour log-probs in nats, at `sampling.temperature`."""
    version_spans: list[VersionSpan]
    """The weights of every response token; the spans cover [0, response_tokens) in order."""
    sampling: SamplingParameters
    """The sampling parameters in force."""
    finish_reason: str
    """`stop`, `length`, `tool_calls` or `abort`."""
    truncated: bool = False
    """True when the token cap ended the answer."""
    trainable: bool = True
    """False when the turn must never be trained."""
    untrainable_reason: UntrainableReason | None = None
    """Set exactly when `trainable` is false."""
    untrainable_detail: str = ""
    """The numbers behind the reason, for example both lengths."""
    tokenizer_fingerprint: str
    """sha256 over vocabulary and chat template: teacher and trainer refuse another one."""
    renderer: str
    """Name of the renderer that made `prompt_ids`."""
    engine: str
    """Name of the engine that answered."""
    imported_from: str = ""
    """Format of the chat log that it was imported from (`openai`, `openclaw`); empty for a turn that was served. The
    log-probs of an imported turn were scored by the policy afterwards: they are no behaviour log-probs."""
    rollout: RolloutPosition | None = None
    """Position in an environment's rollout, if any."""
    started_at: AwareDatetime
    """When the request arrived."""
    first_token_at: AwareDatetime | None = None
    """When the first token came from the engine."""
    finished_at: AwareDatetime
    """When the last token came from the engine."""

    @model_validator(mode="after")
    def _trainable_means_consistent(self) -> "TurnEvent":
        if self.trainable == (self.untrainable_reason is not None):
            raise ValueError("untrainable_reason must be set exactly when trainable is false")
        if not self.trainable:
            return self
        tokens = self.response_ids.element_count
        if self.response_logprobs.element_count != tokens:
            raise ValueError(f"{tokens} response ids but {self.response_logprobs.element_count} log-probs")
        position = 0
        for span in self.version_spans:
            if span.start != position or span.end <= span.start:
                raise ValueError(f"version spans must cover the response in order: found {span} at token {position}")
            position = span.end
        if position != tokens:
            raise ValueError(f"version spans cover {position} of {tokens} tokens")
        return self
