"""HTTP to one engine: connections that are kept, deadlines, and everything that goes wrong as an error of ours."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import aiohttp
import orjson

from clawstream.errors import (
    EngineError,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
    EngineUnreachable,
)

MAX_ERROR_CHARACTERS = 2000
"""Of an engine's error body that is kept."""
_KEEP_ALIVE_SECONDS = 2.0
"""An idle connection is used again only so long. Uvicorn, which serves SGLang, closes it after 5 seconds: a POST that
meets the closing fails, and cannot be repeated blindly."""
_END_OF_STREAM_SECONDS = 0.05
"""How long the end of a stream is waited for once the answer is complete."""


class EngineConnection:
    """The connections to the engine `name` at `base_url`; the engine queues, so their number is not limited.

    Opened with the first request. To be used and closed on one event loop.
    """

    def __init__(self, name: str, base_url: str, *, connect_seconds: float, api_key: str | None) -> None:
        self._name = name
        self._base_url = base_url.rstrip("/")
        self._connect_seconds = connect_seconds
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None

    async def post(self, path: str, body: Mapping[str, Any]) -> aiohttp.ClientResponse:
        """Sends a request, and returns when the answer begins. To be called under `errors_mapped`."""
        return await self._open_session().post(
            f"{self._base_url}{path}", data=orjson.dumps(body), headers=self._headers
        )

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_seconds: float) -> object:
        """A whole call. An answer that is not JSON is given as text: SGLang has some."""
        async with (
            self.errors_mapped(path),
            asyncio.timeout(timeout_seconds),
            self._open_session().request(
                method,
                f"{self._base_url}{path}",
                data=None if body is None else orjson.dumps(body),
                headers=self._headers,
            ) as response,
        ):
            await self.raise_for_status(path, response)
            content = await response.read()
        try:
            return orjson.loads(content) if content else {}
        except orjson.JSONDecodeError:
            return content.decode("utf-8", errors="replace")

    async def status_of(self, path: str, timeout_seconds: float) -> int:
        """The HTTP status of a GET, whatever it is."""
        async with (
            self.errors_mapped(path),
            asyncio.timeout(timeout_seconds),
            self._open_session().get(f"{self._base_url}{path}", headers=self._headers) as response,
        ):
            return response.status

    async def close(self) -> None:
        """Closes what is open. Later requests open anew."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    @asynccontextmanager
    async def errors_mapped(self, path: str) -> AsyncGenerator[None]:
        """What aiohttp and asyncio raise inside becomes EngineTimeout or EngineUnreachable."""
        try:
            yield
        except (aiohttp.ConnectionTimeoutError, aiohttp.ServerTimeoutError, TimeoutError) as error:
            if isinstance(error, EngineTimeout):
                raise
            raise EngineTimeout(f"engine {self._name} at {self._base_url}{path}: no answer in time") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            if isinstance(error, EngineError):
                raise
            raise EngineUnreachable(f"engine {self._name} at {self._base_url}{path}: {error}") from error

    async def raise_for_status(self, path: str, response: aiohttp.ClientResponse) -> None:
        """Raises EngineRejected for 4xx and EngineUnavailable for 5xx, with the engine's own words."""
        if response.status >= 400:
            self.raise_error(path, response.status, _error_message(await response.text(errors="replace")))

    def raise_error(self, path: str, status: int, message: str) -> None:
        """Raises what an answer of this `status`, 400 or more, would."""
        if 400 <= status < 500:
            raise EngineRejected(
                f"engine {self._name}: {path} answered {status}: {message}", status=status, body=message
            )
        raise EngineUnavailable(f"engine {self._name}: {path} answered {status}: {message}")

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_seconds),
                read_bufsize=1 << 20,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


async def read_to_end(response: aiohttp.ClientResponse) -> None:
    """A connection with something left to read is closed: the next request would have to open another one first."""
    with suppress(aiohttp.ClientError, ConnectionError, TimeoutError):
        async with asyncio.timeout(_END_OF_STREAM_SECONDS):
            while not response.content.at_eof():
                await response.content.readany()


def _error_message(body: str) -> str:
    """The message inside the error shapes that SGLang uses, else the text itself."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:MAX_ERROR_CHARACTERS]
    while isinstance(found, dict):
        record = cast("dict[str, Any]", found)
        found = record.get("error") or record.get("message") or record.get("detail")
    return str(found or body)[:MAX_ERROR_CHARACTERS]
