"""What a command prints, kept within a bound whatever it prints."""

from typing import Final

_HEAD_SHARE: Final = 0.3
"""Of what is kept: errors tend to stand at the end, and what was asked for at the beginning."""


class BoundedOutput:
    """The first and the last bytes of a stream."""

    def __init__(self, max_bytes: int) -> None:
        self._head_bytes = int(max_bytes * _HEAD_SHARE)
        self._tail_bytes = max_bytes - self._head_bytes
        self._head = bytearray()
        self._tail = bytearray()
        self.total_bytes = 0
        """How much was added."""

    def add(self, piece: bytes) -> None:
        """What came next."""
        self.total_bytes += len(piece)
        room = self._head_bytes - len(self._head)
        self._head += piece[:room]
        self._tail += piece[room:]
        if len(self._tail) > self._tail_bytes:
            del self._tail[: -self._tail_bytes]

    def text(self) -> str:
        """As text, with a note where something was left out. Bytes that are no UTF-8 are replaced."""
        left_out = self.total_bytes - len(self._head) - len(self._tail)
        if left_out == 0:
            return (self._head + self._tail).decode("utf-8", errors="replace")
        head, tail = (part.decode("utf-8", errors="replace") for part in (self._head, self._tail))
        return f"{head}\n[... {left_out} bytes left out ...]\n{tail}"
