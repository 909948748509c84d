"""A running generation as an HTTP answer: one body, or server-sent events as tokens come.

Written on ASGI itself: the status must wait until an engine has taken the request, so that an engine that is away is a
503 and no broken stream; and a client who leaves must be noticed at once, whether or not anything is being sent.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import closing

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from clawstream.errors import RequestRefused
from clawstream.wait_limit import WaitLimit
from services.gateway.chat import StartedAnswer
from services.gateway.errors import error_headers
from services.gateway.generation_events import Failed, Finished, GenerationEvent, Piece
from services.gateway.ports import Placement
from services.gateway.surfaces.surface import AnswerContext, AnswerFormat

SESSION_HEADER = "x-clawstream-session-id"
TURN_HEADER = "x-clawstream-turn-id"
RECORDED_HEADER = "x-clawstream-recorded"
"""`true` once the turn is safe on disk. A stream knows that only at its end: it is a comment in its last chunks."""

_TURNS_UNTIL_ASKED = 2
"""Of the event loop: by then the engine has its request, and the answer is prepared while it works."""


class AnswerResponse(Response):
    """Sends what a generation gives, in the form of the client's API."""

    def __init__(
        self,
        started: StartedAnswer,
        *,
        model: str,
        created: int,
        keep_alive_seconds: float,
        stream_start_seconds: float,
        refused: Callable[[RequestRefused], RequestRefused],
    ) -> None:
        """`created` in seconds since 1970; `refused` counts a failure and gives what may be said of it.

        A stream begins with its first event; without one, `stream_start_seconds` after an engine took the request, or
        after `keep_alive_seconds`, whichever is first. A failure has a status of its own only before that.
        """
        super().__init__()
        self.has_begun = False
        """Whether the client was told a status."""
        self._started = started
        self._model = model
        self._created = created
        self._keep_alive_seconds = keep_alive_seconds
        self._stream_start_seconds = stream_start_seconds
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            for _ in range(_TURNS_UNTIL_ASKED):
                await asyncio.sleep(0)
        except BaseException:
            self._started.generation.client_gone()
            raise
        sending = asyncio.create_task(self._send_answer(send))
        leaving = asyncio.create_task(_wait_for_disconnect(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                self._started.generation.client_gone()
                return
            await sending
        except BaseException:
            # Whatever broke off the sending: what the client did not get is not trained, and the engine need not go on.
            self._started.generation.client_gone()
            raise
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _send_answer(self, send: Send) -> None:
        placement = await self._started.generation.placement()
        # Whatever can be ready before the first token is.
        headers = _placement_headers(placement) if placement is not None else {}
        answer = self._started.open_format(
            AnswerContext(
                response_id=self._started.generation.response_id,
                model=self._model,
                created=self._created,
                prompt_tokens=self._started.prompt_tokens,
            )
        )
        if self._started.request.stream:
            await self._send_stream(send, answer, headers)
            return
        event = await self._started.generation.next_event()
        if isinstance(event, Failed):
            await self._send_error(send, event.refusal, headers)
            return
        assert isinstance(event, Finished)
        headers[RECORDED_HEADER] = str(event.recorded).lower()
        await self._send_json(send, 200, answer.body(event), headers)

    async def _send_stream(self, send: Send, answer: AnswerFormat, headers: dict[str, str]) -> None:
        head = _encoded(
            {
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
                **headers,
            }
        )
        chunks = answer.first_chunks()
        event = await self._first_event_of_stream()
        if isinstance(event, Failed):
            await self._send_error(send, event.refusal, headers)
            return
        self.has_begun = True
        await send({"type": "http.response.start", "status": 200, "headers": head})
        with closing(WaitLimit()) as limit:
            while True:
                # What is known at one time goes out in one piece: each costs a system call.
                is_last = isinstance(event, (Finished, Failed))
                if body := b"".join([*chunks, *self._chunks(answer, event)]):
                    await send({"type": "http.response.body", "body": body, "more_body": not is_last})
                if is_last:
                    return
                chunks, event = [], await self._next_event(limit)

    def _chunks(self, answer: AnswerFormat, event: GenerationEvent | None) -> list[bytes]:
        match event:
            case None:
                return answer.keep_alive()
            case Piece():
                return answer.piece_chunks(event)
            case Finished():
                return answer.last_chunks(event)
            case Failed():
                return answer.failure_chunks(self._refused(event.refusal))

    async def _first_event_of_stream(self) -> GenerationEvent | None:
        """None when it is time to begin without one: clients give up on headers that do not come."""
        loop = asyncio.get_running_loop()
        accepted = self._started.generation.accepted
        try:
            async with asyncio.timeout(self._keep_alive_seconds) as limit:

                def bring_forward(_: object) -> None:
                    start_at = loop.time() + self._stream_start_seconds
                    if is_waiting and start_at < (limit.when() or start_at):
                        limit.reschedule(start_at)

                is_waiting = True
                accepted.add_done_callback(bring_forward)
                try:
                    return await self._started.generation.next_event()
                finally:
                    is_waiting = False
                    accepted.remove_done_callback(bring_forward)
        except TimeoutError:
            return None

    async def _next_event(self, limit: WaitLimit) -> GenerationEvent | None:
        """None when it is time to show that the connection is alive."""
        try:
            return await limit.wait(self._started.generation.next_event(), self._keep_alive_seconds)
        except TimeoutError:
            return None

    async def _send_error(self, send: Send, refusal: RequestRefused, headers: Mapping[str, str]) -> None:
        told = self._refused(refusal)
        await self._send_json(send, told.status, self._started.error_body(told), {**error_headers(told), **headers})

    async def _send_json(
        self, send: Send, status: int, value: Mapping[str, object], headers: Mapping[str, str]
    ) -> None:
        body = orjson.dumps(value)
        all_headers = {"content-type": "application/json", "content-length": str(len(body)), **headers}
        self.has_begun = True
        await send({"type": "http.response.start", "status": status, "headers": _encoded(all_headers)})
        await send({"type": "http.response.body", "body": body, "more_body": False})


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _placement_headers(placement: Placement) -> dict[str, str]:
    return {SESSION_HEADER: placement.session_id, TURN_HEADER: placement.turn_id}


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1", errors="replace")) for name, value in headers.items()]
