"""Rendering: the only place where messages become ids."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

from schemas.events.base import Message


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as the engine will see it."""

    token_ids: list[int]
    """[prompt_tokens], ending where the assistant begins to write."""
    repaired: str = ""
    """What had to be changed to render it (for example unparsable tool arguments); empty when nothing was."""


ToolCall = dict[str, Any]
"""In OpenAI's form: id, type, function{name, arguments as JSON text}."""


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """Some reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentPart:
    """Some text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallPart:
    """A whole tool call, given when it is complete: no client gets a call that it cannot make."""

    call: ToolCall


AnswerPart = ReasoningPart | ContentPart | ToolCallPart


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """What some tokens added to an answer. False where they added nothing."""

    parts: tuple[AnswerPart, ...] = ()
    """In the order in which they were said."""

    @property
    def content(self) -> str:
        """The text in it."""
        return "".join(part.text for part in self.parts if isinstance(part, ContentPart))

    @property
    def reasoning(self) -> str:
        """The reasoning in it."""
        return "".join(part.text for part in self.parts if isinstance(part, ReasoningPart))

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The tool calls in it."""
        return [part.call for part in self.parts if isinstance(part, ToolCallPart)]

    def __bool__(self) -> bool:
        return bool(self.parts)


def joined_parts(parts: Iterable[AnswerPart]) -> list[AnswerPart]:
    """The same with neighbours of one kind joined: how the answer was cut into deltas shows no more."""
    joined: list[AnswerPart] = []
    for kind, group in groupby(parts, type):
        if kind is ToolCallPart:
            joined += group
            continue
        texts = [part.text for part in group if not isinstance(part, ToolCallPart)]
        joined.append(ContentPart("".join(texts)) if kind is ContentPart else ReasoningPart("".join(texts)))
    return joined


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """An answer's ids as an assistant message."""

    content: str | None
    """Text without reasoning and tool calls; None when there is none but tool calls."""
    reasoning: str | None
    """The model's reasoning, if the family has any."""
    tool_calls: list[ToolCall]
    """OpenAI tool calls; empty when there are none."""
    parts: tuple[AnswerPart, ...] = ()
    """The same in the order in which it was said, neighbours of one kind joined."""


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
    def vocabulary_size(self) -> int:
        """The model's ids are those from 0 up to here, without it."""
        ...

    @property
    def stop_token_ids(self) -> list[int]:
        """Ids that end an assistant message."""
        ...

    def render(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), *, max_tokens: int | None = None
    ) -> RenderedPrompt:
        """The prompt for the next assistant message.

        Roles that the template does not know are mapped (`developer` is a system message); content arrays and strings
        of the same text give the same ids; tool arguments are parsed first. Raises ContractError when it cannot be
        done, and PromptTooLong for more than `max_tokens`: without tokenising the whole, where that is certain before.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """Plain text to ids, without special tokens."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Ids to text, special tokens left out."""
        ...

    def open_answer(
        self,
        prompt_ids: Sequence[int] = (),
        *,
        tools: Sequence[Message] = (),
        stop: Sequence[str] = (),
        call_id_seed: str = "",
    ) -> AnswerStream:
        """A parser for one answer that is still coming.

        `prompt_ids` tell whether the template opened the reasoning already; `tools` tell families that write arguments
        without quotes which of them are texts; `stop` are the client's stop strings, cut
        from the text; tool calls get ids that follow from `call_id_seed`.
        """
        ...

    def tool_call_beginning(self, prompt_ids: Sequence[int], name: str | None) -> list[int] | None:
        """Ids that open a tool call after `prompt_ids`, of the tool `name` or of any: an answer that goes on from them
        is a call. They belong to the prompt, and to the answer that is parsed. None: the family's form allows none."""
        ...

    def parse(self, token_ids: Sequence[int], prompt_ids: Sequence[int] = ()) -> ParsedAnswer:
        """A whole answer's ids as content, reasoning and tool calls: what `open_answer` gives in sum."""
        ...
