"""Judges by any OpenAI-compatible chat endpoint."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import aiohttp
import orjson
from pydantic import JsonValue, SecretStr

from clawstream.errors import (
    EngineBusy,
    EngineProtocolError,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
    EngineUnreachable,
)
from schemas.events import NextStateEvent
from schemas.events.base import Message
from schemas.judge_spec import JudgeSpec
from services.judge.backends.generated import interpret_generation, judge_messages
from services.judge.backends.interface import ModelAnswer, Opinion
from services.judge.prompts import PromptFile

_MAX_ERROR_CHARACTERS: Final = 300
"""Of an endpoint's error body that is kept in messages."""


class OpenAIBackend:
    """`POST {base_url}/chat/completions`, with `n` for several votes. The API key is never logged, nor in an error."""

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

    async def call(self, request: Mapping[str, JsonValue], answers: int = 1) -> Sequence[ModelAnswer]:
        """Text and finish reason of each choice. Reasoning that the endpoint separates is left out: it has no verdict.

        A choice of another shape is passed over while there is a good one. Usage is told for all choices together.
        """
        body = request if answers == 1 else {**request, "n": answers}
        document = _object(await self._post(orjson.dumps(body)), "the answer")
        choices: object = document.get("choices")
        if not isinstance(choices, list) or not choices:
            raise EngineProtocolError(f"judge at {self._url}: an answer without choices")
        responses: list[JsonValue] = []
        problem: EngineProtocolError | None = None
        for number, choice in enumerate(cast("list[object]", choices)[:answers]):
            try:
                responses.append(_response(choice, number))
            except EngineProtocolError as error:
                problem = problem or error
        if problem is not None and not responses:
            raise problem
        usage = cast("dict[str, Any]", document.get("usage") or {})
        prompt_tokens = [int(usage.get("prompt_tokens") or 0), *([0] * (len(responses) - 1))]
        completion_tokens = _shared_out(int(usage.get("completion_tokens") or 0), len(responses))
        return [ModelAnswer(*each) for each in zip(responses, prompt_tokens, completion_tokens, strict=True)]

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
            raise EngineUnreachable(f"judge at {self._url}: {error}") from error
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


def _response(choice: object, number: int) -> JsonValue:
    fields = _object(choice, f"choices[{number}]")
    content: object = _object(fields.get("message"), f"choices[{number}].message").get("content")
    return {"text": content if isinstance(content, str) else "", "finish_reason": str(fields.get("finish_reason"))}


def _shared_out(total: int, among: int) -> list[int]:
    """`among` numbers that differ by one at most and add up to `total`."""
    least, more = divmod(total, among)
    return [least + (number < more) for number in range(among)]


def _object(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise EngineProtocolError(f"judge: {what} is not a JSON object")
    return cast("dict[str, Any]", value)
