# pyright: basic
"""Tokenises a conversation piece by piece and remembers the pieces: the next request repeats all but the last.

Agents send 12,000 tokens for every 50 that are new. Special tokens divide a text before anything else is done with it,
so that what stands between two of them is tokenised by itself.

Basic type checking: tokenizers' classes are untyped here.
"""

import json
import re
import threading
from array import array
from collections import OrderedDict

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

_MAX_CHARACTERS = 4_000_000
"""Of all segments that are remembered: about 10 MB with their ids."""
_LARGEST_SEGMENT = _MAX_CHARACTERS // 8
"""A longer one would push too many others out."""
_INDEPENDENT_STEPS = ("ByteLevel", "Digits", "Punctuation", "Split")
"""Pre-tokenizers for which it does not matter whether something stands before the segment."""


class SegmentCache:
    """Ids of texts, equal to what the tokenizer gives for the whole. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, *, max_characters: int = _MAX_CHARACTERS) -> None:
        """Where segments would depend on each other, nothing is remembered."""
        self._tokenizer = tokenizer
        self._max_characters = max_characters
        self._dividers = _dividers(tokenizer)
        self._pattern = (
            re.compile("(" + "|".join(map(re.escape, sorted(self._dividers, key=len, reverse=True))) + ")")
            if self._dividers
            else None
        )
        self._lock = threading.Lock()
        self._ids: OrderedDict[str, array[int]] = OrderedDict()
        self._characters = 0
        self.segments_found = 0
        """How many were remembered when they were asked for."""

    def encode(self, text: str) -> list[int]:
        """[tokens], no special tokens added."""
        if self._pattern is None:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        ids: list[int] = []
        for number, part in enumerate(self._pattern.split(text)):
            if number % 2:
                ids.append(self._dividers[part])
            elif part:
                ids.extend(self._segment(part))
        return ids

    def _segment(self, text: str) -> "array[int] | list[int]":
        with self._lock:
            found = self._ids.get(text)
            if found is not None:
                self._ids.move_to_end(text)
                self.segments_found += 1
                return found
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if len(text) <= _LARGEST_SEGMENT:
            with self._lock:
                if text not in self._ids:
                    self._ids[text] = array("i", ids)
                    self._characters += len(text)
                while self._characters > self._max_characters:
                    oldest, _ = self._ids.popitem(last=False)
                    self._characters -= len(oldest)
        return ids


def _dividers(tokenizer: Tokenizer) -> dict[str, int]:
    """The tokens that divide every text before it is normalised; empty when what is between them may depend on more."""
    added = {
        token.content: number for number, token in tokenizer.get_added_tokens_decoder().items() if not token.normalized
    }
    plain = not any(
        token.lstrip or token.rstrip or token.single_word for token in tokenizer.get_added_tokens_decoder().values()
    )
    normalizer = tokenizer.normalizer
    if not (
        plain
        and isinstance(tokenizer.model, models.BPE)
        and not tokenizer.model.dropout
        and (normalizer is None or isinstance(normalizer, normalizers.NFC))
        and isinstance(tokenizer.pre_tokenizer, pre_tokenizers.PreTokenizer)
    ):
        return {}
    description = json.loads(tokenizer.pre_tokenizer.__getstate__())
    steps = description["pretokenizers"] if description["type"] == "Sequence" else [description]
    independent = all(step["type"] in _INDEPENDENT_STEPS and not step.get("add_prefix_space") for step in steps)
    return added if independent else {}
