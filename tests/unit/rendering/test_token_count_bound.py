"""A prompt that cannot fit is refused without tokenising it, and nothing else is."""

import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from clawstream.errors import PromptTooLong
from clawstream.rendering.renderer import PackageRenderer, load_renderer
from clawstream.rendering.segment_cache import SegmentCache
from clawstream.rendering.token_count_bound import LeastTokenCount
from tests.fixtures.tokenizers import byte_fallback_tokenizer

TEXTS = st.one_of(
    st.text(),
    st.lists(
        st.sampled_from(
            [
                "word",
                " the",
                "\n",
                "    ",
                "-" * 70,
                "=" * 3,
                "123",
                "é",
                "e\u0301",
                "中文",
                "\u1100\u1161\u11a8",
                "<|im_end|>",
                "a",
            ]
        )
    ).map("".join),
)


def tokenizer_of(kind: str, directory: Path) -> Tokenizer:
    if kind == "byte fallback":
        return byte_fallback_tokenizer()
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    if kind == "composing":
        tokenizer.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue] - untyped
    if kind == "swallowing":
        tokenizer.add_tokens([AddedToken("word", lstrip=True, rstrip=True)])
    return tokenizer


@pytest.mark.parametrize("kind", ["byte level", "composing", "swallowing", "byte fallback"])
def test_no_text_has_fewer_tokens_than_the_bound(kind: str, smollm2_directory: Path) -> None:
    tokenizer = tokenizer_of(kind, smollm2_directory)
    least = LeastTokenCount(tokenizer)

    @settings(max_examples=200, deadline=None)
    @given(TEXTS)
    @example("-" * 800)
    @example("    word    " * 30)
    @example("e\u0301" * 50)
    @example("\n" + " " * 300)
    def check(text: str) -> None:
        assert least.of(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids)

    check()
    assert least.of("word " * 1000) > 0


@pytest.mark.parametrize(
    "text", ["quick brown foxes " * 1000, "12345 " * 1000, "中文字" * 1000, "a" * 20_000, "." * 20_000, " " * 20_000]
)
def test_the_bound_is_near_enough_to_refuse_what_is_far_too_long(text: str, smollm2_tokenizer: Tokenizer) -> None:
    assert LeastTokenCount(smollm2_tokenizer).of(text) > len(smollm2_tokenizer.encode(text).ids) / 15


@pytest.mark.parametrize("kind", ["unknown words", "unknown characters", "white space thrown away"])
def test_tokenizers_that_lose_text_have_no_bound(kind: str, smollm2_directory: Path) -> None:
    if kind == "unknown words":
        tokenizer = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    elif kind == "unknown characters":
        tokenizer = Tokenizer(models.BPE(vocab={"[UNK]": 0, "a": 1}, merges=[], unk_token="[UNK]", fuse_unk=True))
    else:
        tokenizer = Tokenizer.from_file(str(smollm2_directory / "tokenizer.json"))
        removing = pre_tokenizers.Split(" ", "removed")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([removing, pre_tokenizers.ByteLevel(use_regex=False)])  # pyright: ignore[reportAttributeAccessIssue] - untyped
    assert LeastTokenCount(tokenizer).of("b " * 1000) == 0


@pytest.fixture(scope="module", params=["template", "qwen3"])
def renderer(request: pytest.FixtureRequest, tagged_model_directory: Path) -> PackageRenderer:
    return load_renderer(tagged_model_directory, request.param)


def conversation(length: int) -> list[Any]:
    return [
        {"role": ("user", "assistant")[number % 2], "content": f"{number} says something " * 20}
        for number in range(length)
    ]


def test_a_prompt_of_exactly_the_limit_is_rendered(renderer: PackageRenderer) -> None:
    whole = renderer.render(conversation(31))
    assert renderer.render(conversation(31), max_tokens=len(whole.token_ids)) == whole
    with pytest.raises(PromptTooLong) as caught:
        renderer.render(conversation(31), max_tokens=len(whole.token_ids) - 1)
    assert caught.value.least_tokens == len(whole.token_ids)


def encoded_characters(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How long the texts are that reach the real tokenizer."""
    lengths: list[int] = []
    encode = SegmentCache.encode

    def remember(self: SegmentCache, text: str) -> list[int]:
        lengths.append(len(text))
        return encode(self, text)

    monkeypatch.setattr(SegmentCache, "encode", remember)
    return lengths


def test_one_huge_text_is_not_tokenised(renderer: PackageRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = encoded_characters(monkeypatch)
    with pytest.raises(PromptTooLong) as caught:
        renderer.render([{"role": "user", "content": "many words here " * 100_000}], max_tokens=2000)
    assert caught.value.least_tokens > 2000
    assert sum(lengths) < 1000


def test_many_texts_are_tokenised_until_it_is_certain(
    tagged_model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = load_renderer(tagged_model_directory, "qwen3")
    lengths = encoded_characters(monkeypatch)
    with pytest.raises(PromptTooLong):
        renderer.render(conversation(1001), max_tokens=500)
    assert 0 < sum(lengths) < sum(len(message["content"]) for message in conversation(1001)) / 10


def test_a_limit_ends_with_its_prompt_and_is_its_thread_s_own(renderer: PackageRenderer) -> None:
    with pytest.raises(PromptTooLong):
        renderer.render(conversation(31), max_tokens=10)
    assert len(renderer.encode("many words " * 50)) > 10
    lengths: list[int] = []
    with renderer._tokenizer.hugging_face.at_most(10):  # pyright: ignore[reportPrivateUsage] - a render that is under way
        other = threading.Thread(target=lambda: lengths.append(len(renderer.render(conversation(31)).token_ids)))
        other.start()
        other.join()
    assert lengths[0] > 10
