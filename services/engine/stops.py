"""Text of an answer as its tokens arrive, and the strings that end it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""What a decoder writes for the beginning of a character whose other bytes are still to come."""


class IncrementalText:
    """Turns token ids into text piece by piece, so that the pieces joined are the text of all ids.

    A token's text depends on its neighbours, so a short window is decoded twice: without and with the new tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._window_start = 0
        self._emitted_end = 0

    def add(self, token_id: int) -> str:
        """The text that became certain with this token: empty while a character is incomplete."""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._window_start : self._emitted_end])
        after = self._decode(self._ids[self._window_start :])
        if len(after) <= len(before) or after.endswith(REPLACEMENT_CHARACTER):
            return ""
        self._window_start = self._emitted_end
        self._emitted_end = len(self._ids)
        return after[len(before) :]

    def flush(self) -> str:
        """The rest at the end of an answer: an incomplete character as the decoder writes it."""
        before = self._decode(self._ids[self._window_start : self._emitted_end])
        after = self._decode(self._ids[self._window_start :])
        self._window_start = self._emitted_end = len(self._ids)
        return after[len(before) :]


@dataclass(frozen=True, slots=True)
class StopMatch:
    """What `StopStrings.add` found."""

    text: str
    """Text that can be sent: neither part of a stop string nor possibly the start of one."""
    matched: str | None
    """The stop string that ended the answer."""


class StopStrings:
    """Holds back text that may become a stop string; cuts the answer before the first one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def add(self, text: str) -> StopMatch:
        """Take newly decoded text. After a match nothing more may be added."""
        self._held += text
        found = [(self._held.find(stop), stop) for stop in self._stops if stop in self._held]
        if found:
            position, matched = min(found)
            return StopMatch(self._held[:position], matched)
        keep = max((longest_start(self._held, stop) for stop in self._stops), default=0)
        ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return StopMatch(ready, None)

    def flush(self) -> str:
        """What was held back, when the answer ends for another reason."""
        held, self._held = self._held, ""
        return held


def longest_start(text: str, stop: str) -> int:
    """Length of the longest proper start of `stop` that `text` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
