"""What clients send, checked before anything is queued. Field names are SGLang's."""

from typing import Annotated, Self, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from clawstream.engine.interface import PauseMode


class RequestBody(BaseModel):
    """A body. Unknown fields are errors: an option that is ignored is worse than one that is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def _as_list(value: object) -> object:
    """SGLang takes one value where a list is meant."""
    if value is None:
        return []
    return cast("list[object]", value) if isinstance(value, list) else [value]


class SamplingParameters(RequestBody):
    """`sampling_params`."""

    max_new_tokens: int = Field(default=128, ge=0)
    """Most tokens to sample. 0: only score the prompt."""
    min_new_tokens: int = Field(default=0, ge=0, le=0)
    """Only 0 is supported."""
    temperature: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Smallest set of top tokens with this share of the probability."""
    top_k: int = Field(default=-1, ge=-1)
    """Most likely tokens to choose from; -1 is all."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Least probability relative to that of the most likely token."""
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    """Per earlier occurrence in the answer."""
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    """For having occurred in the answer."""
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=2.0)
    """Multiplicative, for having occurred in the answer."""
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_as_list)] = []
    """Strings that end the answer; cut from its text, kept in its ids."""
    stop_token_ids: Annotated[list[int], BeforeValidator(_as_list)] = []
    """Further ids that end the answer."""
    ignore_eos: bool = False
    """Go on past the model's own end tokens."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Accepted for SGLang's clients; this engine's tokenizers never add such spaces."""
    no_stop_trim: bool = False
    """Keep what stopped the answer in its text."""
    sampling_seed: int | None = None
    """Makes this answer's random numbers a function of the seed alone."""
    n: int = Field(default=1, ge=1, le=128)
    """Answers to the same prompt, sampled independently; the response is a list then. Not for streams. With a
    `sampling_seed` they are equal, as in SGLang."""

    @model_validator(mode="after")
    def _top_k_of_zero_is_an_error(self) -> Self:
        if self.top_k == 0:
            raise ValueError("top_k must be -1 (all) or at least 1")
        return self


class GenerateBody(RequestBody):
    """`POST /generate`."""

    text: str | None = None
    """The prompt as text; exactly one of `text` and `input_ids`."""
    input_ids: list[int] | None = None
    """[prompt_tokens]"""
    sampling_params: SamplingParameters = SamplingParameters()
    """How to sample."""
    rid: str | None = Field(default=None, min_length=1, max_length=256)
    """The caller's name for the request; made up when absent."""
    stream: bool = False
    """Server-sent events as tokens come."""
    return_logprob: bool = False
    """Log-probs of sampled tokens, and of prompt tokens from `logprob_start_len` on."""
    logprob_start_len: int = Field(default=-1, ge=-1)
    """First prompt position in `input_token_logprobs` (its own entry is null); -1: the last one."""
    top_logprobs_num: int = Field(default=0, ge=0, le=1000)
    """The most likely tokens to report beside each log-prob."""
    token_ids_logprob: list[Annotated[int, Field(ge=0)]] | None = Field(default=None, max_length=10_000)
    """Ids whose log-probs are reported at every scored prompt position, in `input_token_ids_logprobs`. Only when
    scoring: `max_new_tokens` must be 0."""
    return_text_in_logprobs: bool = False
    """Fill the third field of each log-prob entry."""

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("give exactly one of text and input_ids")
        return self

    @model_validator(mode="after")
    def _several_answers_are_not_streamed(self) -> Self:
        if self.stream and self.sampling_params.n > 1:
            raise ValueError("sampling_params.n must be 1 with stream here: several answers come whole")
        return self

    @model_validator(mode="after")
    def _given_ids_are_for_scoring(self) -> Self:
        if self.token_ids_logprob and (self.sampling_params.max_new_tokens > 0 or not self.return_logprob):
            raise ValueError("token_ids_logprob needs return_logprob and max_new_tokens 0 here: it scores prompts only")
        return self


class PauseBody(RequestBody):
    """`POST /pause_generation`."""

    mode: PauseMode = PauseMode.ABORT
    """What happens to running answers; SGLang's default."""


class UpdateWeightsBody(RequestBody):
    """`POST /update_weights_from_disk`."""

    model_path: str = Field(min_length=1)
    """A Hugging Face directory of the same architecture."""
    weight_version: str | None = None
    """What the weights are called from now on; the previous name stays when absent."""
    flush_cache: bool = True
    """Accepted for SGLang's clients: a swap always empties the prefix cache here."""
    abort_all_requests: bool = False
    """End all answers before the swap."""
    load_format: str | None = Field(default=None, pattern="^(auto|safetensors)$")
    """Only safetensors."""


class AbortBody(RequestBody):
    """`POST /abort_request`."""

    rid: str = ""
    """The request to end; unknown ones are ignored."""
    abort_all: bool = False
    """End every request."""
