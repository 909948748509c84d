"""Cuts streamed text at the client's stop strings, as the engine cuts its own."""

from collections.abc import Sequence


class StopStringCutter:
    """Passes text on up to the first occurrence of a stop string, which is left out with all that follows.

    Text that could be the beginning of one is held back until it is certain. The sampled ids are not touched.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = [text for text in stop if text]
        self._held = ""
        self._is_cut = False

    def push(self, text: str) -> str:
        """What of `text`, and of what was held, is certain."""
        if self._is_cut:
            return ""
        if not self._stop:
            return text
        self._held += text
        found = [position for stop in self._stop if (position := self._held.find(stop)) >= 0]
        if found:
            self._is_cut = True
            passed, self._held = self._held[: min(found)], ""
            return passed
        keep = max(partial_match_length(self._held, stop) for stop in self._stop)
        passed, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return passed

    def finish(self) -> str:
        """What was held and turned out to be no stop string."""
        passed, self._held = self._held, ""
        return passed


def partial_match_length(text: str, pattern: str) -> int:
    """Length of the longest end of `text` that is a beginning, but not the whole, of `pattern`."""
    for length in range(min(len(text), len(pattern) - 1), 0, -1):
        if pattern.startswith(text[-length:]):
            return length
    return 0
