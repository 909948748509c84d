"""Bounds on what a client may send before anything of it is understood."""

import asyncio

from starlette.requests import ClientDisconnect, Request

from clawstream.errors import RequestRefused


def check_headers(request: Request, max_bytes: int) -> None:
    """Raises RequestRefused, status 431, when path, query and headers are together larger than `max_bytes`."""
    size = len(request.scope["raw_path"] or b"") + len(request.scope["query_string"])
    size += sum(len(name) + len(value) for name, value in request.scope["headers"])
    if size > max_bytes:
        raise RequestRefused(
            f"the request's headers are larger than {max_bytes} bytes", status=431, code="headers_too_large"
        )


async def read_body(request: Request, max_bytes: int, timeout_seconds: float) -> bytes:
    """The whole body. Raises RequestRefused: status 413 as soon as it is known to be too large, 408 when it stalls;
    ClientDisconnect when the connection ends before."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    pieces: list[bytes] = []
    size = 0
    while True:
        try:
            async with asyncio.timeout(timeout_seconds):
                message = await request.receive()
        except TimeoutError as error:
            raise RequestRefused(
                f"nothing of the request body came for {timeout_seconds:g} s", status=408, code="request_timeout"
            ) from error
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        piece = message.get("body", b"")
        size += len(piece)
        if size > max_bytes:
            raise _too_large(max_bytes)
        pieces.append(piece)
        if not message.get("more_body", False):
            return b"".join(pieces)


def _too_large(max_bytes: int) -> RequestRefused:
    return RequestRefused(f"the request body is larger than {max_bytes} bytes", status=413, code="request_too_large")
