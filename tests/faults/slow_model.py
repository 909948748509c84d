"""A judge model behind OpenAI's API that answers nothing until it is told to, and counts what it is asked."""

import asyncio
from typing import Self

from aiohttp import web

CHOICE = {"message": {"role": "assistant", "content": "Content. \\boxed{1}"}, "finish_reason": "stop"}
USAGE = {"prompt_tokens": 10, "completion_tokens": 3}


class SlowModel:
    """Serves on 127.0.0.1, on the event loop it was entered on."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.answers_asked_for = 0

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def __aenter__(self) -> Self:
        application = web.Application()
        application.add_routes([web.post("/v1/chat/completions", self._answer)])
        self._runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        answers = (await request.json()).get("n", 1)
        self.answers_asked_for += answers
        await self.may_answer.wait()
        return web.json_response({"choices": [CHOICE] * answers, "usage": USAGE})
