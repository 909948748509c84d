"""An answer's ids as content, reasoning and tool calls, token by token.

The streaming parse is the only parse: a whole answer is parsed by streaming it at once, so both agree by construction.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, cast

import orjson

from clawstream.rendering.detokenizer import IncrementalDetokenizer
from clawstream.rendering.interface import (
    AnswerDelta,
    AnswerPart,
    ContentPart,
    ParsedAnswer,
    ReasoningPart,
    ToolCall,
    ToolCallPart,
    joined_parts,
)
from clawstream.rendering.stop_strings import StopStringCutter, partial_match_length


@dataclass(frozen=True, slots=True)
class Marker:
    """A tag that divides an answer."""

    text: str
    token_id: int | None
    """Set when the tag is one token: then only that token counts, never text that looks like it."""


@dataclass(frozen=True, slots=True)
class AnswerMarkers:
    """The tags of a family of models; None where a family has none."""

    reasoning: tuple[Marker, Marker] | None = None
    """Around the reasoning, which can only stand at the beginning of an answer."""
    tool_call: tuple[Marker, Marker] | None = None
    """Around each tool call, which is a JSON object with name and arguments (Hermes, Qwen)."""
    tools_begin: Marker | None = None
    """Before tool calls in a form of the family's own: all from here on is held back and parsed at the end."""


@dataclass(frozen=True, slots=True)
class HeldParse:
    """What a family's own parser finds in a whole answer."""

    calls: list[ToolCall]
    """Empty when any of them cannot be made."""
    content: str
    """All text that is no tool call."""


class _State(Enum):
    START = auto()
    """Only white space so far: reasoning may still begin."""
    REASONING = auto()
    CONTENT = auto()
    TOOL_CALL = auto()
    HELD = auto()
    """Tool calls in the family's own form have begun."""


class TaggedAnswerStream:
    """For families whose reasoning and tool calls stand between tags.

    White space around reasoning, and between content and a tool call, belongs to the form and is left out; all other
    white space is content. A tool call that is cut off or malformed is given as content, verbatim: nothing that was
    said is lost, and no client gets a call that it cannot make.
    """

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer,
        markers: AnswerMarkers,
        *,
        starts_in_reasoning: bool = False,
        stop: Sequence[str] = (),
        call_id_seed: str = "",
        parse_held: Callable[[list[int]], HeldParse] | None = None,
    ) -> None:
        """`parse_held` reads the whole answer's ids when `markers.tools_begin` was among them."""
        self._parse_held = parse_held
        self._token_ids: list[int] = []
        self._detokenizer = detokenizer
        self._cutter = StopStringCutter(stop)
        self._markers = markers
        self._marker_ids = {
            marker.token_id: marker
            for group in (markers.reasoning, markers.tool_call, markers.tools_begin and (markers.tools_begin,))
            for marker in group or ()
            if marker.token_id is not None
        }
        self._call_id_seed = call_id_seed
        self._state = _State.REASONING if starts_in_reasoning else _State.START
        self._text = ""
        """Certain as text, not yet given: it may be the beginning of a tag."""
        self._space = ""
        """White space that is only given when more text of its kind follows."""
        self._drop_leading_space = starts_in_reasoning
        self._tool_text = ""
        self._has_reasoning = starts_in_reasoning
        self._reasoning_begun = False
        self._tool_calls = 0
        self._given: list[AnswerPart] = []
        self._new: list[AnswerPart] = []

    def push(self, token_ids: Sequence[int]) -> AnswerDelta:
        if self._parse_held is not None:
            self._token_ids += token_ids
        if self._marker_ids.keys().isdisjoint(token_ids):
            self._read(self._cutter.push(self._detokenizer.push(token_ids)))
        else:
            for token_id in token_ids:
                marker = self._marker_ids.get(token_id)
                if marker is None:
                    self._read(self._cutter.push(self._detokenizer.push([token_id])))
                else:
                    # Stop strings are not looked for across a tag, so what was held is certain.
                    self._read(self._cutter.push(self._detokenizer.finish()) + self._cutter.finish())
                    if self._cutter.push(marker.text) + self._cutter.finish() == marker.text:
                        self._flush_text()
                        self._enter(marker)
        return self._delta()

    def finish(self) -> AnswerDelta:
        self._read(self._cutter.push(self._detokenizer.finish()) + self._cutter.finish())
        self._flush_text()
        if self._state is _State.TOOL_CALL:
            self._give_content(self._space + self._opening_tool_tag() + self._tool_text)
        elif self._state is _State.HELD:
            self._end_held()
        elif self._state is not _State.REASONING:
            self._give_content(self._space)
        self._space = self._tool_text = ""
        return self._delta()

    def answer(self) -> ParsedAnswer:
        return parsed_answer(self._given, has_reasoning=self._has_reasoning)

    def _delta(self) -> AnswerDelta:
        delta = AnswerDelta(tuple(self._new))
        self._given += self._new
        self._new = []
        return delta

    def _read(self, text: str) -> None:
        """Text in which only tags that are no single token can be found."""
        self._text += text
        while self._text:
            expected = self._expected_text_markers()
            found = [(at, marker) for marker in expected if (at := self._text.find(marker.text)) >= 0]
            if not found:
                keep = max((partial_match_length(self._text, marker.text) for marker in expected), default=0)
                passed, self._text = self._text[: len(self._text) - keep], self._text[len(self._text) - keep :]
                self._pass(passed)
                return
            at, marker = min(found, key=lambda pair: pair[0])
            passed, self._text = self._text[:at], self._text[at + len(marker.text) :]
            self._pass(passed)
            self._enter(marker)

    def _expected_text_markers(self) -> list[Marker]:
        reasoning, tool_call = self._markers.reasoning, self._markers.tool_call
        candidates: list[Marker] = []
        if self._state is _State.START and reasoning:
            candidates.append(reasoning[0])
        if self._state is _State.REASONING and reasoning:
            candidates.append(reasoning[1])
        if self._state in (_State.START, _State.CONTENT) and tool_call:
            candidates.append(tool_call[0])
        if self._state in (_State.START, _State.CONTENT) and self._markers.tools_begin:
            candidates.append(self._markers.tools_begin)
        if self._state is _State.TOOL_CALL and tool_call:
            candidates.append(tool_call[1])
        return [marker for marker in candidates if marker.token_id is None]

    def _flush_text(self) -> None:
        passed, self._text = self._text, ""
        self._pass(passed)

    def _pass(self, text: str) -> None:
        """Text of the present state, free of tags."""
        if not text:
            return
        if self._state in (_State.TOOL_CALL, _State.HELD):
            self._tool_text += text
            return
        if self._state is _State.START and text.strip():
            self._state = _State.CONTENT
        if self._drop_leading_space:
            text = text.lstrip()
            self._drop_leading_space = not text
        text = self._space + text
        certain = text.rstrip()
        self._space = text[len(certain) :]
        if self._state is not _State.REASONING:
            self._give_content(certain)
        elif certain:
            self._reasoning_begun = True
            self._new.append(ReasoningPart(certain))

    def _give_content(self, text: str) -> None:
        if text:
            self._new.append(ContentPart(text))

    def _enter(self, marker: Marker) -> None:
        """A tag was read. One that means nothing here is content."""
        reasoning, tool_call = self._markers.reasoning, self._markers.tool_call
        if reasoning and marker is reasoning[0] and self._state is _State.START:
            self._state, self._has_reasoning = _State.REASONING, True
            self._space, self._drop_leading_space = "", True
        elif reasoning and marker is reasoning[0] and self._state is _State.REASONING and not self._reasoning_begun:
            pass  # the prompt opened the reasoning already
        elif reasoning and marker is reasoning[1] and self._state is _State.REASONING:
            self._state, self._space, self._drop_leading_space = _State.CONTENT, "", True
        elif tool_call and marker is tool_call[0] and self._state is not _State.TOOL_CALL:
            if self._state is _State.REASONING:
                self._space = ""  # an unclosed reasoning ends where a tool is called
            self._state, self._tool_text, self._drop_leading_space = _State.TOOL_CALL, "", False
        elif tool_call and marker is tool_call[1] and self._state is _State.TOOL_CALL:
            self._end_tool_call()
        elif marker is self._markers.tools_begin and self._state in (_State.START, _State.CONTENT):
            self._state, self._tool_text, self._drop_leading_space = _State.HELD, marker.text, False
        else:
            self._pass(marker.text)

    def _end_tool_call(self) -> None:
        assert self._markers.tool_call is not None
        call = parse_json_tool_call(self._tool_text, call_id(self._call_id_seed, self._tool_calls))
        self._state = _State.CONTENT
        if call is not None:
            self._tool_calls += 1
            self._new.append(ToolCallPart(call))
            self._space, self._drop_leading_space = "", True
        else:
            verbatim = self._opening_tool_tag() + self._tool_text + self._markers.tool_call[1].text
            self._give_content(self._space + verbatim)
            self._space = ""
        self._tool_text = ""

    def _end_held(self) -> None:
        """All calls, and the text beside them that was not given yet; or what was held, verbatim."""
        assert self._parse_held is not None
        parsed = self._parse_held(self._token_ids)
        if not parsed.calls:
            self._give_content(self._space + self._tool_text)
            return
        given = AnswerDelta((*self._given, *self._new)).content.strip()
        self._new += [ToolCallPart(call) for call in parsed.calls]
        if parsed.content.startswith(given):
            self._give_content(parsed.content[len(given) :].strip())

    def _opening_tool_tag(self) -> str:
        assert self._markers.tool_call is not None
        return self._markers.tool_call[0].text


def parsed_answer(given: Sequence[AnswerPart], *, has_reasoning: bool) -> ParsedAnswer:
    """The sum of all parts. `has_reasoning` tells empty reasoning from none."""
    whole = AnswerDelta(tuple(given))
    return ParsedAnswer(
        content=whole.content if whole.content or not whole.tool_calls else None,
        reasoning=whole.reasoning if has_reasoning else None,
        tool_calls=whole.tool_calls,
        parts=tuple(joined_parts(given)),
    )


def parse_json_tool_call(text: str, identity: str) -> ToolCall | None:
    """`{"name": ..., "arguments": {...}}` as an OpenAI tool call, or None when it is not that."""
    try:
        record = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(record, dict):
        return None
    fields = cast("dict[str, Any]", record)
    name, arguments = fields.get("name"), fields.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments or "{}")
        except orjson.JSONDecodeError:
            return None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return openai_tool_call(identity, name, cast("dict[str, Any]", arguments))


def openai_tool_call(identity: str, name: str, arguments: dict[str, Any]) -> ToolCall:
    """A tool call in OpenAI's form."""
    return {
        "id": identity,
        "type": "function",
        "function": {"name": name, "arguments": orjson.dumps(arguments).decode()},
    }


def call_id(seed: str, number: int) -> str:
    """An id for the call `number` of the answer `seed`. Letters and digits only: some clients strip the rest."""
    return "call" + hashlib.sha256(f"{seed}/{number}".encode()).hexdigest()[:24]
