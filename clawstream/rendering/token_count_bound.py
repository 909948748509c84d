# pyright: basic
"""How many tokens a text has at least, found without tokenising it: a prompt that cannot fit is refused at once.

Basic type checking: tokenizers' classes are untyped here.
"""

import json
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

_LETTERS = string.ascii_letters.encode()
_DIGITS = string.digits.encode()
_WHITE_SPACE = string.whitespace.encode()
_ABOVE_ASCII = bytes(range(0x80, 0x100))
_OTHER_ASCII = bytes(set(range(0x80)) - set(_LETTERS + _DIGITS + _WHITE_SPACE))
_ALL = bytes(range(0x100))
_KEEPING_PRE_TOKENIZERS = ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts")
"""Those that leave no character out, whatever they split, unless told to remove what they match."""


@dataclass(frozen=True, slots=True)
class TokenCountBound:
    """A lower bound that every tokenizer keeps whose tokens hold all bytes of the text.

    A text with n letters has at least n / k tokens if no token has more than k letters. The same holds for every other
    set of bytes, so the largest of several such quotients is a bound too. Words have no tokens of twenty letters, so
    letters bound ordinary text more closely than the longest token, which is often a ruler of eighty dashes.
    """

    most_in_one_token: Mapping[bytes, int]
    """By set of bytes: how many of them the token has that has most. Never 0."""

    @classmethod
    def of_tokens(cls, tokens: Iterable[bytes], byte_sets: Iterable[bytes]) -> "TokenCountBound":
        """`tokens` are all that the vocabulary has, as the bytes of the text that they stand for."""
        most = dict.fromkeys(byte_sets, 0)
        for token in tokens:
            for byte_set, so_far in most.items():
                if len(token) > so_far:
                    most[byte_set] = max(so_far, _count(token, byte_set))
        return cls({byte_set: count for byte_set, count in most.items() if count})

    def at_least(self, text: bytes) -> int:
        """Least number of tokens of a normalised text in UTF-8."""
        # Rounded up: -(-a // b).
        return max((-(-_count(text, byte_set) // most) for byte_set, most in self.most_in_one_token.items()), default=0)


class LeastTokenCount:
    """The bound for one tokenizer. Built when it is first needed: that takes a look at every token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def of(self, text: str) -> int:
        """Least number of tokens of `text`; 0 for a tokenizer of which nothing is certain."""
        bound = self._bound
        if bound is None:
            return 0
        if self._tokenizer.normalizer is not None:
            text = self._tokenizer.normalizer.normalize_str(text)
        return bound.at_least(text.encode("utf-8", errors="surrogatepass"))

    @cached_property
    def _bound(self) -> TokenCountBound | None:
        """None when parts of a text may be in no token: unknown words, or white space that is thrown away."""
        tokenizer = self._tokenizer
        steps = _steps(tokenizer.pre_tokenizer)
        if not isinstance(tokenizer.model, models.BPE) or not all(_keeps_all(step) for step in steps):
            return None
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        added = tokenizer.get_added_tokens_decoder().values()
        byte_sets = [_LETTERS, _DIGITS, _OTHER_ASCII, _ABOVE_ASCII, _ALL]
        if any(step["type"] == "ByteLevel" for step in steps):
            alphabet = _byte_level_alphabet()
            known = bytes(byte for character, byte in alphabet.items() if character in vocabulary)
            tokens = [_from_byte_level(token, alphabet) for token in vocabulary]
            byte_sets.append(_WHITE_SPACE)
        elif tokenizer.model.byte_fallback:
            known = bytes(byte for byte in range(0x100) if f"<0x{byte:02X}>" in vocabulary)
            tokens = [token.encode() for token in vocabulary]
            # White space is no bound: it becomes a mark (U+2581).
        else:
            return None
        if any(token.lstrip or token.rstrip for token in added):
            # Such a token takes any white space around it.
            byte_sets = [byte_set for byte_set in byte_sets if byte_set not in (_ALL, _WHITE_SPACE)]
        # A byte without a token of its own may be left out of the ids.
        byte_sets = [bytes(byte for byte in byte_set if byte in known) for byte_set in byte_sets]
        return TokenCountBound.of_tokens([*tokens, *(token.content.encode() for token in added)], byte_sets)


def _count(text: bytes, byte_set: bytes) -> int:
    return len(text) - len(text.translate(None, byte_set))


def _byte_level_alphabet() -> dict[str, int]:
    """The character by which byte-level tokenizers spell each byte: printable ones themselves, the rest in order from
    U+0100 on (GPT-2)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def _from_byte_level(token: str, alphabet: Mapping[str, int]) -> bytes:
    """What a token stands for. One in another spelling was added as it is."""
    try:
        return bytes(alphabet[character] for character in token)
    except KeyError:
        return token.encode()


def _steps(pre_tokenizer: Any) -> list[Mapping[str, Any]]:
    """What a pre-tokenizer does, one after the other, as tokenizer.json describes it."""
    if pre_tokenizer is None:
        return []
    if not isinstance(pre_tokenizer, pre_tokenizers.PreTokenizer):
        return [{"type": type(pre_tokenizer).__name__}]  # one written in Python
    description = json.loads(pre_tokenizer.__getstate__())
    return description["pretokenizers"] if description["type"] == "Sequence" else [description]


def _keeps_all(step: Mapping[str, Any]) -> bool:
    """Whether no character gets lost before tokens are made."""
    return step["type"] in _KEEPING_PRE_TOKENIZERS and step.get("behavior") != "Removed"
