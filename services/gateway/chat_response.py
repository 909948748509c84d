"""A running generation as an HTTP answer: one body, or server-sent events as tokens come.

Written on ASGI itself: the status must wait for the first event, so that an engine that is away is a 503 and no broken
stream, and a client who leaves must be noticed at once, whether or not anything is being sent.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from clawstream.errors import RequestRefused
from services.gateway.chat import StartedChat
from services.gateway.errors import error_body, error_headers
from services.gateway.generation import Failed, Finished, GenerationEvent, Piece
from services.gateway.openai_format import CompletionFormat, logprob_entries, sse_event
from services.gateway.ports import Placement
from services.gateway.turn_record import response_id

SESSION_HEADER = "x-clawstream-session-id"
TURN_HEADER = "x-clawstream-turn-id"
RECORDED_HEADER = "x-clawstream-recorded"
"""`true` once the turn is safe on disk. A stream knows that only at its end: it is a comment before `[DONE]` there."""


class ChatResponse(Response):
    """Sends what a generation gives."""

    def __init__(
        self,
        chat: StartedChat,
        *,
        model: str,
        created: int,
        keep_alive_seconds: float,
        decode: Callable[[Sequence[int]], str],
        refused: Callable[[RequestRefused], None],
    ) -> None:
        """`decode` gives the text of single tokens, for clients that want log-probs; `refused` counts failures."""
        super().__init__()
        self._chat = chat
        self._model = model
        self._created = created
        self._keep_alive_seconds = keep_alive_seconds
        self._decode = decode
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send_answer(send))
        leaving = asyncio.create_task(_wait_for_disconnect(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                self._chat.generation.client_gone()
                return
            await sending
        except asyncio.CancelledError:
            self._chat.generation.client_gone()
            raise
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _send_answer(self, send: Send) -> None:
        placement = await self._chat.generation.placement()
        event = await self._event_within(self._keep_alive_seconds)
        while event is None and not self._chat.request.stream:
            event = await self._event_within(self._keep_alive_seconds)
        if isinstance(event, Failed):
            await self._send_error(send, event.refusal, placement)
            return
        assert placement is not None
        completion = CompletionFormat(
            response_id=response_id(placement),
            model=self._model,
            created=self._created,
            include_usage=self._chat.request.include_usage,
        )
        if self._chat.request.stream:
            await self._send_stream(send, completion, placement, event)
        else:
            assert isinstance(event, Finished)
            logprobs = self._logprobs(event.token_ids, event.logprobs)
            body = completion.body(event.answer, event.reason, event.usage, logprobs)
            recorded = {RECORDED_HEADER: str(event.recorded).lower()}
            await _send_json(send, 200, body, {**_placement_headers(placement), **recorded})

    async def _send_stream(
        self, send: Send, completion: CompletionFormat, placement: Placement, first: GenerationEvent | None
    ) -> None:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **_placement_headers(placement),
        }
        await send({"type": "http.response.start", "status": 200, "headers": _encoded(headers)})
        await _send_part(send, completion.first_chunk())
        async for chunk in self._chunks(completion, first):
            await _send_part(send, chunk)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _chunks(self, completion: CompletionFormat, first: GenerationEvent | None) -> AsyncIterator[bytes]:
        event = first
        while True:
            match event:
                case None:
                    yield completion.keep_alive()
                case Piece():
                    logprobs = self._logprobs(event.token_ids, event.logprobs)
                    for chunk in completion.delta_chunks(event.delta, logprobs):
                        yield chunk
                case Finished():
                    for chunk in completion.last_chunks(event.reason, event.usage, recorded=event.recorded):
                        yield chunk
                    return
                case Failed():
                    self._refused(event.refusal)
                    yield sse_event(error_body(event.refusal))
                    return
            event = await self._event_within(self._keep_alive_seconds)

    async def _event_within(self, seconds: float) -> GenerationEvent | None:
        try:
            async with asyncio.timeout(seconds):
                return await self._chat.generation.next_event()
        except TimeoutError:
            return None

    def _logprobs(self, token_ids: list[int], logprobs: list[float | None]) -> dict[str, Any] | None:
        return logprob_entries(token_ids, logprobs, self._decode) if self._chat.request.logprobs else None

    async def _send_error(self, send: Send, refusal: RequestRefused, placement: Placement | None) -> None:
        self._refused(refusal)
        headers = error_headers(refusal) | (_placement_headers(placement) if placement else {})
        await _send_json(send, refusal.status, error_body(refusal), headers)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _placement_headers(placement: Placement) -> dict[str, str]:
    return {SESSION_HEADER: placement.session_id, TURN_HEADER: placement.turn_id}


async def _send_json(send: Send, status: int, value: dict[str, Any], headers: dict[str, str]) -> None:
    body = orjson.dumps(value)
    all_headers = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    await send({"type": "http.response.start", "status": status, "headers": _encoded(all_headers)})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _send_part(send: Send, chunk: bytes) -> None:
    await send({"type": "http.response.body", "body": chunk, "more_body": True})


def _encoded(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1", errors="replace")) for name, value in headers.items()]
