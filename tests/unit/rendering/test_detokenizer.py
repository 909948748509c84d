"""The sum of the pieces is the whole."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from clawstream.rendering.detokenizer import IncrementalDetokenizer, byte_token_ids
from services.engine.tiny_model import build_tokenizer
from tests.fixtures.tokenizers import byte_fallback_tokenizer

BYTE_LEVEL = build_tokenizer(512)
BYTE_FALLBACK = byte_fallback_tokenizer()


def pieces_of(tokenizer: Tokenizer, pieces: list[list[int]]) -> list[str]:
    special_ids = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    detokenizer = IncrementalDetokenizer(
        tokenizer, byte_ids=byte_token_ids(tokenizer.get_vocab()), special_ids=special_ids
    )
    return [*(detokenizer.push(piece) for piece in pieces), detokenizer.finish()]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte level", "byte fallback"])
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_pieces_of_any_ids_add_up_to_the_whole_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    token = st.integers(0, tokenizer.get_vocab_size() - 1)
    pieces = data.draw(st.lists(st.lists(token, max_size=4), max_size=12))
    whole = tokenizer.decode([token_id for piece in pieces for token_id in piece], skip_special_tokens=True)
    assert "".join(pieces_of(tokenizer, pieces)) == whole


@given(text=st.text(max_size=30))
@settings(max_examples=200, deadline=None)
def test_no_replacement_character_while_a_character_is_incomplete(text: str) -> None:
    text = BYTE_LEVEL.decode(BYTE_LEVEL.encode(text).ids)  # the tokenizer normalises
    parts = pieces_of(BYTE_LEVEL, [[token_id] for token_id in BYTE_LEVEL.encode(text).ids])
    assert "".join(parts) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts)


def test_an_emoji_over_four_tokens_comes_whole() -> None:
    ids = BYTE_LEVEL.encode("😀").ids
    assert len(ids) == 4
    assert pieces_of(BYTE_LEVEL, [[token_id] for token_id in ids]) == ["", "", "", "😀", ""]


def test_a_cut_inside_a_character_shows_at_the_end_only() -> None:
    ids = BYTE_LEVEL.encode("a😀").ids[:-1]
    parts = pieces_of(BYTE_LEVEL, [[token_id] for token_id in ids])
    assert parts[:-1] == ["a", "", "", ""]
    assert parts[-1] == BYTE_LEVEL.decode(ids)[1:]
    assert set(parts[-1]) == {"\ufffd"}


@pytest.mark.model
def test_smollm2_text_round_trips_token_by_token(smollm2_directory: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2_directory / "tokenizer.json"))
    text = "  Größe: 漢字 👩‍👩‍👧 done.\n\n```py\nx = 1\n```\n"
    parts = pieces_of(tokenizer, [[token_id] for token_id in tokenizer.encode(text).ids])
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)
