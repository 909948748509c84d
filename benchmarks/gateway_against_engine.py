"""Chat through the gateway against calling the engine directly, in one run: what the gateway adds.

A stub engine gives the first token after 50 ms and then 20 tokens a second to each of 50 concurrent streams. Rounds
through the gateway and rounds against the engine alternate. Goals: time to first token at most 1.1x; added p50 at most
2 ms and added p99 at most 10 ms, and the same for the gap between two tokens.

    python -m benchmarks.gateway_against_engine MODEL_DIRECTORY [--streams 50] [--requests 4] [--rounds 3]

MODEL_DIRECTORY gives the tokenizer. Client, engine, broker and gateway share the machine.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson

from benchmarks.gateway_system import GatewaySystem, StubSpeed, gateway_system
from benchmarks.percentiles import milliseconds

FIRST_TOKEN_SECONDS = 0.05
TOKEN_SECONDS = 0.05
ANSWER_TOKENS = 32
GOAL_RATIO = 1.1
GOAL_ADDED_P50_MILLISECONDS = 2.0
GOAL_ADDED_P99_MILLISECONDS = 10.0


@dataclass(slots=True)
class Measured:
    """Of all streams of one path, in seconds."""

    first_token: list[float] = field(default_factory=list[float])
    gaps: list[float] = field(default_factory=list[float])


@dataclass(frozen=True, slots=True)
class Route:
    """One of the two ways to an answer."""

    url: str
    body: Callable[[int, int], dict[str, Any]]
    """Of a stream's n-th request."""
    is_token: Callable[[bytes], bool]
    """Whether an event brings a token."""


def engine_path(system: GatewaySystem) -> Route:
    sampling = {"max_new_tokens": ANSWER_TOKENS, "temperature": 1.0}
    return Route(
        f"{system.engine_url}/generate",
        lambda stream, number: {
            "rid": f"{stream}.{number}.{time.monotonic_ns()}",
            "input_ids": list(range(100, 160)),
            "sampling_params": sampling,
            "stream": True,
            "return_logprob": True,
        },
        lambda event: event.startswith(b'data: {"text"'),
    )


def gateway_path(system: GatewaySystem) -> Route:
    return Route(
        f"{system.gateway_url}/v1/chat/completions",
        lambda stream, number: {
            "model": "default",
            "stream": True,
            "max_tokens": ANSWER_TOKENS,
            "messages": [{"role": "user", "content": f"{stream} {number} {time.monotonic_ns()}: what is the capital?"}],
        },
        lambda event: b'"delta":{"content":' in event,
    )


async def one_answer(session: aiohttp.ClientSession, path: Route, body: bytes, measured: Measured) -> None:
    started = time.perf_counter()
    arrivals: list[float] = []
    left = b""
    async with session.post(path.url, data=body, headers={"content-type": "application/json"}) as answer:
        if answer.status != 200:
            raise RuntimeError(f"{path.url}: {answer.status} {await answer.text()}")
        async for part in answer.content.iter_any():
            now = time.perf_counter()
            *events, left = (left + part).split(b"\n\n")
            arrivals += [now for event in events if path.is_token(event)]
    if len(arrivals) != ANSWER_TOKENS:
        raise RuntimeError(f"{path.url}: {len(arrivals)} tokens arrived, not {ANSWER_TOKENS}")
    measured.first_token.append(arrivals[0] - started)
    measured.gaps += np.diff(arrivals).tolist()


async def one_round(path: Route, measured: Measured, *, streams: int, requests: int) -> None:
    """All streams at once, each one answer after another; they start spread over one answer's time."""
    answer_seconds = FIRST_TOKEN_SECONDS + ANSWER_TOKENS * TOKEN_SECONDS

    async def stream(number: int) -> None:
        await asyncio.sleep(answer_seconds * number / streams)
        for request in range(requests):
            await one_answer(session, path, orjson.dumps(path.body(number, request)), measured)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(stream(number) for number in range(streams)))


def added(through: list[float], direct: list[float], percentile: float) -> float:
    difference = np.percentile(through, percentile) - np.percentile(direct, percentile)
    return round(1000 * float(difference), 2)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    speed = StubSpeed(FIRST_TOKEN_SECONDS, TOKEN_SECONDS, ANSWER_TOKENS)
    engine, gateway = Measured(), Measured()
    async with gateway_system(options.model_directory, speed) as system:
        paths = [(engine_path(system), engine), (gateway_path(system), gateway)]
        for path, _ in paths:
            await one_round(path, Measured(), streams=options.streams, requests=1)  # warms up
        busy = system.gateway.cpu_times()
        for number in range(options.rounds):
            for path, measured in paths if number % 2 else reversed(paths):
                await one_round(path, measured, streams=options.streams, requests=options.requests)
        used = system.gateway.cpu_times()
    cpu_seconds = used.user + used.system - busy.user - busy.system
    chunks = len(gateway.gaps) + len(gateway.first_token)
    return {
        "benchmark": "gateway_against_engine",
        "streams": options.streams,
        "answers": len(gateway.first_token),
        "first_token_engine": milliseconds(engine.first_token, 50, 90, 99),
        "first_token_gateway": milliseconds(gateway.first_token, 50, 90, 99),
        "first_token_ratio": round(float(np.median(gateway.first_token) / np.median(engine.first_token)), 3),
        "first_token_added_p50": added(gateway.first_token, engine.first_token, 50),
        "first_token_added_p99": added(gateway.first_token, engine.first_token, 99),
        "gap_engine": milliseconds(engine.gaps, 50, 90, 99),
        "gap_gateway": milliseconds(gateway.gaps, 50, 90, 99),
        "gap_added_p50": added(gateway.gaps, engine.gaps, 50),
        "gap_added_p99": added(gateway.gaps, engine.gaps, 99),
        "gateway_cpu_milliseconds_per_token": round(1000 * cpu_seconds / chunks, 3),
        "goal": {
            "first_token_ratio": GOAL_RATIO,
            "added_p50": GOAL_ADDED_P50_MILLISECONDS,
            "added_p99": GOAL_ADDED_P99_MILLISECONDS,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_directory", type=lambda text: Path(text).resolve())
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    report = asyncio.run(measure(parser.parse_args()))
    sys.stdout.write(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
