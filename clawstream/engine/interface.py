"""What clawstream asks of an inference engine.

Conventions, measured on SGLang 0.5.23: log-probs of sampled tokens are those of the temperature-scaled distribution;
log-probs of given tokens are always at temperature 1. Weight versions are decimal numbers sent as text.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from schemas.events.base import VersionSpan


class PauseMode(StrEnum):
    """What happens to running answers while weights change."""

    RETRACT = "retract"
    """They go on with their KV rebuilt under the new weights, so that version spans are true. The default."""
    IN_PLACE = "in_place"
    """They keep the old KV."""
    ABORT = "abort"
    """They end."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One answer to be sampled."""

    request_id: str
    """Ours, so that the answer can be aborted."""
    input_ids: Sequence[int]
    """[prompt_tokens]"""
    sampling_parameters: Mapping[str, Any]
    """In SGLang's names: temperature, top_p, max_new_tokens, stop, stop_token_ids..."""
    top_logprobs: int = 0
    """How many of the likeliest tokens are wanted beside each sampled one."""
    on_accepted: Callable[[], None] = lambda: None
    """Called once the engine has taken the request: tokens will follow, however late."""


TopLogprobs = list[tuple[int, float]]
"""[candidates]: id and log-prob of the likeliest tokens in one place, likeliest first."""


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """What one server-sent event added. Never cumulative, whatever the engine sends."""

    token_ids: list[int]
    """[new_tokens]"""
    logprobs: list[float | None]
    """[new_tokens] in nats at the sampling temperature. None where the engine sent null."""
    top_logprobs: list[TopLogprobs] = field(default_factory=list[TopLogprobs])
    """[new_tokens] of the same distribution; empty when none were asked for."""
    finish_reason: str | None = None
    """`stop`, `length` or `abort` in the last chunk, else None."""
    finish_detail: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The engine's own finish record, for example which stop matched."""
    version_spans: list[VersionSpan] = field(default_factory=list[VersionSpan])
    """In the last chunk: the weights of every response token."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Log-probs of given ids."""

    token_ids: list[int]
    """[response_tokens]: echoed by the engine; equal to what was asked for, or EngineProtocolError was raised."""
    logprobs: list[float]
    """[response_tokens] in nats at temperature 1."""
    top_ids: list[list[int]] | None
    """[response_tokens, k], or None when none were asked for."""
    top_logprobs: list[list[float]] | None
    """[response_tokens, k] in nats."""
    weight_version: int | None
    """The version that the engine reported, if any."""
    given_logprobs: list[list[float]] | None = None
    """[response_tokens, given] in nats: of the ids that were given, in their order; None when none were."""
    engine: str = ""
    """Name of the engine that answered."""


@dataclass(frozen=True, slots=True)
class ModelInformation:
    """What an engine says about itself."""

    model_path: str
    weight_version: int | None
    """None when the engine's answer is not a number: the version is unknown."""
    max_context_tokens: int | None
    """None when it does not say."""


class EngineClient(Protocol):
    """One engine. All methods raise EngineUnavailable, EngineRejected, EngineTimeout or EngineProtocolError."""

    @property
    def name(self) -> str:
        """Name in the configuration."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk]:
        """Streams an answer. Closing the generator early closes the connection; call `abort` as well."""
        ...

    async def generate_texts(
        self, input_ids: Sequence[int], sampling_parameters: Mapping[str, Any], *, answers: int = 1
    ) -> list[tuple[str, Mapping[str, Any]]]:
        """Whole answers as text, each with the engine's meta information: at least one, at most `answers`."""
        ...

    async def score(
        self, prompt_ids: Sequence[int], response_ids: Sequence[int], *, top_k: int = 0, given_ids: Sequence[int] = ()
    ) -> ScoredTokens:
        """Log-probs of `response_ids` after `prompt_ids`, at temperature 1, aligned by echoed id.

        `top_k` asks for the likeliest ids at every token too; `given_ids`, all different, for the log-probs of those.
        """
        ...

    async def token_texts(self, token_ids: Sequence[int]) -> list[str | None]:
        """What the engine's own tokenizer says that each id means; None where it does not say."""
        ...

    async def model_information(self) -> ModelInformation:
        """Model, weight version and limits."""
        ...

    async def is_healthy(self) -> bool:
        """Whether it answers at all. Never raises."""
        ...

    async def accepts_requests(self) -> bool:
        """Whether new requests run now; False while generation is paused. True when it does not say."""
        ...

    async def server_information(self) -> Mapping[str, Any]:
        """How it was started, in its own words. Empty when it does not say."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Holds new requests inside the engine and stops decoding."""
        ...

    async def resume(self) -> None:
        """Undoes `pause`. Harmless when nothing is paused."""
        ...

    async def load_weights(self, directory: str, weight_version: int, *, flush_cache: bool) -> None:
        """Loads a published artefact. Raises EngineRejected unless the engine's *body* says success."""
        ...

    async def flush_cache(self) -> None:
        """Empties the prefix cache."""
        ...

    async def abort(self, request_id: str) -> None:
        """Ends one answer. Harmless when it already ended."""
        ...

    async def close(self) -> None:
        """Closes connections."""
        ...
