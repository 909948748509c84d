"""Every family that `renderers` knows: streamed and whole answers are one, on every cut of the tokens."""

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawstream.rendering.interface import AnswerPart, joined_parts
from clawstream.rendering.renderer import PackageRenderer, load_renderer
from tests.fixtures.model_families import MODEL_FAMILIES, ModelFamily, write_family_model

LOOK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}


@pytest.fixture(scope="module", params=MODEL_FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> ModelFamily:
    return request.param


@pytest.fixture(scope="module")
def renderer(family: ModelFamily, tmp_path_factory: pytest.TempPathFactory) -> PackageRenderer:
    return load_renderer(write_family_model(tmp_path_factory.mktemp("family"), family), family.name)


def streamed(renderer: PackageRenderer, pieces: list[list[int]], **options: Any) -> list[AnswerPart]:
    opened = renderer.open_answer(**options)
    deltas = [*(opened.push(piece) for piece in pieces), opened.finish()]
    parts = joined_parts(part for delta in deltas for part in delta.parts)
    assert opened.answer().parts == tuple(parts)
    return parts


def whole(renderer: PackageRenderer, ids: list[int], **options: Any) -> list[AnswerPart]:
    return streamed(renderer, [ids], **options)


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_the_streamed_parse_equals_the_whole_parse_on_every_cut(
    family: ModelFamily, renderer: PackageRenderer, data: st.DataObject
) -> None:
    fragments = [*family.tokens.split(" "), family.call, "hello", " ", "\n\n", "😀", "<", "{", "<｜", '{"name"']
    text = "".join(data.draw(st.lists(st.sampled_from(fragments), max_size=8)))
    stop = data.draw(st.sampled_from(([], ["lo"], ["<"], ["\n"])))
    ids = renderer.encode(text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=12)))
    pieces = [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    expected = whole(renderer, ids, tools=[LOOK], stop=stop)
    assert streamed(renderer, pieces, tools=[LOOK], stop=stop) == expected
    assert streamed(renderer, [[token] for token in ids], tools=[LOOK], stop=stop) == expected
    assert all(part.text for part in expected if not hasattr(part, "call"))  # pyright: ignore - parts have either


def test_reasoning_text_and_a_call(family: ModelFamily, renderer: PackageRenderer) -> None:
    before = "Let me look.\n" if family.streams else ""
    thought = f"{family.think[0]}\nwhy\n{family.think[1]}\n\n" if family.think else ""
    ids = renderer.encode(f"{thought}{before}{family.call}")
    opened = renderer.open_answer(tools=[LOOK])
    deltas = [opened.push([token]) for token in ids]
    early = "".join(delta.content for delta in deltas), "".join(delta.reasoning for delta in deltas)
    if family.streams:
        assert early == ("Let me look.", "why")
    opened.finish()
    answer = opened.answer()
    assert [call["function"]["name"] for call in answer.tool_calls] == ["look"]
    assert orjson.loads(answer.tool_calls[0]["function"]["arguments"]) == {"at": "sky"}
    assert answer.content == (before.strip() or None)
    assert answer.reasoning == ("why" if family.think else None)


def test_a_call_that_is_cut_is_text(family: ModelFamily, renderer: PackageRenderer) -> None:
    cut = family.call[: len(family.call) // 2]
    answer = renderer.parse(renderer.encode(f"So: {cut}"))
    assert answer.tool_calls == []
    assert (answer.content or "").startswith("So:")
    assert answer.content == f"So: {cut}" or not family.streams


def test_arguments_have_the_types_that_the_tool_says(family: ModelFamily, renderer: PackageRenderer) -> None:
    ids = renderer.encode(family.call.replace("sky", "42"))
    (part,) = whole(renderer, ids, tools=[LOOK])
    assert orjson.loads(part.call["function"]["arguments"]) == {"at": "42"}  # pyright: ignore - a call
