"""Ids to text, piece by piece, equal in sum to decoding them all at once."""

import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Decoder(Protocol):
    """What is needed of `tokenizers.Tokenizer`."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Ids to text."""
        ...


def byte_token_ids(vocabulary: Mapping[str, int]) -> frozenset[int]:
    """Ids of tokens such as `<0xF0>` that stand for one byte; empty for byte-level tokenizers."""
    return frozenset(number for token, number in vocabulary.items() if _BYTE_TOKEN.fullmatch(token))


class IncrementalDetokenizer:
    """Feeds on ids and gives text as soon as it cannot change any more.

    The sum of all that `push` and `finish` return equals `decode` of all ids. What could still change is held back:

    - replacement characters at the end: the bytes of one character are often spread over several tokens, and an
      incomplete character decodes to U+FFFD until its last byte is there;
    - everything after the last other token when the tokenizer spells bytes as tokens (`<0xF0>`): such decoders judge a
      whole run of byte tokens at once.

    So U+FFFD appears only where the bytes are no character, or where the answer was cut inside one.
    """

    def __init__(
        self,
        tokenizer: Decoder,
        *,
        byte_ids: AbstractSet[int] = frozenset(),
        special_ids: AbstractSet[int] = frozenset(),
    ) -> None:
        """`byte_ids` are from `byte_token_ids`; `special_ids` are those that decoding leaves out."""
        self._tokenizer = tokenizer
        self._byte_ids = byte_ids
        self._special_ids = special_ids
        self._context: list[int] = []
        self._context_text = ""
        # The ids after the context, and how much of their text was given.
        self._pending: list[int] = []
        self._given_characters = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """What became certain by these ids."""
        self._pending += token_ids
        if self._byte_ids and self._ends_in_byte_token():
            return ""
        text = self._pending_text()
        certain = text.rstrip(REPLACEMENT)
        new = certain[self._given_characters :]
        if len(certain) == len(text) and text:
            # Nothing is open: what was pending is now the context, which decoders with a prefix rule need.
            self._context, self._pending, self._given_characters = self._pending, [], 0
            self._context_text = self._tokenizer.decode(self._context)
        else:
            self._given_characters = max(self._given_characters, len(certain))
        return new

    def finish(self) -> str:
        """What was still held back. The detokenizer starts anew after it."""
        text = self._pending_text()[self._given_characters :]
        self._context, self._context_text, self._pending, self._given_characters = [], "", [], 0
        return text

    def _ends_in_byte_token(self) -> bool:
        visible = (token_id for token_id in reversed(self._pending) if token_id not in self._special_ids)
        return next(visible, None) in self._byte_ids

    def _pending_text(self) -> str:
        return self._tokenizer.decode([*self._context, *self._pending])[len(self._context_text) :]
