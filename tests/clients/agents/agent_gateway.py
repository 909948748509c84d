"""What agents talk to in this lane, how they are run, and what the policy and the tests see of it."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from clawstream.bus.interface import Bus
from clawstream.metrics import Metrics
from clawstream.topics import NEXT_STATES, TURNS
from schemas.events import Event, NextStateEvent, TurnEvent
from schemas.events.base import TurnType
from tests.clients.agents.closed_proxy import ClosedProxy
from tests.fixtures import conversations as recording

MAX_CONTEXT_TOKENS = 400_000
"""Agents' system prompts are tens of thousands of this small vocabulary's tokens."""
CLIENT_SECONDS = 400
EventOfLog = TypeVar("EventOfLog", bound=Event)


@dataclass(frozen=True)
class Prompt:
    """What the policy is asked, as text."""

    text: str
    """The whole prompt."""
    newest: str
    """The newest message but for OpenClaw's trailing context."""


@dataclass(frozen=True)
class Cut:
    """An answer whose connection breaks after its first tokens."""

    text: str
    after_tokens: int = 6


Policy = Callable[[Prompt], str | Cut]


@dataclass(frozen=True)
class Exchange:
    """One answer of the engine, as ids."""

    prompt_ids: list[int]
    """[prompt_tokens]"""
    sampled_ids: list[int]
    """[response_tokens]"""
    logprobs: list[float | None]
    """[response_tokens]"""


@dataclass
class AgentGateway:
    """What a client talks to, and what became of it."""

    url: str
    bus: Bus
    prompts: list[Prompt] = field(default_factory=list[Prompt])
    """In order of arrival at the engine."""
    exchanges: dict[str, Exchange] = field(default_factory=dict[str, Exchange])
    """By the turn's id. Of several attempts the last."""
    metrics: Metrics = field(default_factory=Metrics)
    proxy: ClosedProxy = field(default_factory=ClosedProxy)
    """Whatever lies outside this machine."""

    def check_capture(self, turns: Sequence[TurnEvent]) -> None:
        """Nothing was refused, nobody looked elsewhere, and the turns hold what the engine read and sampled."""
        assert "gateway_errors_total{" not in self.metrics.exposition().decode(), self.metrics.exposition().decode()
        assert self.proxy.asked == []
        assert {turn.turn_id for turn in turns} == set(self.exchanges)
        for turn in turns:
            exchange = self.exchanges[turn.turn_id]
            assert turn.prompt_ids.to_numpy().tolist() == exchange.prompt_ids
            assert turn.response_ids.to_numpy().tolist() == exchange.sampled_ids
            assert turn.response_logprobs.to_numpy().tolist() == exchange.logprobs
            is_main = turn.turn_type is TurnType.MAIN
            assert turn.trainable == is_main, (turn.untrainable_reason, turn.untrainable_detail)

    async def turns(self, count: int) -> list[TurnEvent]:
        """All turns, by start, as soon as there are so many."""
        return sorted(await self._at_least(TURNS, TurnEvent, count), key=lambda turn: turn.started_at)

    async def next_states(self, count: int) -> list[NextStateEvent]:
        """All next states, by time, as soon as there are so many."""
        return sorted(await self._at_least(NEXT_STATES, NextStateEvent, count), key=lambda state: state.observed_at)

    async def _at_least(self, topic: str, kind: type[EventOfLog], count: int) -> list[EventOfLog]:
        def events() -> list[EventOfLog]:
            return [event for event in recording.events_of(self.bus, topic) if isinstance(event, kind)]

        await recording.until(lambda: len(events()) >= count)
        return events()


StartAgentGateway = Callable[[Policy], AbstractAsyncContextManager[AgentGateway]]


async def run_client(command: list[str], *, folder: Path, environment: Mapping[str, str]) -> str:
    """What a client printed. Fails with all of it when the client does. Of our environment it sees PATH alone."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env={"PATH": os.environ["PATH"], **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), CLIENT_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    said = output.decode(errors="replace")
    assert process.returncode == 0, f"{command}\n{said[-4000:]}\n{errors.decode(errors='replace')[-4000:]}"
    return said


def read_prompt(text: str) -> Prompt:
    """From ChatML. The last message is the answer's beginning."""
    messages = [part.split("<|im_end|>")[0] for part in text.split("<|im_start|>")[1:]]
    spoken = [message for message in messages[:-1] if "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>" not in message]
    return Prompt(text=text, newest=spoken[-1])
