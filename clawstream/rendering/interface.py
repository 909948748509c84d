"""Rendering: the only place where messages become ids."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from schemas.events.base import Message


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as the engine will see it."""

    token_ids: list[int]
    """[prompt_tokens], ending where the assistant begins to write."""
    repaired: str = ""
    """What had to be changed to render it (for example unparsable tool arguments); empty when nothing was."""


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """What some tokens added to an answer. Empty strings and lists where they added nothing."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Whole OpenAI tool calls, given when they are complete."""

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """An answer's ids as an assistant message."""

    content: str | None
    """Text without reasoning and tool calls; None when there is none but tool calls."""
    reasoning: str | None
    """The model's reasoning, if the family has any."""
    tool_calls: list[dict[str, Any]]
    """OpenAI tool calls; empty when there are none."""


class AnswerStream(Protocol):
    """Parses one answer while it comes. Cutting the ids into other pieces changes no sum."""

    def push(self, token_ids: Sequence[int]) -> AnswerDelta:
        """What these ids, sampled next, add. What could still change its meaning is held back."""
        ...

    def finish(self) -> AnswerDelta:
        """What was held back."""
        ...

    def answer(self) -> ParsedAnswer:
        """The sum of all deltas."""
        ...


class ChatRenderer(Protocol):
    """Renders for one model. Thread-safe."""

    @property
    def name(self) -> str:
        """Name of the renderer, recorded on every turn."""
        ...

    @property
    def tokenizer_fingerprint(self) -> str:
        """sha256 in hexadecimal over vocabulary, special tokens and chat template."""
        ...

    @property
    def vocabulary_fingerprint(self) -> str:
        """The same without the chat template: models that share it mean the same by the same ids."""
        ...

    @property
    def stop_token_ids(self) -> list[int]:
        """Ids that end an assistant message."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> RenderedPrompt:
        """The prompt for the next assistant message.

        Roles that the template does not know are mapped (`developer` is a system message); content arrays and strings
        of the same text give the same ids; tool arguments are parsed first. Raises ContractError when it cannot be
        done.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """Plain text to ids, without special tokens."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Ids to text, special tokens left out."""
        ...

    def open_answer(
        self, prompt_ids: Sequence[int] = (), *, stop: Sequence[str] = (), call_id_seed: str = ""
    ) -> AnswerStream:
        """A parser for one answer that is still coming.

        `prompt_ids` tell whether the template opened the reasoning already; `stop` are the client's stop strings, cut
        from the text; tool calls get ids that follow from `call_id_seed`.
        """
        ...

    def parse(self, token_ids: Sequence[int], prompt_ids: Sequence[int] = ()) -> ParsedAnswer:
        """A whole answer's ids as content, reasoning and tool calls: what `open_answer` gives in sum."""
        ...
