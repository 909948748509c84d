"""HTTP/1.1 by httptools (llhttp, in C), without what it lacks beside uvicorn's other parser, h11.

H11 is Python, and costs more for every request and every chunk. But it bounds the size of a head, where httptools reads
headers and trailers without end; and it ignores an offer to go on in HTTP/2, where httptools drops the body of such a
request. Java's client makes that offer with every request.
"""

import asyncio

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

_FRAMING_BYTES_PER_BODY_BYTE = 8
"""A body sent byte by byte has six of chunk framing for each."""
_OF_AN_UPGRADE = (b"connection", b"upgrade", b"http2-settings")


class BoundedHttpProtocol(HttpToolsProtocol):
    """Ends a connection whose head grows beyond `h11_max_incomplete_event_size` of the server's settings.

    Heads of up to that size are the application's to refuse, with words of its own.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        if config.h11_max_incomplete_event_size is None:
            raise ValueError("h11_max_incomplete_event_size must be set: it bounds the size of a head")
        self._max_head_bytes = config.h11_max_incomplete_event_size
        self._other_bytes = 0
        """Of the present message, as far as it began in an earlier piece: head, framing, trailers."""
        self._body_bytes = 0

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._other_bytes += len(data)
        try:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                self._decline(data[offer.args[0] :])
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._end()
            return
        if self._other_bytes > self._max_head_bytes + _FRAMING_BYTES_PER_BODY_BYTE * self._body_bytes:
            self._end()

    def on_message_begin(self) -> None:
        # What came with it in one piece is not counted: it belongs to the message before, or is bounded by the piece.
        self._other_bytes = self._body_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._other_bytes -= len(body)
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _decline(self, rest: bytes) -> None:
        """Reads the message anew, as if it made no offer; `rest` follows its head. Raises what the parser raises."""
        lines = [b"%b %b HTTP/1.1" % (self.parser.get_method(), self.url)]
        lines += [b"%b: %b" % (name, value) for name, value in self.headers if name not in _OF_AN_UPGRADE]
        if any(name == b"connection" and b"close" in value.lower() for name, value in self.headers):
            lines.append(b"connection: close")
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(b"\r\n".join([*lines, b"", rest]))

    def _end(self) -> None:
        self.send_400_response("Invalid HTTP request received.")
