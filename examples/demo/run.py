"""One seed of the demo, from starting the processes to the last measurement."""

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from random import Random

from openai import AsyncOpenAI
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from clawstream.engine.client import HttpEngineClient
from clawstream.engine.interface import EngineClient
from clawstream.evaluation.asking import MeasuredAnswer
from clawstream.evaluation.questions import QuestionSet
from clawstream.rendering.interface import ChatRenderer
from examples.demo.conversation import Exchange, ScriptedUser
from examples.demo.evaluation import Measurement, evaluate
from examples.demo.history import History, newest_version, read_history
from examples.demo.personas import Persona
from examples.demo.report import SeedResult
from examples.demo.system import POLICY, DemoPlan, DemoSystem, start

_RECENT = 48
"""Exchanges in the running mean that the progress line shows."""
_SETTLE_SECONDS = 90.0
"""How long to wait at most after the last conversation for the versions in the making."""
_QUIET_SECONDS = 25.0
"""No new version for so long: the trainer has no full batch left."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much one seed does."""

    training_seconds: float
    """Conversations are held for so long."""
    max_versions: int
    """Or until this weight version is in service, whichever comes first."""
    concurrent_conversations: int
    samples_per_question: int
    """Held-out answers per question and evaluation."""
    pause_seconds: float
    """People read and type: a user's mean pause between two conversations. Without one the answers come faster than the
    trainer learns from them, so they only grow older, and the engine takes the processor from it."""


@dataclass(slots=True)
class _Watch:
    """What the progress line shows."""

    version: int = 0
    exchanges: list[Exchange] = field(default_factory=list[Exchange])
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def add(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)
        self.recent.append(1.0 if exchange.reaction.satisfied else -1.0)

    @property
    def line(self) -> str:
        mean = sum(self.recent) / len(self.recent) if self.recent else 0.0
        return f"{len(self.exchanges)} answers judged, weight version {self.version}, recent reward {mean:+.2f}"


async def run_seed(
    plan: DemoPlan, persona: Persona, questions: QuestionSet, renderer: ChatRenderer, effort: Effort, console: Console
) -> SeedResult:
    """Runs one seed and stops everything it started."""
    began = time.monotonic()
    with console.status("starting Apache Kafka, engines, gateway, judge, teacher and trainer"):
        system = await asyncio.to_thread(start, plan, progress=lambda report: None)
    setup_seconds = time.monotonic() - began
    console.print(f"All processes ready after {setup_seconds:.0f} s. Logs: {system.settings.log_directory}")
    policy = HttpEngineClient("policy", system.policy_engine_url)
    frozen = HttpEngineClient("frozen", system.frozen_engine_url)
    watch = _Watch()
    try:
        with _progress(console) as progress:

            async def measure(name: str, seed: int) -> tuple[tuple[Measurement, list[MeasuredAnswer]], ...]:
                answers = 2 * effort.samples_per_question * len(questions.held_out)
                task = progress.add_task(name, total=answers, detail="held-out questions")

                async def ask(engine: EngineClient) -> tuple[Measurement, list[MeasuredAnswer]]:
                    return await evaluate(
                        engine,
                        renderer,
                        persona,
                        questions.held_out,
                        samples_per_question=effort.samples_per_question,
                        temperature=plan.temperature,
                        seed=seed,
                        advance=lambda: progress.advance(task),
                    )

                return tuple(await asyncio.gather(ask(frozen), ask(policy)))

            (control_before, _), (policy_before, _) = await measure("before", plan.seed)
            training_began = time.monotonic()
            task = progress.add_task("conversations", total=effort.training_seconds, detail="")
            await _converse(plan, persona, questions, system, policy, effort, watch, progress, task)
            await _settle(system, policy, watch, progress, task)
            training_seconds = time.monotonic() - training_began
            (control_after, _), (policy_after, answers) = await measure("after", plan.seed + 1_000)
        history = await asyncio.to_thread(read_history, system.bus(), system.namespace)
    finally:
        await policy.close()
        await frozen.close()
        with console.status("stopping all processes"):
            await asyncio.to_thread(system.stop)
    agreement, judged = _judge_agreement(watch.exchanges, history)
    return SeedResult(
        seed=plan.seed,
        persona=persona.name,
        control_before=control_before,
        policy_before=policy_before,
        control_after=control_after,
        policy_after=policy_after,
        answers_after=answers,
        history=history,
        judge_agreement=agreement,
        judged_exchanges=judged,
        mode=plan.mode.name,
        final_version=watch.version,
        setup_seconds=setup_seconds,
        training_seconds=training_seconds,
        total_seconds=time.monotonic() - began,
    )


async def _converse(
    plan: DemoPlan,
    persona: Persona,
    questions: QuestionSet,
    system: DemoSystem,
    policy: EngineClient,
    effort: Effort,
    watch: _Watch,
    progress: Progress,
    task: TaskID,
) -> None:
    """Talks until the time is over or the last version is in service."""
    client = AsyncOpenAI(base_url=system.gateway_url, api_key="none-needed-on-loopback", max_retries=0)
    user = ScriptedUser(client, model=POLICY, persona=persona, questions=questions.training, random=Random(plan.seed))
    began = time.monotonic()
    over = asyncio.Event()

    async def show() -> None:
        while not over.is_set():
            watch.version = (await policy.model_information()).weight_version or watch.version
            elapsed = time.monotonic() - began
            progress.update(task, completed=min(elapsed, effort.training_seconds), detail=watch.line)
            if elapsed >= effort.training_seconds or watch.version >= effort.max_versions:
                over.set()
            await asyncio.sleep(1.0)

    async with asyncio.TaskGroup() as group:
        group.create_task(show())
        group.create_task(
            user.talk(
                concurrent=effort.concurrent_conversations,
                pause_seconds=effort.pause_seconds,
                over=over,
                on_exchange=watch.add,
            )
        )
    await client.close()


async def _settle(system: DemoSystem, policy: EngineClient, watch: _Watch, progress: Progress, task: TaskID) -> None:
    """Waits until the newest version on the log is in service and no further one has come for a while."""
    now = time.monotonic
    deadline, newest, since = now() + _SETTLE_SECONDS, -1, now()
    while now() < deadline:
        published = await asyncio.to_thread(newest_version, system.bus(), system.namespace)
        if published != newest:
            newest, since = published, now()
        watch.version = (await policy.model_information()).weight_version or 0
        progress.update(task, detail=f"{watch.line}; waiting for the last batches")
        if watch.version >= newest and now() - since >= _QUIET_SECONDS:
            return
        await asyncio.sleep(1.0)


def _judge_agreement(exchanges: list[Exchange], history: History) -> tuple[float, int]:
    """Share of judged exchanges where the sign of the judge's reward is what the user meant, and their number."""
    agreed = judged = 0
    for exchange in exchanges:
        reward = history.judged.get(history.turn_of_response.get(exchange.response_id, ""))
        if reward is not None:
            judged += 1
            agreed += (reward > 0) == exchange.reaction.satisfied
    return agreed / max(judged, 1), judged


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<13}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[detail]}"),
        console=console,
    )
