"""`EngineClient` over HTTP: SGLang's API, which `services.engine` speaks too."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, cast

import aiohttp
import orjson

from clawstream.engine.connection import MAX_ERROR_CHARACTERS, EngineConnection, read_to_end
from clawstream.engine.event_stream import EventStreamSplitter
from clawstream.engine.interface import (
    GenerationChunk,
    GenerationRequest,
    ModelInformation,
    PauseMode,
    ScoredTokens,
)
from clawstream.engine.token_ids import check_token_ids
from clawstream.engine.wire import ChunkReader, parse_scores, parse_token_texts, parse_weight_version
from clawstream.errors import EngineError, EngineProtocolError, EngineRejected, EngineUnreachable
from clawstream.wait_limit import WaitLimit

_NOT_FOUND = 404
_NOT_READY = 503


@dataclass(frozen=True, slots=True)
class EngineTimeouts:
    """Deadlines, one per phase of a call."""

    connect_seconds: float = 5.0
    """Until the connection stands."""
    first_chunk_seconds: float = 300.0
    """From the request to the first token: prefill, and waiting while weights change."""
    idle_seconds: float = 120.0
    """Between two chunks of a stream."""
    call_seconds: float = 300.0
    """A whole call that does not stream: scoring, a judge's answer."""
    control_seconds: float = 30.0
    """Pause, resume, abort, flush and questions about the model."""
    load_weights_seconds: float = 900.0
    """Loading a published artefact."""
    health_seconds: float = 5.0
    """The question whether it answers at all."""


class HttpEngineClient:
    """One engine at `base_url`. Implements `clawstream.engine.interface.EngineClient`.

    Connections are kept and not limited in number: the engine queues. Must be used and closed on one event loop.
    """

    def __init__(
        self,
        name: str,
        base_url: str,
        *,
        timeouts: EngineTimeouts | None = None,
        api_key: str | None = None,
        vocabulary_size: int | None = None,
        may_be_silent: Callable[[], bool] = lambda: False,
    ) -> None:
        """`vocabulary_size` is that of the model behind `base_url`: ids outside it are refused before they are sent.

        While `may_be_silent` says so, as during a weight update, a running answer is waited for past its deadline;
        whoever says so must have a deadline of its own.
        """
        self._name = name
        self._timeouts = timeouts or EngineTimeouts()
        self._connection = EngineConnection(
            name, base_url, connect_seconds=self._timeouts.connect_seconds, api_key=api_key
        )
        self._vocabulary_size = vocabulary_size
        self._may_be_silent = may_be_silent

    @property
    def name(self) -> str:
        return self._name

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk]:
        body = {
            "rid": request.request_id,
            "input_ids": list(request.input_ids),
            "sampling_params": dict(request.sampling_parameters),
            "return_logprob": True,
            "stream": True,
            **({"top_logprobs_num": request.top_logprobs} if request.top_logprobs else {}),
        }
        self._check_ids(body)
        reader, splitter = ChunkReader(self._name), EventStreamSplitter()
        tokens = 0
        async with self._connection.errors_mapped("/generate"):
            async with asyncio.timeout(self._timeouts.first_chunk_seconds):
                response = await self._connection.post("/generate", body)
            async with response:
                # No deadline is open while the consumer works on a chunk: its time does not count.
                wait_seconds = self._timeouts.first_chunk_seconds
                with closing(WaitLimit()) as limit:
                    await limit.wait(self._connection.raise_for_status("/generate", response), wait_seconds)
                    request.on_accepted()
                    while piece := await self._next_piece(response, limit, wait_seconds):
                        for data in splitter.feed(piece):
                            if data == b"[DONE]":
                                continue
                            chunk = reader.read(self._checked_chunk(data))
                            tokens += len(chunk.token_ids)
                            yield chunk
                            if chunk.finish_reason is not None:
                                await read_to_end(response)
                                return
                            wait_seconds = self._timeouts.idle_seconds
        raise EngineUnreachable(f"engine {self._name}: the answer broke off after {tokens} tokens")

    async def _next_piece(self, response: aiohttp.ClientResponse, limit: WaitLimit, wait_seconds: float) -> bytes:
        while True:
            try:
                return await limit.wait(response.content.readany(), wait_seconds)
            except TimeoutError:
                if not self._may_be_silent():
                    raise

    async def generate_texts(
        self, input_ids: Sequence[int], sampling_parameters: Mapping[str, Any], *, answers: int = 1
    ) -> list[tuple[str, Mapping[str, Any]]]:
        parameters = {**sampling_parameters, **({"n": answers} if answers > 1 else {})}
        body = {"input_ids": list(input_ids), "sampling_params": parameters, "stream": False}
        self._check_ids(body)
        found = await self._connection.call("POST", "/generate", body, self._timeouts.call_seconds)
        items = cast("list[object]", found) if isinstance(found, list) else [found]
        texts = [text for item in items[:answers] if (text := _text_and_meta(item)) is not None]
        if not texts:
            raise EngineProtocolError(f"engine {self._name}: /generate answered without text or meta_info")
        return texts

    async def score(
        self, prompt_ids: Sequence[int], response_ids: Sequence[int], *, top_k: int = 0, given_ids: Sequence[int] = ()
    ) -> ScoredTokens:
        if not prompt_ids:
            raise ValueError("the first token of a sequence has no log-prob: prompt_ids must not be empty")
        answer = await self._generate_whole(
            {
                "input_ids": [*prompt_ids, *response_ids],
                "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
                "return_logprob": True,
                "logprob_start_len": len(prompt_ids) - 1,
                "top_logprobs_num": top_k,
                "stream": False,
                **({"token_ids_logprob": list(given_ids)} if given_ids else {}),
            }
        )
        return parse_scores(
            answer, response_ids, self._name, top_k=top_k, given_ids=given_ids, last_prompt_id=prompt_ids[-1]
        )

    async def token_texts(self, token_ids: Sequence[int]) -> list[str | None]:
        answer = await self._generate_whole(
            {
                "input_ids": list(token_ids),
                "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
                "return_logprob": True,
                "logprob_start_len": 0,
                "return_text_in_logprobs": True,
                "stream": False,
            }
        )
        return parse_token_texts(answer, token_ids, self._name)

    async def model_information(self) -> ModelInformation:
        information = await self._get("/model_info", self._timeouts.control_seconds)
        models = await self._get("/v1/models", self._timeouts.control_seconds)
        cards = cast("list[dict[str, Any]]", models.get("data") or [])
        limit = cards[0].get("max_model_len") if cards else None
        return ModelInformation(
            model_path=str(information.get("model_path", "")),
            weight_version=parse_weight_version(information.get("weight_version")),
            max_context_tokens=int(limit) if limit else None,
        )

    async def is_healthy(self) -> bool:
        # Not /health: SGLang generates a token for it, and it waits while generation is paused.
        try:
            await self._get("/model_info", self._timeouts.health_seconds)
        except EngineError:
            return False
        return True

    async def accepts_requests(self) -> bool:
        status = await self._connection.status_of("/ready", self._timeouts.health_seconds)
        return status != _NOT_READY

    async def server_information(self) -> Mapping[str, Any]:
        try:
            return await self._get("/server_info", self._timeouts.control_seconds)
        except EngineRejected as error:
            if error.status == _NOT_FOUND:
                return {}
            raise

    async def pause(self, mode: PauseMode) -> None:
        await self._post("/pause_generation", {"mode": mode.value}, self._timeouts.control_seconds)

    async def resume(self) -> None:
        await self._post("/continue_generation", {}, self._timeouts.control_seconds)

    async def load_weights(self, directory: str, weight_version: int, *, flush_cache: bool) -> None:
        answer = await self._post(
            "/update_weights_from_disk",
            {"model_path": directory, "weight_version": str(weight_version), "flush_cache": flush_cache},
            self._timeouts.load_weights_seconds,
        )
        if answer.get("success") is not True:
            message = str(answer.get("message", ""))[:MAX_ERROR_CHARACTERS]
            raise EngineRejected(
                f"engine {self._name}: version {weight_version} was not loaded: {message}; "
                "its version is unknown until an explicit load succeeds",
                status=200,
                body=message,
            )

    async def flush_cache(self) -> None:
        await self._post("/flush_cache", {}, self._timeouts.control_seconds)

    async def abort(self, request_id: str) -> None:
        await self._post("/abort_request", {"rid": request_id}, self._timeouts.control_seconds)

    async def close(self) -> None:
        await self._connection.close()

    async def _generate_whole(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        self._check_ids(body)
        return await self._post("/generate", body, self._timeouts.call_seconds)

    def _check_ids(self, body: Mapping[str, Any]) -> None:
        check_token_ids(body, vocabulary_size=self._vocabulary_size, engine=self._name)

    async def _post(self, path: str, body: Mapping[str, Any], timeout_seconds: float) -> Mapping[str, Any]:
        return _as_object(await self._connection.call("POST", path, body, timeout_seconds))

    async def _get(self, path: str, timeout_seconds: float) -> Mapping[str, Any]:
        return _as_object(await self._connection.call("GET", path, None, timeout_seconds))

    def _checked_chunk(self, data: bytes) -> Mapping[str, Any]:
        """A streamed chunk. An error inside the stream is raised as if it were the status."""
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise EngineProtocolError(f"engine {self._name}: a streamed chunk is not JSON: {error}") from error
        if not isinstance(chunk, dict):
            raise EngineProtocolError(f"engine {self._name}: a streamed chunk is not an object")
        checked = cast("dict[str, Any]", chunk)
        failure = checked.get("error")
        if failure is not None:
            record = cast("dict[str, Any]", failure) if isinstance(failure, dict) else {"message": failure}
            code = record.get("code")
            self._connection.raise_error(
                "/generate", code if isinstance(code, int) else 500, str(record.get("message", ""))
            )
        return checked


def _text_and_meta(item: object) -> tuple[str, Mapping[str, Any]] | None:
    """Of one answer; None when it lacks either."""
    fields = _as_object(item)
    text, meta = fields.get("text"), fields.get("meta_info")
    return (text, cast("dict[str, Any]", meta)) if isinstance(text, str) and isinstance(meta, dict) else None


def _as_object(answer: object) -> Mapping[str, Any]:
    """What is no object as `{"message": answer}`."""
    return cast("dict[str, Any]", answer) if isinstance(answer, dict) else {"message": answer}
