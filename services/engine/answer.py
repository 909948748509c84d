"""One request being answered: its tokens, log-probs, text and weight versions, and what of it was not sent yet."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from services.engine.requests import GenerateBody
from services.engine.sampling import SamplingRow
from services.engine.stops import IncrementalText, StopStrings

TopLogprobs = list[tuple[float, int]]
"""[k] (log-prob in nats, token id), most likely first."""


@dataclass(frozen=True, slots=True)
class PromptReport:
    """What is known about the prompt once it has been computed."""

    cached_tokens: int
    """Prompt tokens whose keys and values were reused."""
    start: int
    """Prompt position of the first entry."""
    logprobs: list[float | None]
    """[prompt_tokens - start] in nats at temperature 1; the first is None. Empty when none were asked for."""
    top_logprobs: list[TopLogprobs | None]
    """[prompt_tokens - start] or empty"""
    given_logprobs: list[TopLogprobs | None]
    """[prompt_tokens - start] or empty: of the ids in `token_ids_logprob`, in their order"""


@dataclass(frozen=True, slots=True)
class Progress:
    """What an answer gained since the last report."""

    text: str
    token_ids: list[int]
    """[new_tokens]"""
    logprobs: list[float]
    """[new_tokens] in nats, of the temperature-scaled distribution"""
    top_logprobs: list[TopLogprobs]
    """[new_tokens], or empty when none were asked for"""
    weight_versions: list[str]
    """[new_tokens]: the weights that each was sampled from"""
    weight_version: str
    """The weights in service now"""
    prompt: PromptReport | None
    """In the first report"""
    finish_reason: dict[str, Any] | None
    """In the last report, SGLang's record"""


@dataclass(slots=True)
class Answer:
    """The mutable state of one request. Only the scheduler's thread touches it."""

    rid: str
    body: GenerateBody
    prompt_ids: list[int]
    """[prompt_tokens], at least one"""
    stop_ids: dict[int, int | str]
    """Ids that end the answer, and what is reported as matched"""
    text: IncrementalText
    stops: StopStrings
    random: Random
    publish: Callable[[Progress], None]
    """Called from the scheduler's thread: after each step when streaming, and at the end."""

    output_ids: list[int] = field(default_factory=list[int])
    """[output_tokens]"""
    slot: int | None = None
    """Where its keys and values are; None while it waits."""
    filled: int = 0
    """Leading tokens of prompt and output whose keys and values are in the slot"""
    cached_tokens: int = 0
    finish_reason: dict[str, Any] | None = None
    input_logprobs: list[float] = field(default_factory=list[float])
    """Of the prompt tokens after `logprob_start`, as far as computed"""
    input_top_logprobs: list[TopLogprobs] = field(default_factory=list[TopLogprobs])
    input_given_logprobs: list[TopLogprobs] = field(default_factory=list[TopLogprobs])
    _pending_text: str = ""
    _pending_from: int = 0
    """Output tokens that were reported"""
    _logprobs: list[float] = field(default_factory=list[float])
    _top_logprobs: list[TopLogprobs] = field(default_factory=list[TopLogprobs])
    _weight_versions: list[str] = field(default_factory=list[str])
    _prompt_reported: bool = False

    @property
    def logprob_start(self) -> int:
        """First prompt position in the report of input log-probs."""
        start = self.body.logprob_start_len
        return len(self.prompt_ids) - 1 if start == -1 or not self.body.return_logprob else start

    @property
    def goal(self) -> int:
        """How many leading tokens must be computed before a token is sampled, or the scoring is done."""
        if self.body.sampling_params.max_new_tokens > 0:
            return len(self.prompt_ids) + len(self.output_ids)
        return len(self.prompt_ids) - 1 if self.body.return_logprob else 0  # nothing follows the last token

    @property
    def next_scored_row(self) -> int:
        """The prompt position whose logits are wanted next; `len(prompt_ids) - 1` when there is none."""
        return self.logprob_start + len(self.input_logprobs)

    @property
    def largest_reusable_prefix(self) -> int:
        """Tokens that may come from a cache: the rows from here on must be computed for their logits."""
        return min(self.next_scored_row, max(self.goal - 1, 0))

    def token_ids(self, start: int, end: int) -> Sequence[int]:
        """Tokens of prompt and output, [end - start]."""
        prompt_tokens = len(self.prompt_ids)
        if end <= prompt_tokens:
            return self.prompt_ids[start:end]
        return (self.prompt_ids[start:] if start < prompt_tokens else []) + self.output_ids[
            max(start - prompt_tokens, 0) : end - prompt_tokens
        ]

    def restart(self) -> None:
        """Forget the slot's contents: everything is computed anew, under the weights now in service.

        Sampled tokens stay. So do input log-probs of a finished prompt; those of an unfinished one start again.
        """
        self.filled = 0
        if self.next_scored_row < len(self.prompt_ids) - 1:
            self.input_logprobs.clear()
            self.input_top_logprobs.clear()
            self.input_given_logprobs.clear()

    def sampling_row(self) -> SamplingRow:
        """How the next token is to be sampled. Draws one random number."""
        parameters = self.body.sampling_params
        return SamplingRow(
            temperature=parameters.temperature,
            top_k=parameters.top_k,
            top_p=parameters.top_p,
            min_p=parameters.min_p,
            uniform=self.random.random(),
            frequency_penalty=parameters.frequency_penalty,
            presence_penalty=parameters.presence_penalty,
            repetition_penalty=parameters.repetition_penalty,
            output_ids=self.output_ids,
        )

    def add_token(self, token_id: int, logprob: float, top_logprobs: TopLogprobs | None, weight_version: str) -> None:
        """Take a sampled token; sets `finish_reason` when it ends the answer.

        Stop tokens and the tokens of stop strings stay in ids and log-probs; they leave the text. An answer whose last
        allowed token is a stop token ended with `stop`.
        """
        self.output_ids.append(token_id)
        self._logprobs.append(logprob)
        if top_logprobs is not None:
            self._top_logprobs.append(top_logprobs)
        self._weight_versions.append(weight_version)
        parameters = self.body.sampling_params
        stopped = token_id in self.stop_ids
        if not stopped or parameters.no_stop_trim:
            self._add_text(self.text.add(token_id))
        if self.finish_reason is not None:
            return  # a stop string
        if stopped:
            self.finish({"type": "stop", "matched": self.stop_ids[token_id]})
        elif len(self.output_ids) >= parameters.max_new_tokens:
            self.finish({"type": "length", "length": parameters.max_new_tokens})

    def _add_text(self, text: str) -> None:
        match = self.stops.add(text)
        self._pending_text += match.text
        if match.matched is not None:
            if self.body.sampling_params.no_stop_trim:
                self._pending_text += match.matched
            self.finish_reason = {"type": "stop", "matched": match.matched}

    def finish(self, reason: dict[str, Any]) -> None:
        """End the answer, unless it has ended; text that was held back becomes final."""
        if self.finish_reason is not None:
            return
        self._add_text(self.text.flush())
        if self.finish_reason is None:
            self._pending_text += self.stops.flush()
            self.finish_reason = reason

    def report(self, weight_version: str) -> None:
        """Publish what is new."""
        start = self._pending_from
        self._pending_from = len(self.output_ids)
        text, self._pending_text = self._pending_text, ""
        prompt = None if self._prompt_reported else self._prompt_report()
        self._prompt_reported = True
        self.publish(
            Progress(
                text=text,
                token_ids=self.output_ids[start:],
                logprobs=self._logprobs[start:],
                top_logprobs=self._top_logprobs[start:],
                weight_versions=self._weight_versions[start:],
                weight_version=weight_version,
                prompt=prompt,
                finish_reason=self.finish_reason,
            )
        )

    def _prompt_report(self) -> PromptReport:
        wanted = self.body.return_logprob
        wanted_top = wanted and self.body.top_logprobs_num > 0
        return PromptReport(
            cached_tokens=self.cached_tokens,
            start=self.logprob_start,
            logprobs=[None, *self.input_logprobs] if wanted else [],
            top_logprobs=[None, *self.input_top_logprobs] if wanted_top else [],
            given_logprobs=[None, *self.input_given_logprobs] if self.body.token_ids_logprob else [],
        )
