"""What the engine sampled, kept exactly: ids, log-probs and version spans. Nothing is cut, padded or made up."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from clawstream.engine.interface import GenerationChunk, TopLogprobs
from schemas.events.base import TurnType, VersionSpan
from schemas.events.turn import SamplingParameters, UntrainableReason

_MAX_FLOAT32 = 3.4e38
"""The log keeps log-probs as float32: beyond this they would become infinite."""


@dataclass(frozen=True, slots=True)
class Untrainable:
    """Why a turn must not be trained."""

    reason: UntrainableReason
    detail: str
    """The numbers behind it."""


@dataclass(slots=True)
class Capture:
    """One answer as it comes."""

    token_ids: list[int] = field(default_factory=list[int])
    """[response_tokens]"""
    logprobs: list[float | None] = field(default_factory=list[float | None])
    """[response_tokens] if the engine is right; None where it sent null."""
    top_logprobs: list[TopLogprobs] = field(default_factory=list[TopLogprobs])
    """[response_tokens], or empty where the client wants none. For the client, not for the log."""
    version_spans: list[VersionSpan] = field(default_factory=list[VersionSpan])
    finish_reason: str | None = None
    """The engine's; None while the answer is coming, or when it broke off."""
    cached_tokens: int = 0

    def add(self, chunk: GenerationChunk) -> None:
        """Takes the next chunk."""
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.top_logprobs += chunk.top_logprobs
        self.cached_tokens = max(self.cached_tokens, chunk.cached_tokens)
        if chunk.finish_reason is not None:
            self.finish_reason = chunk.finish_reason
            self.version_spans = list(chunk.version_spans)

    def recorded_logprobs(self) -> list[float]:
        """For the event: null as NaN, which only an untrainable turn can hold."""
        return [math.nan if value is None else value for value in self.logprobs]


def why_untrainable(
    capture: Capture,
    *,
    client_gone: bool,
    sampling: SamplingParameters,
    repaired: str,
    turn_type: TurnType,
) -> Untrainable | None:
    """The first reason against training, or None. Faults of the data come before choices of the client."""
    if client_gone:
        return Untrainable(UntrainableReason.CLIENT_GONE, f"after {len(capture.token_ids)} tokens")
    if capture.finish_reason in (None, "abort"):
        return Untrainable(UntrainableReason.ENGINE_ABORTED, f"after {len(capture.token_ids)} tokens")
    if (fault := _fault_of_arrays(capture)) is not None:
        return fault
    if repaired:
        return Untrainable(UntrainableReason.RENDERING_REPAIRED, repaired)
    if not sampling.is_exact:
        return Untrainable(UntrainableReason.ALTERED_DISTRIBUTION, describe_alteration(sampling))
    if turn_type is TurnType.SIDE:
        return Untrainable(UntrainableReason.SIDE_TURN, "")
    return None


def _fault_of_arrays(capture: Capture) -> Untrainable | None:
    """Breaks of: one finite log-prob for every id, and version spans that cover them all in order."""
    tokens, logprobs = len(capture.token_ids), len(capture.logprobs)
    if tokens == 0:
        return Untrainable(UntrainableReason.EMPTY_RESPONSE, "no token was sampled")
    if logprobs == 0:
        return Untrainable(UntrainableReason.NO_LOGPROBS, f"{tokens} ids without log-probs")
    if tokens != logprobs:
        return Untrainable(UntrainableReason.LENGTH_MISMATCH, f"{tokens} ids, {logprobs} log-probs")
    for index, value in enumerate(capture.logprobs):
        if value is None or not abs(value) <= _MAX_FLOAT32:
            return Untrainable(UntrainableReason.NON_FINITE_LOGPROB, f"log-prob of token {index} is {value}")
    covered = covered_tokens(capture.version_spans)
    if covered != tokens:
        return Untrainable(UntrainableReason.UNKNOWN_VERSION, f"version spans cover {covered or 0} of {tokens} tokens")
    return None


def covered_tokens(spans: Sequence[VersionSpan]) -> int | None:
    """How many tokens from the first on the spans cover, or None when they leave gaps, overlap or are empty."""
    position = 0
    for span in spans:
        if span.start != position or span.end <= span.start:
            return None
        position = span.end
    return position


def describe_alteration(sampling: SamplingParameters) -> str:
    """Which parameters changed the sampled distribution."""
    neutral = SamplingParameters(temperature=1.0, max_new_tokens=0)
    names = ("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "constrained")
    altered = [
        f"{name}={getattr(sampling, name)}" for name in names if getattr(sampling, name) != getattr(neutral, name)
    ]
    if sampling.temperature == 0:
        altered.insert(0, "temperature=0")
    return ", ".join(altered)
