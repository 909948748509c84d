"""An engine client without an engine: each control call does what a test scripted, else succeeds."""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from types import EllipsisType
from typing import Any

from clawstream.engine.interface import ModelInformation, PauseMode
from clawstream.errors import EngineError


def known(session_id: str) -> Callable[[], Awaitable[str]]:
    """A session that a router may ask for, and that is known already."""

    async def answer() -> str:
        return session_id

    return answer


Script = Exception | Callable[[], Awaitable[None]]


class ScriptedEngine:
    """Keeps weights, a pause and a list of calls."""

    def __init__(self, name: str = "engine-0", *, weight_version: int | None = 0) -> None:
        self.name = name
        self.weight_version = weight_version
        self.reported_version: int | EllipsisType | None = ...
        """What it claims, when that is not the truth."""
        self.model_path = "base"
        self.is_paused = False
        self.calls: list[str] = []
        self._scripts: defaultdict[str, list[Script | None]] = defaultdict(list)

    def script(self, call: str, *answers: Script | None) -> None:
        """The next calls of this name raise, or await, these in order; None succeeds."""
        self._scripts[call].extend(answers)

    async def _play(self, call: str) -> None:
        script = self._scripts[call].pop(0) if self._scripts[call] else None
        if isinstance(script, Exception):
            raise script
        if script is not None:
            await script()

    async def pause(self, mode: PauseMode) -> None:
        self.calls.append(f"pause {mode}")
        await self._play("pause")
        self.is_paused = True

    async def resume(self) -> None:
        self.calls.append("resume")
        await self._play("resume")
        self.is_paused = False

    async def load_weights(self, directory: str, weight_version: int, *, flush_cache: bool) -> None:
        assert flush_cache
        self.calls.append(f"load {weight_version}")
        await self._play("load")
        self.weight_version = weight_version
        self.model_path = directory

    async def model_information(self) -> ModelInformation:
        self.calls.append("ask")
        await self._play("ask")
        version = self.weight_version if self.reported_version is ... else self.reported_version
        assert version is None or isinstance(version, int)
        return ModelInformation(self.model_path, version, None)

    async def accepts_requests(self) -> bool:
        return not self.is_paused

    async def server_information(self) -> Mapping[str, Any]:
        return {}

    async def is_healthy(self) -> bool:
        try:
            await self._play("ask")
        except EngineError:
            return False
        return True
