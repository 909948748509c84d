"""A broker, a stub model, judges and teachers as processes, and conversations to be judged: for benchmarks."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx
import psutil

from clawstream import ids, topics
from clawstream.broker import LocalBroker
from clawstream.bus.interface import Bus, Delivery, OutgoingRecord
from clawstream.bus.kafka import KafkaBus
from clawstream.clock import SystemClock
from clawstream.codec import encode
from clawstream.process_identity import free_port
from clawstream.settings import KafkaSettings
from clawstream.topics import full_name, topic_definitions
from clawstream.topics_admin import apply_topics, wait_until_readable
from schemas.arrays import float32_array, int32_array
from schemas.events import NextStateEvent, TurnEvent

REPOSITORY = Path(__file__).parents[1]
PATIENCE_SECONDS = 300.0
_LOG_CHARACTERS = 3000
PROMPT_TOKENS = 200
RESPONSE_TOKENS = 60


def turn(number: int, sessions: int) -> TurnEvent:
    """A turn of ordinary size; `sessions` conversations take turns."""
    now = datetime.now(UTC)
    return TurnEvent.model_validate(
        {
            "turn_id": f"turn-{number}",
            "session_id": f"session-{number % sessions}",
            "parent_evidence": {"rule": "none"},
            "principal": "alice",
            "response_id": f"chatcmpl-{number}",
            "policy": "default",
            "request_messages": [
                {"role": "system", "content": "You are a helpful assistant. " * 5},
                {"role": "user", "content": f"Question {number}: " + "what about this and that? " * 8},
            ],
            "response_message": {"role": "assistant", "content": "This is what it is about. " * 10},
            "prompt_ids": int32_array(list(range(PROMPT_TOKENS))),
            "response_ids": int32_array(list(range(RESPONSE_TOKENS))),
            "response_logprobs": float32_array([-0.5] * RESPONSE_TOKENS),
            "version_spans": [{"weight_version": 0, "start": 0, "end": RESPONSE_TOKENS}],
            "sampling": {"temperature": 0.7, "max_new_tokens": 64},
            "finish_reason": "stop",
            "tokenizer_fingerprint": "f" * 64,
            "renderer": "tiny",
            "engine": "engine-0",
            "started_at": now,
            "finished_at": now,
        }
    )


@dataclass(frozen=True, slots=True)
class Conversations:
    """Next states that can be written at any time: their turns are on the log."""

    bus: Bus
    next_states: Sequence[OutgoingRecord]

    def write(self) -> None:
        """All of them at once."""
        producer = self.bus.producer()
        for record in self.next_states:
            producer.produce(record)
        producer.flush(PATIENCE_SECONDS)
        producer.close()


def conversations(bus: Bus, namespace: str, count: int, sessions: int = 240, *, first: int = 0) -> Conversations:
    """Writes `count` turns, whose numbers begin with `first`."""
    turns = [turn(number, sessions) for number in range(first, first + count)]
    deliveries: dict[int, Delivery] = {}
    producer = bus.producer()
    for number, event in enumerate(turns):
        record = encode(
            event,
            topic=full_name(namespace, topics.TURNS),
            key=event.session_id,
            event_id=event.turn_id,
            source="benchmark",
        )
        producer.produce(record, lambda delivery, number=number: deliveries.update({number: delivery}))
    producer.flush(PATIENCE_SECONDS)
    producer.close()
    return Conversations(bus, [_next_state(namespace, event, deliveries[number]) for number, event in enumerate(turns)])


def _next_state(namespace: str, event: TurnEvent, delivery: Delivery) -> OutgoingRecord:
    following = [{"role": "user", "content": f"thanks, that was what I wanted to know about {event.turn_id}"}]
    state = NextStateEvent.model_validate(
        {
            "next_state_id": ids.derive("next-state", event.turn_id),
            "turn_id": event.turn_id,
            "turn_ref": {
                "topic": delivery.record.topic,
                "partition": delivery.partition,
                "offset": delivery.offset,
            },
            "session_id": event.session_id,
            "principal": event.principal,
            "kind": "reply",
            "turn_trainable": True,
            "request_messages": event.request_messages,
            "response_message": event.response_message,
            "following_messages": following,
            "observed_at": datetime.now(UTC),
        }
    )
    return encode(
        state,
        topic=full_name(namespace, topics.NEXT_STATES),
        key=state.session_id,
        event_id=state.next_state_id,
        source="benchmark",
    )


class JudgedSystem:
    """One broker for the run; a namespace, a model and processes for each measurement."""

    def __init__(self, directory: Path, broker: LocalBroker) -> None:
        self._directory = directory
        self._broker = broker

    def bus(self, namespace: str) -> KafkaBus:
        """With all topics of a new namespace."""
        settings = KafkaSettings(bootstrap_servers=self._broker.bootstrap_servers, namespace=namespace)
        bus = KafkaBus(settings, client_id="benchmark")
        admin = bus.admin()
        definitions = topic_definitions().values()
        apply_topics(admin, namespace, 1, definitions)
        admin.close()
        wait_until_readable(bus, namespace, definitions, SystemClock(), timeout_seconds=60)
        return bus

    @contextmanager
    def model(self, delay_seconds: float) -> Iterator[str]:
        """A stub model; gives its URL."""
        command = [sys.executable, "-m", "benchmarks.stub_judge_model", "--delay-seconds", str(delay_seconds)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()
            process.wait()

    @contextmanager
    def processes(self, namespace: str, services: Sequence[str], sections: str) -> Iterator[list[psutil.Process]]:
        """Starts `services`, such as two judges and a teacher, and waits until they share out all partitions."""
        text = (
            f'[kafka]\nbootstrap_servers = "{self._broker.bootstrap_servers}"\nnamespace = "{namespace}"\n'
            f'[log]\nlevel = "warning"\n{sections}\n'
        )
        config = self._directory / f"{namespace}.toml"
        ports = [free_port() for _ in services]
        names = [f"{service}-{number}" for number, service in enumerate(services)]
        entries = [
            f'[[processes]]\nname = "{name}"\nservice = "{service}"\noverrides = {{ operations_port = {port} }}\n'
            for name, service, port in zip(names, services, ports, strict=True)
        ]
        config.write_text(text + "\n".join(entries))
        with ExitStack() as stack:
            started = [
                stack.enter_context(self._process(service, name, config))
                for name, service in zip(names, services, strict=True)
            ]
            for service in set(services):
                of_service = [port for each, port in zip(services, ports, strict=True) if each == service]
                _wait_until_shared_out(of_service, started)
            yield started

    @contextmanager
    def _process(self, service: str, name: str, config: Path) -> Iterator[psutil.Process]:
        log = config.with_suffix(f".{name}.log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", f"services.{service}", "--config", str(config), "--process", name],
                stdout=output,
                stderr=output,
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            )
        try:
            yield psutil.Process(process.pid)
        except RuntimeError:
            sys.stderr.write(f"{name}:\n{log.read_text()[-_LOG_CHARACTERS:]}\n")
            raise
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_shared_out(ports: Sequence[int], processes: Sequence[psutil.Process]) -> None:
    """Until every process of a group has its even share of the twelve partitions."""
    share = topic_definitions()[topics.NEXT_STATES].partitions // len(ports)

    def shared_out() -> bool:
        return all(len(_status(port).get("partitions", [])) == share for port in ports)

    wait_until(shared_out, processes)


def _status(port: int) -> dict[str, list[str]]:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/status", timeout=5, trust_env=False).json()
    except httpx.HTTPError:
        return {}


def wait_until(condition: Callable[[], bool], processes: Sequence[psutil.Process] = ()) -> None:
    """Raises RuntimeError when a process ended, or patience did."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if any(not each.is_running() or each.status() == psutil.STATUS_ZOMBIE for each in processes):
            raise RuntimeError("a process of the benchmark ended; see its log")
        if time.monotonic() > deadline:
            raise RuntimeError("the benchmark waited in vain")
        time.sleep(0.2)
