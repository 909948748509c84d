"""Judges by any OpenAI-compatible chat endpoint."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import aiohttp
import orjson
from pydantic import JsonValue, SecretStr

from clawstream.errors import EngineBusy, EngineProtocolError, EngineRejected, EngineTimeout, EngineUnavailable
from schemas.events import NextStateEvent
from schemas.events.base import Message
from schemas.judge_spec import JudgeSpec
from services.judge.backends.generated import interpret_generation, judge_messages
from services.judge.backends.interface import ModelAnswer, Opinion
from services.judge.prompts import PromptFile

_MAX_ERROR_CHARACTERS: Final = 300
"""Of an endpoint's error body that is kept in messages."""


class OpenAIBackend:
    """One `POST {base_url}/chat/completions` per vote. The API key is never logged and never part of an error."""

    def __init__(
        self, spec: JudgeSpec, prompt: PromptFile, *, base_url: str, api_key: SecretStr | None, timeout_seconds: float
    ) -> None:
        self._spec = spec
        self._prompt = prompt
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._api_key = api_key
        self._timeout_seconds = timeout_seconds
        self._session: aiohttp.ClientSession | None = None

    def prepare(self, next_state: NextStateEvent) -> Mapping[str, JsonValue]:
        """The request with the verdict prompt."""
        return self.request(judge_messages(self._prompt.text, next_state, self._spec.max_prompt_characters))

    def request(self, messages: Sequence[Message]) -> Mapping[str, JsonValue]:
        """The body."""
        return {
            "model": self._spec.model,
            "messages": cast("list[JsonValue]", list(messages)),
            "temperature": self._spec.temperature,
            "max_tokens": self._spec.max_new_tokens,
        }

    async def call(self, request: Mapping[str, JsonValue]) -> ModelAnswer:
        """Text and finish reason. Reasoning that the endpoint separates is left out: it holds no verdict."""
        document = _object(await self._post(orjson.dumps(request)), "the answer")
        choices: object = document.get("choices")
        if not isinstance(choices, list) or not choices:
            raise EngineProtocolError(f"judge at {self._url}: an answer without choices")
        choice = _object(cast("list[object]", choices)[0], "choices[0]")
        content: object = _object(choice.get("message"), "choices[0].message").get("content")
        usage = cast("dict[str, Any]", document.get("usage") or {})
        return ModelAnswer(
            response={
                "text": content if isinstance(content, str) else "",
                "finish_reason": str(choice.get("finish_reason")),
            },
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            completion_tokens=int(usage.get("completion_tokens") or 0),
        )

    def interpret(self, response: JsonValue) -> Opinion:
        """The boxed verdict."""
        return interpret_generation(response)

    async def close(self) -> None:
        """Closes connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _post(self, body: bytes) -> object:
        try:
            async with self._open_session().post(self._url, data=body) as response:
                content = await response.read()
                if response.status >= 400:
                    self._raise_for_status(response, content)
        except TimeoutError as error:
            raise EngineTimeout(f"judge at {self._url}: no answer within {self._timeout_seconds} s") from error
        except aiohttp.ClientError as error:
            raise EngineUnavailable(f"judge at {self._url}: {error}") from error
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise EngineProtocolError(f"judge at {self._url}: the answer is not JSON: {error}") from error

    def _raise_for_status(self, response: aiohttp.ClientResponse, content: bytes) -> None:
        body = content.decode("utf-8", errors="replace")[:_MAX_ERROR_CHARACTERS]
        if self._api_key is not None:
            body = body.replace(self._api_key.get_secret_value(), "***")
        message = f"judge at {self._url} answered {response.status}: {body}"
        if response.status in (429, 503):
            raise EngineBusy(message, retry_after_seconds=retry_after_seconds(response.headers.get("retry-after")))
        if response.status >= 500:
            raise EngineUnavailable(message)
        raise EngineRejected(message, status=response.status, body=body)

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            headers = {"content-type": "application/json"}
            if self._api_key is not None:
                headers["authorization"] = f"Bearer {self._api_key.get_secret_value()}"
            self._session = aiohttp.ClientSession(
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=self._timeout_seconds),
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("accept", "user-agent"),
            )
        return self._session


def retry_after_seconds(header: str | None) -> float | None:
    """The seconds in a `Retry-After` header; None when it is absent or a date, which needs a clock that agrees."""
    if header is None or not header.strip().isdecimal():
        return None
    return float(header.strip())


def _object(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise EngineProtocolError(f"judge: {what} is not a JSON object")
    return cast("dict[str, Any]", value)
