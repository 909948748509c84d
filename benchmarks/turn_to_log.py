"""How long a finished turn takes until a reader of the log sees it, and what a drain spends its time on.

A reader in another process compares its clock with the event's `finished_at`, so that the outbox's sync, the drain, the
transaction and the fetch are all in it. The next state of a request is measured from the request's arrival. Once with
one conversation after another, once with 20 at a time.

    python -m benchmarks.turn_to_log MODEL_DIRECTORY [--turns 200] [--streams 20]
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from confluent_kafka import Consumer, TopicPartition

from benchmarks.gateway_system import GatewaySystem, StubSpeed, gateway_system
from benchmarks.percentiles import milliseconds

SPEED = StubSpeed(first_token_seconds=0.05, token_seconds=0.05, answer_tokens=8)
"""Paced as conversations are: an engine that takes no time would measure how a saturated machine queues."""
_GIVE_UP_SECONDS = 60.0
_WAITING = "reading"


def read(bootstrap_servers: str, namespace: str, turns: int) -> None:
    """The reader's process: prints the seconds of `turns` turns and of the next states up to then."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "turn-to-log",
            "isolation.level": "read_committed",
            "fetch.wait.max.ms": 500,
        }
    )
    topics = {f"{namespace}.turns.v1": "finished_at", f"{namespace}.next-states.v1": "observed_at"}
    positions: list[TopicPartition] = []
    for topic in topics:
        for number in consumer.list_topics(topic).topics[topic].partitions:
            end = consumer.get_watermark_offsets(TopicPartition(topic, number))[1]
            positions.append(TopicPartition(topic, number, end))
    consumer.assign(positions)
    consumer.poll(1.0)
    sys.stdout.write(f"{_WAITING}\n")
    sys.stdout.flush()
    seconds: dict[str, list[float]] = {topic: [] for topic in topics}
    first = next(iter(topics))
    deadline = time.monotonic() + _GIVE_UP_SECONDS
    while len(seconds[first]) < turns and time.monotonic() < deadline:
        message = consumer.poll(0.5)
        now = datetime.now(UTC)
        if message is None or message.error() is not None:
            continue
        topic, value = message.topic(), message.value()
        assert topic is not None
        event = orjson.loads(value or b"{}")
        seconds[topic].append((now - datetime.fromisoformat(event[topics[topic]])).total_seconds())
    consumer.close()
    sys.stdout.write(json.dumps(list(seconds.values())) + "\n")


async def converse(session: aiohttp.ClientSession, system: GatewaySystem, name: str, turns: int) -> None:
    """One conversation: every request after the first brings a next state."""
    messages: list[dict[str, str]] = []
    for number in range(turns):
        messages = [*messages[-4:], {"role": "user", "content": f"{name}, question {number}"}]
        body = {"model": "default", "messages": messages, "max_tokens": 8}
        headers = {"x-session-id": name}
        async with session.post(f"{system.gateway_url}/v1/chat/completions", json=body, headers=headers) as answer:
            said = await answer.json()
        messages = [*messages, {"role": "assistant", "content": said["choices"][0]["message"]["content"]}]


async def measure_one(system: GatewaySystem, *, streams: int, turns: int) -> dict[str, Any]:
    reader = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "benchmarks.turn_to_log", "--read", system.bootstrap_servers, system.namespace, "--turns", str(turns)),
        stdout=subprocess.PIPE,
    )
    assert reader.stdout is not None
    assert (await reader.stdout.readline()).decode().strip() == _WAITING
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        started = time.perf_counter()
        await asyncio.gather(
            *(converse(session, system, f"s{streams}-{number}", turns // streams) for number in range(streams))
        )
        wall_seconds = time.perf_counter() - started
    turn_seconds, next_state_seconds = json.loads(await reader.stdout.readline())
    await reader.wait()
    if len(turn_seconds) < turns:
        raise RuntimeError(f"only {len(turn_seconds)} of {turns} turns reached the log")
    return {
        "streams": streams,
        "turns_per_second": round(turns / wall_seconds, 1),
        "turn_to_log": milliseconds(turn_seconds, 50, 90, 99),
        "next_state_to_log": milliseconds(next_state_seconds, 50, 90, 99),
    }


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    async with gateway_system(options.model_directory, SPEED) as system:
        await measure_one(system, streams=options.streams, turns=options.streams * 2)  # warms up
        before = await system.phase_milliseconds()
        sequential = await measure_one(system, streams=1, turns=options.turns)
        concurrent = await measure_one(system, streams=options.streams, turns=options.turns * 10)
        phases = await system.phase_milliseconds()
    return {
        "benchmark": "turn_to_log",
        "sequential": sequential,
        "concurrent": concurrent,
        "drain_phases_warm_up_mean": before,
        "drain_phases_mean": phases,
        "goal": "a next state is to become a sample within 50 ms (p50): the way to the log is a part of that",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_directory", type=lambda text: Path(text).resolve(), nargs="?")
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--read", nargs=2, metavar=("BOOTSTRAP_SERVERS", "NAMESPACE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read is not None:
        bootstrap_servers, namespace = options.read
        read(bootstrap_servers, namespace, options.turns)
        return
    if options.model_directory is None:
        parser.error("MODEL_DIRECTORY is missing")
    sys.stdout.write(json.dumps(asyncio.run(measure(options)), indent=2) + "\n")


if __name__ == "__main__":
    main()
