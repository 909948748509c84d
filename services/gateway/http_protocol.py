"""HTTP/1.1 by httptools (llhttp, in C), without what it lacks beside uvicorn's other parser, h11.

H11 is Python, and costs more for every request and every chunk. But it bounds the size of a head, where httptools reads
headers and trailers without end; it keeps trailers apart, where httptools gives them out as headers; and it ignores an
offer to go on in HTTP/2, where httptools drops the body of such a request. Java's client makes that offer with every
request. Besides, uvicorn tells only the newest of several pipelined requests that the connection ended: here the one
that is being answered is told, too.
"""

import asyncio
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
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
        self._is_in_head = False
        self._answering: RequestResponseCycle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._other_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._end()
            return
        if self._other_bytes > self._max_head_bytes + _FRAMING_BYTES_PER_BODY_BYTE * self._body_bytes:
            self._end()

    def on_message_begin(self) -> None:
        # What came with it in one piece is not counted: it belongs to the message before, or is bounded by the piece.
        self._other_bytes = self._body_bytes = 0
        self._is_in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # What a trailer says is believed of no header: it came after all that looks at them.
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._other_bytes -= len(body)
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def _feed(self, data: bytes) -> None:
        """Raises HttpParserError."""
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                self._decline()
                data = data[offer.args[0] :]
            else:
                return

    def _decline(self) -> None:
        """Reads the head of the present message anew, as if it made no offer. Raises HttpParserError."""
        method = self.parser.get_method()
        if method == b"CONNECT":  # Itself an offer.
            raise httptools.HttpParserError("this is no proxy")
        lines = [b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % (name, value) for name, value in self.headers if name not in _OF_AN_UPGRADE]
        if any(name == b"connection" and b"close" in value.lower() for name, value in self.headers):
            lines.append(b"connection: close")
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.parser.feed_data(b"\r\n".join([*lines, b"", b""]))

    def _end(self) -> None:
        self.send_400_response("Invalid HTTP request received.")
