"""What users notice of new weights, and how long a step takes to reach them.

    python -m benchmarks.weight_update_under_load MODEL_DIRECTORY [--users 4] [--updates 3]

Real processes: Kafka, one CPU engine, a gateway, a trainer; streaming users all the while. Two goals:

- a weight update under load: 0 failed requests, and no request held for more than 50 ms;
- batch closed -> version in service: at most step + export + load + 100 ms. All three are of the very update: the step
  is the train-step event's own time, the export what the trainer measures (copy, checkpoint and publication), the load
  what the gateway measures (every byte checked, loaded, the version asked for). The `remainder` is the log, the gate
  and everything else.

`load_alone` is the same directory on the same engine once more, after the updates, under the same users. An update may
take longer than that: the trainer gives back the memory of its copy meanwhile, and removes old files. The temporary
folder needs room for three checkpoints and four versions of the model.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import numpy as np
import orjson

from benchmarks.metric_reading import read_metrics
from clawstream import topics
from clawstream.broker import LocalBroker
from clawstream.bus.fold import LogReader
from clawstream.bus.kafka import KafkaBus
from clawstream.codec import decode
from clawstream.engine.client import HttpEngineClient
from clawstream.process_identity import free_ports
from clawstream.settings import KafkaSettings
from clawstream.weights.manifest import verify
from schemas.events import SampleEvent, TrainStepEvent, WeightsAppliedEvent, WeightVersionEvent
from schemas.events.weights import EngineState
from tests.fixtures.samples import make_sample, sample_record

EventOfKind = TypeVar("EventOfKind")

NAMESPACE = "benchmark"
BATCH = 4
MAX_HOLD_SECONDS = 0.05
MAX_REMAINDER_SECONDS = 0.1
_PATIENCE_SECONDS = 600.0
_ANSWER_SECONDS = 300.0
_LOG_CHARACTERS = 3000


@dataclass
class Users:
    """What they noticed."""

    answers: int = 0
    failures: list[str] = field(default_factory=list[str])
    gaps: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """(when, in seconds since 1970; seconds) between two pieces of an answer."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def were_answered(self, times: int) -> bool:
        """Whether there were so many answers."""
        return self.answers >= times

    async def talk(self, session: aiohttp.ClientSession, url: str, number: int) -> None:
        """One answer after another."""
        for count in itertools.count():
            if self.stop.is_set():
                return
            messages = [{"role": "user", "content": f"Tell me a story of {number} and {count}."}]
            body = {"model": "default", "messages": messages, "stream": True, "max_tokens": 64}
            try:
                async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
                    text, last = b"", time.monotonic()
                    async for piece in answer.content.iter_any():
                        now = time.monotonic()
                        if text:
                            self.gaps.append((time.time(), now - last))
                        text, last = text + piece, now
                if answer.status != 200 or b"[DONE]" not in text or b'"error"' in text:
                    self.failures.append(f"{answer.status}: {text[-200:]!r}")
            except (aiohttp.ClientError, TimeoutError) as error:
                self.failures.append(repr(error))
                await asyncio.sleep(1.0)  # a gateway that is gone must not be asked as fast as it refuses
            self.answers += 1


def toml(model: Path, kafka: str, ports: list[int]) -> str:
    """Of all processes."""
    return f"""
data_directory = "data"
[kafka]
bootstrap_servers = "{kafka}"
namespace = "{NAMESPACE}"
[engine]
model_path = "{model}"
port = {ports[0]}
weight_version = "0"
incremental_streaming_output = true
[gateway]
model_path = "{model}"
port = {ports[1]}
operations_port = {ports[2]}
engines = [{{ name = "engine", url = "http://127.0.0.1:{ports[0]}", loads_beside = true }}]
[trainer]
model = "{model}"
operations_port = {ports[3]}
threads = 1
batch_size = {BATCH}
max_sample_tokens = 512
tokens_per_micro_batch = 512
learning_rate = {{ peak = 1e-6 }}
"""


@dataclass(frozen=True, slots=True)
class Processes:
    """Engine, gateway and trainer, by name."""

    folder: Path
    """Of their logs."""
    running: dict[str, "subprocess.Popen[bytes]"]

    def check(self) -> None:
        """Raises RuntimeError, with the end of its log, when one of them has ended."""
        for name, process in self.running.items():
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended with code {process.returncode}:\n{self.log_of(name)}")

    def log_of(self, name: str) -> str:
        """The end of what a process wrote."""
        return (self.folder / f"{name}.log").read_text(errors="replace")[-_LOG_CHARACTERS:]

    async def wait(self, what: str, condition: Callable[[], Awaitable[bool]], *, every_seconds: float) -> None:
        """Until `condition`. Raises RuntimeError, with logs, when a process ended or patience did."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not await condition():
            self.check()
            if time.monotonic() > deadline:
                logs = "\n".join(f"--- {name}\n{self.log_of(name)}" for name in self.running)
                raise RuntimeError(f"waited {_PATIENCE_SECONDS:.0f} s in vain until {what}\n{logs}")
            await asyncio.sleep(every_seconds)


@contextmanager
def running(config: Path) -> Iterator[Processes]:
    """Topics, engine, gateway and trainer."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(["", *sys.path]).strip(os.pathsep),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
    }
    apply = [sys.executable, "-m", "clawstream", "topics", "apply", "--config", str(config)]
    subprocess.run(apply, check=True, env=environment, capture_output=True)
    with ExitStack() as stack:
        processes = Processes(config.parent, {})
        for service in ("engine", "gateway", "trainer"):
            log = stack.enter_context((config.parent / f"{service}.log").open("wb"))
            command = [sys.executable, "-m", f"services.{service}", "--config", str(config)]
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.running[service] = process
        yield processes


@asynccontextmanager
async def talking(url: str, count: int) -> AsyncIterator[Users]:
    """Users until the end of the block."""
    users = Users()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ANSWER_SECONDS)) as session:
        tasks = [asyncio.create_task(users.talk(session, url, number)) for number in range(count)]
        try:
            yield users
        finally:
            users.stop.set()
            await asyncio.gather(*tasks)


async def is_ready(url: str) -> bool:
    """Whether the gateway has an engine."""
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/readyz") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


class WeightsLog:
    """What the log says of steps, weights and engines, read anew at every question."""

    def __init__(self, bus: KafkaBus) -> None:
        self._bus = bus
        self._events: list[Any] = []

    async def has_published(self, version: int) -> bool:
        """Whether the trainer has published it."""
        await asyncio.to_thread(self._read)
        return any(event.weight_version == version for event in self._of(WeightVersionEvent))

    async def is_in_service(self, version: int) -> bool:
        """Whether an engine serves it."""
        await asyncio.to_thread(self._read)
        return any(self._beats(version))

    def first_beat(self, version: int) -> WeightsAppliedEvent:
        """The first heartbeat that says so, of what was read last."""
        return next(self._beats(version))

    def step_of(self, version: int) -> TrainStepEvent:
        """The step that made a version."""
        return next(event for event in self._of(TrainStepEvent) if event.weight_version == version)

    def published(self, version: int) -> WeightVersionEvent:
        """Where a version is."""
        return next(event for event in self._of(WeightVersionEvent) if event.weight_version == version)

    def _beats(self, version: int) -> Iterator[WeightsAppliedEvent]:
        beats = self._of(WeightsAppliedEvent)
        return (beat for beat in beats if beat.state is EngineState.READY and beat.weight_version == version)

    def _of(self, kind: type[EventOfKind]) -> Iterator[EventOfKind]:
        return (event for event in self._events if isinstance(event, kind))

    def _read(self) -> None:
        self._events = []
        names = (topics.TRAIN_STEPS, topics.WEIGHTS, topics.WEIGHTS_APPLIED)
        reader = LogReader(self._bus, [topics.full_name(NAMESPACE, name) for name in names])
        try:
            reader.bootstrap(lambda record: self._events.append(decode(record)) if record.value is not None else None)
        finally:
            reader.close()


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds that processes have spent so far, by their own metrics."""

    export_seconds: float
    """Trainer: copies of its state, checkpoints and publications. Version 0 was published before the first step."""
    update_seconds: float
    """Gateway: updates of the engine."""

    @classmethod
    async def read(cls, trainer_port: int, gateway_port: int) -> "Spent":
        """Asks both on their operations ports."""
        trainer = await read_metrics(f"http://127.0.0.1:{trainer_port}")
        gateway = await read_metrics(f"http://127.0.0.1:{gateway_port}")
        return cls(
            sum(trainer[f"clawstream_{part}_seconds_sum"] for part in ("snapshot", "checkpoint", "publish")),
            gateway["clawstream_weight_update_seconds_sum"],
        )


def write_samples(bus: KafkaBus, vocabulary: int, version: int) -> None:
    """A batch for the trainer, as from answers of the version in service."""
    random = np.random.default_rng(version)
    producer = bus.producer()
    for number in range(BATCH):
        ids = random.integers(3, vocabulary, 120).tolist()
        sample: SampleEvent = make_sample(
            f"turn-{version}-{number}",
            reward=1.0 if number % 2 else -1.0,
            versions=(version,),
            prompt_ids=ids[:60],
            response_ids=ids[60:],
            behaviour=[-5.0] * 60,
        )
        producer.produce(sample_record(sample, NAMESPACE))
    producer.flush(30.0)
    producer.close()


async def load_seconds(url: str, directory: Path, version: int, manifest_sha256: str) -> float:
    """What the gate has to do at least: check every byte, and have the engine load it."""
    client = HttpEngineClient("engine", url)
    try:
        started = time.monotonic()
        await asyncio.to_thread(verify, directory, manifest_sha256)
        await client.load_weights(str(directory), version, flush_cache=True)
        return time.monotonic() - started
    finally:
        await client.close()


async def measure(model: Path, users_count: int, updates: int) -> dict[str, Any]:
    """All figures."""
    vocabulary = int(json.loads((model / "config.json").read_text())["vocab_size"])
    rows: list[dict[str, float]] = []
    windows: list[tuple[float, float]] = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        LocalBroker(Path(scratch) / "kafka", ends_with_parent=True) as broker,
    ):
        ports = free_ports(4)
        config = Path(scratch) / "clawstream.toml"
        config.write_text(toml(model, broker.bootstrap_servers, ports))
        settings = KafkaSettings(bootstrap_servers=broker.bootstrap_servers, namespace=NAMESPACE)
        bus = KafkaBus(settings, client_id="benchmark")
        engine_url, gateway_url = (f"http://127.0.0.1:{port}" for port in ports[:2])
        with running(config) as processes:
            await processes.wait("the gateway is ready", lambda: is_ready(gateway_url), every_seconds=0.2)
            log = WeightsLog(bus)
            # A trainer that still starts would be part of the first update.
            await processes.wait("the trainer published version 0", lambda: log.has_published(0), every_seconds=1.0)
            async with talking(gateway_url, users_count) as users:
                spent = await Spent.read(ports[3], ports[2])
                for version in range(1, updates + 1):
                    enough = users.answers + users_count
                    await processes.wait(
                        "users were answered", partial(users.were_answered, enough), every_seconds=0.05
                    )
                    await asyncio.to_thread(write_samples, bus, vocabulary, version - 1)
                    await processes.wait(
                        f"version {version} is in service", partial(log.is_in_service, version), every_seconds=0.5
                    )
                    before, spent = spent, await Spent.read(ports[3], ports[2])
                    step, beat = log.step_of(version), log.first_beat(version)
                    rows.append(
                        {
                            "total": (beat.observed_at - step.started_at).total_seconds(),
                            "step": (step.finished_at - step.started_at).total_seconds(),
                            "export": spent.export_seconds - before.export_seconds,
                            "load": spent.update_seconds - before.update_seconds,
                        }
                    )
                    windows.append((log.published(version).published_at.timestamp(), beat.observed_at.timestamp()))
                newest = log.published(updates)
                directory = Path(newest.artefact_uri.removeprefix("file://"))
                loads = [await load_seconds(engine_url, directory, updates, newest.manifest_sha256) for _ in range(3)]
            gateway_metrics = await read_metrics(f"http://127.0.0.1:{ports[2]}")
            held = int(gateway_metrics["clawstream_hold_seconds_count"])
            held_seconds = gateway_metrics["clawstream_hold_seconds_sum"]
    for row in rows:
        row["remainder"] = row["total"] - row["step"] - row["export"] - row["load"]
    # A gap counts when any of it lies in an update.
    during = [gap for at, gap in users.gaps if any(start <= at and at - gap <= end for start, end in windows)]
    return {
        "users": users_count,
        "answers": users.answers,
        "failed_requests": len(users.failures),
        "failures": users.failures[:3],
        "held_requests": held,
        "held_seconds_in_all": round(held_seconds, 4),
        "gap_p50_ms": round(1000 * statistics.median([gap for _, gap in users.gaps] or [0.0]), 1),
        "longest_gap_around_updates_ms": round(1000 * max(during, default=0.0), 1),
        "updates": [{name: round(value, 3) for name, value in row.items()} for row in rows],
        "load_alone_seconds": round(statistics.median(loads), 3),
        "remainder_seconds": round(statistics.median(row["remainder"] for row in rows), 3),
    }


def main() -> None:
    """Prints one JSON object; exit code 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_directory", type=Path)
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--updates", type=int, default=3)
    arguments = parser.parse_args()
    figures = asyncio.run(measure(arguments.model_directory.resolve(), arguments.users, arguments.updates))
    figures["goals"] = {
        "failed_requests": 0,
        "hold_seconds": MAX_HOLD_SECONDS,
        "remainder_seconds": MAX_REMAINDER_SECONDS,
    }
    sys.stdout.write(orjson.dumps(figures, option=orjson.OPT_INDENT_2).decode() + "\n")
    missed = (
        figures["failed_requests"] > 0
        or figures["held_seconds_in_all"] > MAX_HOLD_SECONDS
        or figures["remainder_seconds"] > MAX_REMAINDER_SECONDS
    )
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
