"""A client of any OpenAI-compatible chat endpoint, the gateway's for one, that is patient with one that is away."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self, cast

import httpx

from clawstream.errors import EngineProtocolError, EngineRejected, EngineUnavailable

_FIRST_WAIT_SECONDS: Final = 0.5
_LONGEST_WAIT_SECONDS: Final = 15.0
_PATIENT_STATUS: Final = (408, 409, 425, 429)
"""4xx answers that may change by themselves."""


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """One answer."""

    message: dict[str, Any]
    """The assistant message, without nulls: it goes back into the history as it came."""
    finish_reason: str
    """`stop`, `length`, `tool_calls`..."""
    tokens: int
    """Of the answer, as the endpoint counted them; 0 when it did not."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of the response, names in lower case."""

    @property
    def text(self) -> str:
        """Its content; empty when it has none."""
        return str(self.message.get("content") or "")


class ChatClient:
    """Tries again for `patience_seconds` while the endpoint is away or busy; other refusals are raised at once."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str,
        model: str | None,
        patience_seconds: float,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        on_wait: Callable[[EngineUnavailable], None] = lambda problem: None,
    ) -> None:
        """`base_url` ends in `/v1`, as OpenAI clients have it. Without `model` the endpoint's default answers.

        `on_wait` hears, before each pause, what is waited for.
        """
        self._http = httpx.AsyncClient(
            base_url=base_url.rstrip("/") + "/",
            headers={"Authorization": f"Bearer {api_key}", "User-Agent": "clawstream"},
            timeout=httpx.Timeout(600.0, connect=10.0),
            limits=httpx.Limits(max_connections=None),
        )
        self._model = model
        self._patience_seconds = patience_seconds
        self._sleep = sleep
        self._on_wait = on_wait

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], *, headers: Mapping[str, str] | None = None, **options: Any
    ) -> ChatAnswer:
        """One answer, not streamed. `options` are fields of the request.

        Raises EngineRejected for a refusal, EngineUnavailable when patience is at its end, and EngineProtocolError for
        an answer that is none.
        """
        body: dict[str, Any] = {"messages": list(messages), **options}
        if self._model is not None:
            body["model"] = self._model
        response = await self.post("chat/completions", body, headers or {})
        try:
            content = response.json()
            choice = content["choices"][0]
            message = cast("dict[str, Any]", choice["message"])
            usage = cast("dict[str, Any]", content.get("usage") or {})
            return ChatAnswer(
                message={key: value for key, value in message.items() if value is not None},
                finish_reason=str(choice.get("finish_reason") or ""),
                tokens=int(usage.get("completion_tokens") or 0),
                headers=dict(response.headers),
            )
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise EngineProtocolError(f"{response.url}: no chat completion: {response.text[:500]!r}") from error

    async def post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> httpx.Response:
        """Any POST, with the same patience and the same errors."""
        waited, wait = 0.0, _FIRST_WAIT_SECONDS
        while True:
            advice = None
            try:
                response = await self._http.post(path, json=body, headers=headers)
            except httpx.TransportError as error:
                problem = EngineUnavailable(f"{self._http.base_url}{path}: {type(error).__name__}: {error}")
            else:
                if response.status_code < 400:
                    return response
                said = f"{response.url}: {response.status_code} {response.text[:500]}"
                if response.status_code < 500 and response.status_code not in _PATIENT_STATUS:
                    raise EngineRejected(said, status=response.status_code, body=response.text[:2000])
                problem, advice = EngineUnavailable(said), _seconds(response.headers.get("retry-after"))
            if waited >= self._patience_seconds:
                raise problem
            self._on_wait(problem)
            pause = advice if advice is not None else wait * random.uniform(0.5, 1.0)
            await self._sleep(pause)
            waited, wait = waited + pause, min(wait * 2, _LONGEST_WAIT_SECONDS)


def _seconds(retry_after: str | None) -> float | None:
    """`Retry-After` in seconds; None when it is absent or a date."""
    try:
        return max(float(retry_after), 0.05) if retry_after is not None else None
    except ValueError:
        return None
