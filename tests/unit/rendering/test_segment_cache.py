"""Remembered segments give the ids that the whole text has."""

import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from clawstream.rendering.renderer import load_renderer
from clawstream.rendering.segment_cache import SegmentCache
from tests.fixtures.tokenizers import byte_fallback_tokenizer

TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            [
                *("<|im_start|>", "<|im_end|>", "<|im_", "|>", "<|", "<|im_start|><|im_end|>", "<|im_end|> x"),
                *(
                    "user\n",
                    " word",
                    "word",
                    "  ",
                    "\n\n",
                    "e\u0301",
                    "\u0301",
                    "<|im_end|>\u0338",
                    "<think>",
                    "</think>",
                ),
            ]
        ),
        st.text(max_size=5),
    )
).map("".join)


def tokenizer_of(kind: str, directory: Path) -> Tokenizer:
    if kind == "byte fallback":
        return byte_fallback_tokenizer()
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    if kind == "composing":
        tokenizer.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue] - untyped
    if kind == "swallowing":
        tokenizer.add_tokens([AddedToken("word", lstrip=True, normalized=False)])
    if kind == "overlapping":
        tokenizer.add_tokens([AddedToken("<|im_end|> x", normalized=False), AddedToken("|><|", normalized=False)])
    if kind == "prefixing":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)  # pyright: ignore[reportAttributeAccessIssue] - untyped
    return tokenizer


KINDS = ["byte level", "composing", "swallowing", "overlapping", "prefixing", "byte fallback"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_ids_are_those_of_the_whole_text(kind: str, tagged_model_directory: Path) -> None:
    tokenizer = tokenizer_of(kind, tagged_model_directory)
    cache = SegmentCache(tokenizer, max_characters=60)

    @settings(max_examples=300, deadline=None)
    @given(TEXTS)
    def check(text: str) -> None:
        expected = tokenizer.encode(text, add_special_tokens=False).ids
        assert cache.encode(text) == expected
        assert cache.encode(text) == expected

    check()


def test_a_longer_conversation_finds_what_it_repeats(smollm2_tokenizer: Tokenizer) -> None:
    cache = SegmentCache(smollm2_tokenizer)
    turns = [f"<|im_start|>user\nquestion {number}<|im_end|>\n" for number in range(20)]
    cache.encode("".join(turns[:19]))
    found = cache.segments_found
    cache.encode("".join(turns))
    assert cache.segments_found - found == 2 * 20 - 1  # all but the new question; line ends are segments too


def test_memory_is_bounded_and_the_newest_stays(smollm2_tokenizer: Tokenizer) -> None:
    cache = SegmentCache(smollm2_tokenizer, max_characters=1000)
    texts = [f"{number:04} " * 20 for number in range(50)]
    for text in texts:
        cache.encode(text)
    assert cache._characters <= 1000  # pyright: ignore[reportPrivateUsage] - what it holds
    assert sum(map(len, cache._ids)) == cache._characters  # pyright: ignore[reportPrivateUsage]
    found = cache.segments_found
    cache.encode(texts[-1])
    cache.encode(texts[0])
    assert cache.segments_found == found + 1


@pytest.mark.parametrize("family", ["template", "qwen3"])
def test_prompts_are_the_same_whether_remembered_or_not(family: str, tagged_model_directory: Path) -> None:
    warm = load_renderer(tagged_model_directory, family)
    messages: list[Any] = [
        {"role": ("user", "assistant")[number % 2], "content": f"says {number}"} for number in range(9)
    ]
    prompts = [warm.render(messages[: length + 1]).token_ids for length in range(9)]
    for length, prompt in enumerate(prompts):
        assert load_renderer(tagged_model_directory, family).render(messages[: length + 1]).token_ids == prompt
        assert warm.render(messages[: length + 1]).token_ids == prompt


def test_threads_share_it(smollm2_tokenizer: Tokenizer) -> None:
    cache = SegmentCache(smollm2_tokenizer, max_characters=200)
    texts = [f"<|im_start|>words {number}<|im_end|>" for number in range(40)]
    expected = [smollm2_tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    wrong: list[str] = []

    def encode_all() -> None:
        wrong.extend(text for text, ids in zip(texts * 5, expected * 5, strict=True) if cache.encode(text) != ids)

    threads = [threading.Thread(target=encode_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
