# pyright: basic
"""`ChatRenderer` on the `renderers` package: a model family's own renderer, else the tokenizer's chat template.

Basic type checking: `renderers` and transformers are untyped here.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import orjson
from renderers.base import ToolCallParseStatus, create_renderer
from renderers.configs import config_from_name

from clawstream.errors import ContractError, PromptTooLong
from clawstream.rendering.answer import (
    AnswerMarkers,
    HeldParse,
    Marker,
    TaggedAnswerStream,
    call_id,
    openai_tool_call,
    parsed_answer,
)
from clawstream.rendering.interface import (
    AnswerDelta,
    AnswerPart,
    AnswerStream,
    ContentPart,
    ParsedAnswer,
    ReasoningPart,
    RenderedPrompt,
    ToolCallPart,
)
from clawstream.rendering.messages import hoist_system_messages, spell_out_tools, to_template_messages
from clawstream.rendering.tokenizer import LoadedTokenizer, load_tokenizer
from schemas.events.base import Message

FAMILY_BY_MODEL_TYPE = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "glm4_moe": "glm-4.5",
    "gpt_oss": "gpt-oss",
    "minimax_m2": "minimax-m2",
    "llama": "llama-3",
}
"""Candidates by `model_type` of config.json. One is taken only if it renders exactly as the model's own template."""
TEMPLATE_RENDERER = "default"
"""`renderers`' name for the tokenizer's own chat template."""
TAGGED_RENDERERS = (TEMPLATE_RENDERER, "qwen3", "prime-qwen3", "qwen3-vl")
"""Renderers whose answers have `<think>` and `<tool_call>` tags with JSON, if any: parsed while they stream."""
TOOLS_BEGIN = {
    **dict.fromkeys(("qwen3.5", "qwen3.6", "qwen3.8"), "<tool_call>"),
    **dict.fromkeys(("glm-4.5", "glm-5", "glm-5.1", "glm-5.3"), "<tool_call>"),
    **dict.fromkeys(("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"), "<tool_call>"),
    **dict.fromkeys(("laguna-xs.2", "laguna-m.1", "laguna-xs-2.1", "laguna-s-2.1"), "<tool_call>"),
    **dict.fromkeys(("kimi-k2", "kimi-k2.5"), "<|tool_calls_section_begin|>"),
    **dict.fromkeys(("deepseek-v3", "deepseek-r1"), "<｜tool▁calls▁begin｜>"),
    "minimax-m2": "<minimax:tool_call>",
    "hy3": "<tool_calls:opensource>",
}
"""Renderers whose reasoning and text stream, while tool calls in their own form are held back from this tag on."""
_PACKAGE_ERRORS = (jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
"""What templates and the package's renderers raise on conversations and tools that they did not expect."""
_REASONING_TAGS = {"hy3": ("<think:opensource>", "</think:opensource>")}
_PROBES: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "Hello, who are you?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "And 3 + 3?\n"},
    ],
)
"""Conversations that a family's renderer must render as the template does."""


class PackageRenderer:
    """Implements `clawstream.rendering.interface.ChatRenderer`."""

    def __init__(self, tokenizer: LoadedTokenizer, family: str) -> None:
        """`family` is a name that `renderers` knows. Raises ContractError for another."""
        try:
            self._renderer: Any = create_renderer(
                tokenizer.hugging_face,
                config_from_name(family),  # pyright: ignore[reportArgumentType] - one of the union, by name
            )
        except (ValueError, KeyError, AssertionError) as error:
            raise ContractError(f"renderer {family!r} does not fit this tokenizer: {error}") from error
        self._tokenizer = tokenizer
        self._family = family
        self._template = str(tokenizer.hugging_face.chat_template)
        uses_template = family == TEMPLATE_RENDERER
        self._spell_definitions = uses_template and "tools" not in self._template
        self._spell_calls = uses_template and "tool_calls" not in self._template
        tools_begin = TOOLS_BEGIN.get(family)
        self._markers = AnswerMarkers(
            reasoning=self._marker_pair(*_REASONING_TAGS.get(family, ("<think>", "</think>"))),
            tool_call=None
            if tools_begin
            else self._marker_pair("<tool_call>", "</tool_call>", always=self._spell_calls),
            tools_begin=None if tools_begin is None else Marker(tools_begin, tokenizer.single_token(tools_begin)),
        )
        self._stop_token_ids = list(
            dict.fromkeys([*self._renderer.get_stop_token_ids(), *tokenizer.end_of_sequence_ids])
        )

    @property
    def name(self) -> str:
        return "template" if self._family == TEMPLATE_RENDERER else self._family

    @property
    def tokenizer_fingerprint(self) -> str:
        return self._tokenizer.fingerprint

    @property
    def vocabulary_fingerprint(self) -> str:
        return self._tokenizer.vocabulary_fingerprint

    @property
    def vocabulary_size(self) -> int:
        return self._tokenizer.vocabulary_size

    @property
    def max_position_embeddings(self) -> int | None:
        """Longest sequence that the model was made for, if its configuration says so."""
        return self._tokenizer.max_position_embeddings

    @property
    def stop_token_ids(self) -> list[int]:
        return list(self._stop_token_ids)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), *, max_tokens: int | None = None
    ) -> RenderedPrompt:
        normalised = to_template_messages(messages)
        prepared = spell_out_tools(
            normalised.messages, tools, tool_definitions=self._spell_definitions, tool_calls=self._spell_calls
        )
        tools_given = list(tools) if tools and not self._spell_definitions else None
        try:
            ids = self._render_ids(prepared, tools_given, max_tokens)
        except PromptTooLong:
            raise
        except _PACKAGE_ERRORS:
            # Many templates refuse a system message that is not the first. Another cause raises again.
            try:
                ids = self._render_ids(hoist_system_messages(prepared), tools_given, max_tokens)
            except PromptTooLong:
                raise
            except _PACKAGE_ERRORS as error:
                raise ContractError(f"the {self.name} renderer cannot render this conversation: {error}") from error
        return RenderedPrompt(ids, normalised.repaired)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)

    def open_answer(
        self,
        prompt_ids: Sequence[int] = (),
        *,
        tools: Sequence[Message] = (),
        stop: Sequence[str] = (),
        call_id_seed: str = "",
    ) -> AnswerStream:
        def parse_whole(token_ids: list[int]) -> HeldParse:
            try:
                parsed = self._renderer.parse_response(
                    token_ids, prompt_ids=list(prompt_ids), tools=list(tools) or None
                )
            except _PACKAGE_ERRORS:  # odd tool definitions: what was said is kept as text
                return HeldParse([], "")
            return _held_parse(parsed, call_id_seed)

        if self._family not in TAGGED_RENDERERS and self._family not in TOOLS_BEGIN:
            return _WholeAnswerStream(self._renderer, self._tokenizer, prompt_ids, tools, call_id_seed)
        return TaggedAnswerStream(
            self._tokenizer.detokenizer(),
            self._markers,
            starts_in_reasoning=self._starts_in_reasoning(prompt_ids),
            stop=stop,
            call_id_seed=call_id_seed,
            parse_held=parse_whole if self._family in TOOLS_BEGIN else None,
        )

    def tool_call_beginning(self, prompt_ids: Sequence[int], name: str | None) -> list[int] | None:
        if self._markers.tool_call is None or self._family not in TAGGED_RENDERERS:
            return None
        beginning = f'{self._markers.tool_call[0].text}\n{{"name": "'
        if name is not None:
            beginning += f'{orjson.dumps(name).decode()[1:-1]}", "arguments": '
        if self._markers.reasoning is not None and self._starts_in_reasoning(prompt_ids):
            beginning = f"\n{self._markers.reasoning[1].text}\n\n{beginning}"
        return self.encode(beginning)

    def parse(self, token_ids: Sequence[int], prompt_ids: Sequence[int] = ()) -> ParsedAnswer:
        stream = self.open_answer(prompt_ids)
        stream.push(token_ids)
        stream.finish()
        return stream.answer()

    def _render_ids(
        self, messages: list[dict[str, Any]], tools: list[Message] | None, max_tokens: int | None
    ) -> list[int]:
        with self._tokenizer.hugging_face.at_most(max_tokens):
            ids = list(self._renderer.render_ids(messages, tools=tools, add_generation_prompt=True))
        if max_tokens is not None and len(ids) > max_tokens:
            raise PromptTooLong(f"the prompt has {len(ids)} tokens, more than {max_tokens}", least_tokens=len(ids))
        return ids

    def _marker_pair(self, start: str, end: str, *, always: bool = False) -> tuple[Marker, Marker] | None:
        """The tags, if the model knows them: as tokens, or as text in its chat template."""
        start_id, end_id = self._tokenizer.single_token(start), self._tokenizer.single_token(end)
        if start_id is not None and end_id is not None:
            return Marker(start, start_id), Marker(end, end_id)
        return (Marker(start, None), Marker(end, None)) if always or start in self._template else None

    def _starts_in_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the prompt ends with an opening tag: some templates write it for the model."""
        if self._markers.reasoning is None or not prompt_ids:
            return False
        tail = self._tokenizer.hugging_face.backend_tokenizer.decode(list(prompt_ids[-16:]), skip_special_tokens=False)
        return tail.rstrip().endswith(self._markers.reasoning[0].text)


def _held_parse(parsed: Any, call_id_seed: str) -> HeldParse:
    """What `renderers` found, in our terms. Calls are all good, or none is taken and what was said is kept as text."""
    calls = [
        openai_tool_call(call_id(call_id_seed, number), call.name, call.arguments)
        for number, call in enumerate(parsed.tool_calls)
        if call.status == ToolCallParseStatus.OK and call.name and isinstance(call.arguments, dict)
    ]
    return HeldParse(calls if len(calls) == len(parsed.tool_calls) else [], parsed.content or "")


class _WholeAnswerStream:
    """For families whose form only `renderers` knows: held back to the end, then parsed whole."""

    def __init__(
        self,
        renderer: Any,
        tokenizer: LoadedTokenizer,
        prompt_ids: Sequence[int],
        tools: Sequence[Message],
        call_id_seed: str,
    ) -> None:
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._prompt_ids = list(prompt_ids)
        self._tools = list(tools)
        self._call_id_seed = call_id_seed
        self._token_ids: list[int] = []
        self._answer = ParsedAnswer(content="", reasoning=None, tool_calls=[])

    def push(self, token_ids: Sequence[int]) -> AnswerDelta:
        self._token_ids += token_ids
        return AnswerDelta()

    def finish(self) -> AnswerDelta:
        parsed = self._renderer.parse_response(self._token_ids, prompt_ids=self._prompt_ids, tools=self._tools or None)
        held = _held_parse(parsed, self._call_id_seed)
        is_broken = bool(parsed.tool_calls) and not held.calls
        content = self._tokenizer.decode(self._token_ids) if is_broken else held.content
        parts: list[AnswerPart] = []
        if parsed.reasoning_content and not is_broken:
            parts.append(ReasoningPart(parsed.reasoning_content))
        if content:
            parts.append(ContentPart(content))
        parts += [ToolCallPart(call) for call in held.calls]
        self._answer = parsed_answer(parts, has_reasoning=parsed.reasoning_content is not None and not is_broken)
        return AnswerDelta(tuple(parts))

    def answer(self) -> ParsedAnswer:
        return self._answer


def load_renderer(directory: Path, family: str = "auto") -> PackageRenderer:
    """The renderer for the model in `directory`: no network, no torch.

    `auto` takes the family's own renderer when it renders exactly as the directory's chat template (a fine-tune may
    have changed that), and the template else. Another `family` is a name that `renderers` knows. Raises ContractError.
    """
    tokenizer = load_tokenizer(directory)
    if family != "auto":
        return PackageRenderer(tokenizer, TEMPLATE_RENDERER if family == "template" else family)
    by_template = PackageRenderer(tokenizer, TEMPLATE_RENDERER)
    candidate = FAMILY_BY_MODEL_TYPE.get(tokenizer.model_type)
    if candidate is None:
        return by_template
    try:
        own = PackageRenderer(tokenizer, candidate)
    except ContractError:
        return by_template
    same = all(own.render(probe).token_ids == by_template.render(probe).token_ids for probe in _PROBES)
    return own if same else by_template
