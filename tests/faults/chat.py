"""People who talk through a gateway while a test does things to what is behind it."""

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

from tests.fixtures.stub_engine import StubAnswer

ANSWER_TOKENS = 12
GIVE_UP_SECONDS = 240.0


def answers(seed: int, tokens: int = ANSWER_TOKENS) -> "DrawnAnswers":
    """Answers that differ from each other."""
    return DrawnAnswers(random.Random(seed), tokens)


@dataclass
class DrawnAnswers:
    """`default_answer` of a stub engine."""

    draw: random.Random
    tokens: int

    def __call__(self, request: Mapping[str, Any]) -> StubAnswer:
        ids = [self.draw.randrange(70, 90) for _ in range(self.tokens)]
        return StubAnswer(token_ids=ids, finish={"type": "length", "length": len(ids)}, tokens_per_chunk=1000)


@dataclass
class Said:
    """What one user was told, in order."""

    recorded: list[str] = field(default_factory=list[str])
    """Response ids that the gateway called recorded."""
    unrecorded: list[str] = field(default_factory=list[str])
    """Those that it did not."""
    last_is_unrecorded: bool = False


class Chat:
    """Every user asks one thing after the other in a session of their own, until the block ends.

    An answer that is neither 200 nor a clear 503 fails the test; after a 503 the user asks again.
    """

    def __init__(self, url: str, users: int, *, prefix: str = "user", pause_seconds: float = 0.05) -> None:
        """Sessions are named after `prefix`."""
        self._url = url
        self._prefix = prefix
        self._pause_seconds = pause_seconds
        self.said = [Said() for _ in range(users)]
        self.refused = 0
        """503s."""
        self._stop = asyncio.Event()
        self._heard = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def recorded(self) -> set[str]:
        return {each for said in self.said for each in said.recorded}

    @property
    def unrecorded(self) -> set[str]:
        return {each for said in self.said for each in said.unrecorded}

    @property
    def answered(self) -> int:
        return len(self.recorded) + len(self.unrecorded)

    async def __aenter__(self) -> Self:
        self._client = httpx.AsyncClient(base_url=self._url, timeout=120)
        self._tasks = [asyncio.create_task(self._talk(number)) for number in range(len(self.said))]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        try:
            await asyncio.gather(*self._tasks)
        finally:
            await self._client.aclose()

    async def hears(self, answers: int) -> None:
        """Until so many more came."""
        goal = self.answered + answers
        await self.until(lambda: self.answered >= goal)

    async def until(self, condition: Any) -> None:
        """Asked again after every answer. Raises what ended a user's talk."""
        async with asyncio.timeout(GIVE_UP_SECONDS), self._heard:
            while not condition():
                for each in self._tasks:
                    if each.done():
                        each.result()
                await self._heard.wait()

    async def _talk(self, number: int) -> None:
        try:
            await self._ask_again_and_again(number)
        finally:
            async with self._heard:
                self._heard.notify_all()

    async def _ask_again_and_again(self, number: int) -> None:
        history: list[dict[str, str]] = []
        said = self.said[number]
        while not self._stop.is_set():
            question = f"{self._prefix} {number} asks for the {len(history)}th time"
            asked = [*history, {"role": "user", "content": question}]
            response = await self._client.post(
                "/v1/chat/completions",
                json={"model": "default", "messages": asked, "max_tokens": 100_000},
                headers={"x-session-id": f"{self._prefix}-{number}"},
            )
            if response.status_code == 503:
                assert response.json()["error"]["message"]
                self.refused += 1
            else:
                assert response.status_code == 200, response.text
                body = response.json()
                is_recorded = response.headers["x-clawstream-recorded"] == "true"
                (said.recorded if is_recorded else said.unrecorded).append(body["id"])
                said.last_is_unrecorded = not is_recorded
                history = [*asked[-9:], {"role": "assistant", "content": body["choices"][0]["message"]["content"]}]
            async with self._heard:
                self._heard.notify_all()
            await asyncio.sleep(self._pause_seconds)
