"""Rendering and parsing for whole directories."""

from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawstream.errors import ContractError
from clawstream.rendering.interface import AnswerDelta, joined_parts
from clawstream.rendering.renderer import PackageRenderer, load_renderer
from clawstream.rendering.tokenizer import load_tokenizer

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}


@pytest.fixture(scope="module")
def plain(tiny_model_directory: Path) -> PackageRenderer:
    return load_renderer(tiny_model_directory)


@pytest.fixture(scope="module")
def tagged(tagged_model_directory: Path) -> PackageRenderer:
    return load_renderer(tagged_model_directory, "qwen3")


@pytest.fixture(params=["plain", "tagged"])
def renderer(request: pytest.FixtureRequest) -> PackageRenderer:
    return request.getfixturevalue(request.param)


def test_the_prompt_is_what_the_template_says(plain: PackageRenderer, tiny_model_directory: Path) -> None:
    messages: list[Any] = [{"role": "system", "content": "short"}, {"role": "user", "content": "hi"}]
    expected = load_tokenizer(tiny_model_directory).hugging_face.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert plain.render(messages).token_ids == expected


def test_a_string_and_an_array_of_the_same_text_give_the_same_ids(renderer: PackageRenderer) -> None:
    as_array = renderer.render([{"role": "user", "content": [{"type": "text", "text": "x"}]}])
    assert as_array.token_ids == renderer.render([{"role": "user", "content": "x"}]).token_ids


def test_a_tool_loop_reaches_the_model_whole(renderer: PackageRenderer) -> None:
    prompt = renderer.render(
        [
            {"role": "user", "content": "what is up?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "blue"},
        ],
        [LOOK],
    )
    text = renderer.decode(prompt.token_ids)
    assert prompt.repaired == ""
    for part in ('"name": "look"', '"at": "sky"', "blue"):
        assert part.replace(": ", ":") in text.replace(": ", ":")


def test_a_template_without_tools_gets_them_as_text(tiny_model_directory: Path, tmp_path: Path) -> None:
    for file in tiny_model_directory.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(
        "{% for message in messages %}<|im_start|>{{ message['role'] + '\n' + message['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    renderer = load_renderer(tmp_path)
    messages: list[Any] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
    ]
    text = renderer.decode(renderer.render(messages, [LOOK]).token_ids)
    assert orjson.dumps(LOOK).decode() in text
    assert '<tool_call>\n{"name":"look","arguments":{"at":"sky"}}\n</tool_call>' in text


def test_unparsable_arguments_are_served_and_reported(renderer: PackageRenderer) -> None:
    bad = {**CALL, "function": {"name": "look", "arguments": "{bad"}}
    prompt = renderer.render([{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [bad]}])
    assert "no JSON object" in prompt.repaired
    assert "{bad" in renderer.decode(prompt.token_ids)


def test_unknown_families_and_missing_files_are_named(tiny_model_directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="no-such-family"):
        load_renderer(tiny_model_directory, "no-such-family")
    with pytest.raises(ContractError, match="does not fit"):
        load_renderer(tiny_model_directory, "qwen3")
    with pytest.raises(ContractError, match=r"tokenizer\.json"):
        load_renderer(tmp_path)


def test_the_fingerprint_follows_vocabulary_and_template(
    plain: PackageRenderer, tagged: PackageRenderer, tiny_model_directory: Path
) -> None:
    assert plain.tokenizer_fingerprint == load_renderer(tiny_model_directory, "template").tokenizer_fingerprint
    assert plain.tokenizer_fingerprint != tagged.tokenizer_fingerprint
    assert len(plain.tokenizer_fingerprint) == 64


# Parsing


def stream(renderer: PackageRenderer, pieces: list[list[int]], prompt_ids: list[int] | None = None) -> AnswerDelta:
    """The concatenation of all deltas."""
    opened = renderer.open_answer(prompt_ids or [])
    deltas = [*(opened.push(piece) for piece in pieces), opened.finish()]
    return AnswerDelta(tuple(joined_parts(part for delta in deltas for part in delta.parts)))


GOOD_CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
FRAGMENTS = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        GOOD_CALL,
        "hello",
        " ",
        "\n\n",
        "😀",
        "<tool",
        "<",
        '{"name"',
    ]
)


@given(fragments=st.lists(FRAGMENTS, max_size=8), cuts=st.lists(st.integers(1, 4), max_size=60))
@settings(max_examples=150, deadline=None)
def test_the_streamed_parse_equals_the_whole_parse_on_every_cut(
    tagged: PackageRenderer, plain: PackageRenderer, fragments: list[str], cuts: list[int]
) -> None:
    for renderer in (tagged, plain):
        ids = renderer.encode("".join(fragments))
        pieces: list[list[int]] = []
        rest = ids
        for cut in cuts:
            pieces.append(rest[:cut])
            rest = rest[cut:]
        pieces.append(rest)
        whole = renderer.parse(ids)
        streamed = stream(renderer, pieces)
        assert streamed.content == (whole.content or "")
        assert streamed.reasoning == (whole.reasoning or "")
        assert streamed.tool_calls == whole.tool_calls
        assert streamed.parts == whole.parts


@given(ids=st.lists(st.integers(0, 511), max_size=40))
@settings(max_examples=150, deadline=None)
def test_plain_text_is_the_decoded_text(plain: PackageRenderer, ids: list[int]) -> None:
    answer = plain.parse(ids)
    assert answer.content == plain.decode(ids)
    assert answer.reasoning is None


def test_reasoning_content_and_parallel_calls_are_told_apart(tagged: PackageRenderer) -> None:
    second = GOOD_CALL.replace("sky", "sea").replace("look", "dive")
    text = f"<think>\nhm, <odd>\n</think>\n\nLet me see.\n{GOOD_CALL}\n{second}<|im_end|>"
    answer = tagged.parse(tagged.encode(text))
    assert answer.reasoning == "hm, <odd>"
    assert answer.content == "Let me see."
    calls = [(call["function"]["name"], orjson.loads(call["function"]["arguments"])) for call in answer.tool_calls]
    assert calls == [("look", {"at": "sky"}), ("dive", {"at": "sea"})]
    assert len({call["id"] for call in answer.tool_calls}) == 2


def test_our_parse_agrees_with_the_familys_own(tagged: PackageRenderer) -> None:
    ids = tagged.encode(f"<think>why</think>because{GOOD_CALL}<|im_end|>")
    answer, reference = tagged.parse(ids), tagged._renderer.parse_response(ids)
    assert answer.content == reference.content
    assert answer.reasoning == reference.reasoning_content
    assert orjson.loads(answer.tool_calls[0]["function"]["arguments"]) == reference.tool_calls[0].arguments


@pytest.mark.parametrize(
    "broken",
    [
        '<tool_call>\n{"name": "look", "argum',
        "<tool_call>\n{bad}\n</tool_call>",
        '<tool_call>{"name": "look", "arguments": [1]}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
    ],
)
def test_a_call_that_cannot_be_made_is_text(renderer: PackageRenderer, broken: str) -> None:
    answer = renderer.parse(renderer.encode(f"So: {broken}"))
    assert answer.tool_calls == []
    assert answer.content == f"So: {broken}"


def test_a_call_alone_has_no_content(renderer: PackageRenderer) -> None:
    answer = renderer.parse(renderer.encode(GOOD_CALL))
    assert answer.content is None
    assert len(answer.tool_calls) == 1


def test_reasoning_that_the_prompt_opened_is_reasoning(tagged: PackageRenderer) -> None:
    prompt_ids = tagged.encode("<|im_start|>assistant\n<think>\n")
    answer = tagged.parse(tagged.encode("hm</think>yes"), prompt_ids)
    assert (answer.reasoning, answer.content) == ("hm", "yes")


def test_reasoning_cut_by_the_token_cap_is_not_content(tagged: PackageRenderer) -> None:
    answer = tagged.parse(tagged.encode("<think>on and on"))
    assert (answer.reasoning, answer.content) == ("on and on", "")


def test_text_before_the_tag_arrives_while_the_answer_runs(plain: PackageRenderer) -> None:
    opened = plain.open_answer()
    assert opened.push(plain.encode("one two")).content == "one two"
    assert opened.push(plain.encode(" <tool")).content == ""
    assert opened.push(plain.encode("box>")).content == " <toolbox>"


def test_stop_strings_end_the_text_but_not_the_ids(plain: PackageRenderer) -> None:
    opened = plain.open_answer(stop=["###"])
    ids = plain.encode("one##two###three")
    text = "".join([*(opened.push([token_id]).content for token_id in ids), opened.finish().content])
    assert text == "one##two"
    assert opened.answer().content == "one##two"


@pytest.mark.model
def test_smollm2_renders_as_its_template(smollm2_directory: Path) -> None:
    renderer = load_renderer(smollm2_directory)
    text = renderer._tokenizer.hugging_face.decode(renderer.render([{"role": "user", "content": "hi"}]).token_ids)
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert renderer.stop_token_ids == [2]
