"""Several engines that serve the same model: for judges and teachers, which do not care which one answers."""

import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from clawstream.engine.interface import EngineClient, ModelInformation, ScoredTokens
from clawstream.errors import EngineUnavailable

Answer = TypeVar("Answer")


class EnginePool:
    """Calls take turns. One that cannot be reached is passed over for that call; when none answers, the last error."""

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        if not engines:
            raise ValueError("a pool needs an engine")
        self._engines = engines
        self._turns = itertools.count()

    @property
    def engines(self) -> Sequence[EngineClient]:
        """Its members, for questions that each of them must answer."""
        return self._engines

    async def generate_texts(
        self, input_ids: Sequence[int], sampling_parameters: Mapping[str, Any], *, answers: int = 1
    ) -> list[tuple[str, Mapping[str, Any]]]:
        """See `EngineClient.generate_texts`."""
        return await self._first(lambda engine: engine.generate_texts(input_ids, sampling_parameters, answers=answers))

    async def score(
        self, prompt_ids: Sequence[int], response_ids: Sequence[int], *, top_k: int = 0, given_ids: Sequence[int] = ()
    ) -> ScoredTokens:
        """See `EngineClient.score`."""
        return await self._first(
            lambda engine: engine.score(prompt_ids, response_ids, top_k=top_k, given_ids=given_ids)
        )

    async def token_texts(self, token_ids: Sequence[int]) -> list[str | None]:
        """See `EngineClient.token_texts`."""
        return await self._first(lambda engine: engine.token_texts(token_ids))

    async def model_information(self) -> ModelInformation:
        """See `EngineClient.model_information`."""
        return await self._first(lambda engine: engine.model_information())

    async def close(self) -> None:
        """Closes every client."""
        for engine in self._engines:
            await engine.close()

    async def _first(self, call: Callable[[EngineClient], Awaitable[Answer]]) -> Answer:
        start = next(self._turns)
        for attempt in range(len(self._engines)):
            try:
                return await call(self._engines[(start + attempt) % len(self._engines)])
            except EngineUnavailable:
                if attempt == len(self._engines) - 1:
                    raise
        raise AssertionError("a pool has an engine")
