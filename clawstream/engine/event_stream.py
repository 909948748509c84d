"""Server-sent events out of a byte stream: pure, no I/O."""

from collections.abc import Iterator


class EventStreamSplitter:
    """Cuts bytes, in whatever pieces they arrive, into the data of server-sent events (WHATWG HTML section 9.2).

    Only `data` fields matter here; comments and other fields are skipped. An event may be of any length.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The data of every event that `piece` completes, in order."""
        self._buffer += piece
        if b"\r" in piece:
            self._buffer = bytearray(self._buffer.replace(b"\r\n", b"\n"))
        start = 0
        while (end := self._buffer.find(b"\n\n", start)) >= 0:
            data = b"\n".join(
                line[5:].removeprefix(b" ")
                for line in bytes(self._buffer[start:end]).split(b"\n")
                if line.startswith(b"data:")
            )
            start = end + 2
            if data:
                yield data
        del self._buffer[:start]
