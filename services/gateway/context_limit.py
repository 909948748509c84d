"""How long prompt and answer may be together: the smallest of what the engines say, asked until all have answered."""

import asyncio
from collections.abc import Sequence

from clawstream.engine.interface import EngineClient
from clawstream.errors import EngineError
from clawstream.log import Logger

_RETRY_SECONDS = 2.0


class ContextLimit:
    """Begins with what the model was made for. The gateway serves before every engine is up."""

    def __init__(self, initial_tokens: int) -> None:
        self._tokens = initial_tokens

    def tokens(self) -> int:
        """The limit as far as it is known."""
        return self._tokens

    async def ask(self, engines: Sequence[EngineClient], logger: Logger) -> None:
        """Asks each engine until it has answered once; returns when all have."""
        unknown = list(engines)
        while unknown:
            silent: list[EngineClient] = []
            for engine in unknown:
                try:
                    information = await engine.model_information()
                except EngineError:
                    silent.append(engine)
                    continue
                if information.max_context_tokens is not None and information.max_context_tokens < self._tokens:
                    self._tokens = information.max_context_tokens
                    logger.info("the context is limited by an engine", engine=engine.name, max_tokens=self._tokens)
            unknown = silent
            if unknown:
                await asyncio.sleep(_RETRY_SECONDS)
