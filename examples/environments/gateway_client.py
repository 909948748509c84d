"""The gateway as an environment sees it: chat with a place in a rollout, and the rollout's outcome."""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import httpx

from clawstream.errors import ClawstreamError, EngineRejected, EngineUnavailable

_FIRST_WAIT_SECONDS: Final = 0.5
_LONGEST_WAIT_SECONDS: Final = 15.0
_RECORDED_HEADER: Final = "x-clawstream-recorded"


@dataclass(frozen=True, slots=True)
class Step:
    """Where a turn stands."""

    task_id: str
    group_id: str
    """The rollouts of one task that are compared with each other."""
    rollout_id: str
    index: int
    """From 0 on."""

    @property
    def headers(self) -> dict[str, str]:
        """How the gateway is told. The rollout is a session of its own."""
        return {
            "X-Task-Id": self.task_id,
            "X-Group-Id": self.group_id,
            "X-Rollout-Id": self.rollout_id,
            "X-Step-Index": str(self.index),
            "X-Session-Id": self.rollout_id,
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """What the policy said."""

    message: dict[str, Any]
    """The assistant message: it goes back into the history as it came."""
    tokens: int
    """As the gateway counted them."""
    recorded: bool
    """Whether the turn is on the log."""

    @property
    def text(self) -> str:
        """Its content."""
        return self.message.get("content") or ""


class GatewayClient:
    """Tries again for `patience_seconds` while the gateway is away or busy; other refusals are raised at once."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str,
        model: str | None,
        patience_seconds: float,
        sleep: Callable[[float], Any] = asyncio.sleep,
    ) -> None:
        """`base_url` ends in `/v1`, as OpenAI clients have it."""
        self._http = httpx.AsyncClient(
            base_url=base_url.rstrip("/") + "/",
            headers={"Authorization": f"Bearer {api_key}", "User-Agent": "clawstream-environment"},
            timeout=httpx.Timeout(600.0, connect=10.0),
            limits=httpx.Limits(max_connections=None),
        )
        self._model = model
        self._patience_seconds = patience_seconds
        self._sleep = sleep

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        step: Step | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        **options: Any,
    ) -> Answer:
        """One answer. Raises EngineRejected for a refusal and EngineUnavailable when patience is at its end."""
        body = {"messages": list(messages), **({"tools": list(tools)} if tools else {}), **options}
        if self._model is not None:
            body["model"] = self._model
        answer = await self._post("chat/completions", body, step.headers if step is not None else {})
        content = answer.json()
        return Answer(
            message={key: value for key, value in content["choices"][0]["message"].items() if value is not None},
            tokens=int((content.get("usage") or {}).get("completion_tokens", 0)),
            recorded=answer.headers.get(_RECORDED_HEADER, "true") == "true",
        )

    async def outcome(
        self, rollout_id: str, score: float, *, source: str, steps: int, step_scores: Sequence[float | None]
    ) -> int:
        """Tells how a rollout ended. Returns how many turns learned of it. A repetition changes nothing."""
        body: dict[str, Any] = {"rollout_id": rollout_id, "score": score, "source": source, "steps": steps}
        if any(one is not None for one in step_scores):
            body["step_scores"] = list(step_scores)
        answer = await self._post("feedback", body, {})
        return len(answer.json()["next_state_ids"])

    async def _post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> httpx.Response:
        waited, wait = 0.0, _FIRST_WAIT_SECONDS
        while True:
            problem: ClawstreamError
            try:
                response = await self._http.post(path, json=body, headers=headers)
            except httpx.TransportError as error:
                problem, advice = EngineUnavailable(f"{path}: {type(error).__name__}: {error}"), None
            else:
                if response.status_code < 400:
                    return response
                said = f"{path}: {response.status_code} {response.text[:500]}"
                if response.status_code < 500 and response.status_code not in (408, 409, 429):
                    raise EngineRejected(said, status=response.status_code, body=response.text[:2000])
                problem, advice = EngineUnavailable(said), response.headers.get("retry-after")
            if waited >= self._patience_seconds:
                raise problem
            pause = float(advice) if advice else wait * random.uniform(0.5, 1.0)
            await self._sleep(pause)
            waited, wait = waited + pause, min(wait * 2, _LONGEST_WAIT_SECONDS)
