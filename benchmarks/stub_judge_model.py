"""A judge model that always says the same, over real HTTP and as cheap as Python can make it: a benchmark's other side.

Speaks just enough of HTTP/1.1 and of `POST /v1/chat/completions`. Prints its URL and serves until killed.
"""

import argparse
import asyncio
import functools
import re
import sys
from typing import Final, cast

import orjson
import uvloop

_TEXT: Final = "The user is content with the answer. \\boxed{1}"
_SEVERAL: Final = re.compile(rb'"n":(\d+)')
"""In the body's text it would stand with escaped quotation marks."""
_LENGTH: Final = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


@functools.cache
def response(answers: int) -> bytes:
    """A whole HTTP response with so many choices."""
    choice = {"message": {"role": "assistant", "content": _TEXT}, "finish_reason": "stop"}
    content = orjson.dumps(
        {
            "choices": [{"index": number, **choice} for number in range(answers)],
            "usage": {"prompt_tokens": 400, "completion_tokens": 12 * answers},
        }
    )
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(content) + content


class Connection(asyncio.Protocol):
    """Answers every request whose body is complete, with as many choices as it asks for (`n`), after the delay."""

    def __init__(self, delay_seconds: float) -> None:
        self._delay_seconds = delay_seconds
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (head := self._received.find(b"\r\n\r\n")) >= 0:
            found = _LENGTH.search(self._received, 0, head)
            end = head + 4 + (int(found[1]) if found else 0)
            if len(self._received) < end:
                return
            several = _SEVERAL.search(self._received, head, end)
            answers = int(several[1]) if several else 1
            self._received = self._received[end:]
            if self._delay_seconds > 0:
                asyncio.get_running_loop().call_later(self._delay_seconds, self._answer, answers)
            else:
                self._answer(answers)

    def _answer(self, answers: int) -> None:
        if not self._transport.is_closing():
            self._transport.write(response(answers))


async def serve(delay_seconds: float) -> None:
    """Binds a free port of the loopback address and serves for ever."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(delay_seconds), "127.0.0.1", 0, backlog=1024)
    sys.stdout.write(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1\n")
    sys.stdout.flush()
    await server.serve_forever()


def main() -> None:
    """Reads the command line and serves until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--delay-seconds", type=float, default=0.0)
    uvloop.run(serve(parser.parse_args().delay_seconds))


if __name__ == "__main__":
    main()
