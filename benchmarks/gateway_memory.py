"""20,000 sessions through one gateway: its memory comes back to where it was.

Each session is two turns over HTTP and then ends or falls idle. Memory is the gateway's resident set: before (after a
few hundred sessions, when everything is loaded), at its highest, and after all sessions were closed. Goal: back to the
start plus 50 MB.

    python -m benchmarks.gateway_memory MODEL_DIRECTORY [--sessions 20000] [--streams 32]
"""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.gateway_system import GatewaySystem, StubSpeed, gateway_system

GOAL_MEGABYTES = 50.0
_WARM_UP_SESSIONS = 500
_IDLE_LIMIT_SECONDS = 5.0
_ATTEMPTS = 30
_RETRY_SECONDS = 2.0
_SETTLE_SECONDS = 15.0
"""Idle limit, the check for it, and the way of the last events to the log and back into the index."""


async def one_session(session: aiohttp.ClientSession, system: GatewaySystem, name: str) -> None:
    messages: list[dict[str, str]] = []
    for number in range(2):
        messages = [*messages, {"role": "user", "content": f"{name}, question {number}"}]
        body = {"model": "default", "messages": messages, "max_tokens": 8}
        said = await answered(session, f"{system.gateway_url}/v1/chat/completions", body)
        messages = [*messages, {"role": "assistant", "content": said["choices"][0]["message"]["content"]}]


async def answered(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer, asked for again while the machine is too busy for the engine to answer in time."""
    for attempt in range(_ATTEMPTS):
        async with session.post(url, json=body) as answer:
            if answer.status < 500 or attempt == _ATTEMPTS - 1:
                answer.raise_for_status()
                return await answer.json()
        await asyncio.sleep(_RETRY_SECONDS)
    raise AssertionError


async def run_sessions(system: GatewaySystem, name: str, count: int, streams: int) -> float:
    """All sessions, so many at a time. Returns the largest resident set that was seen, in megabytes."""
    numbers = iter(range(count))
    highest = 0.0

    async def worker() -> None:
        nonlocal highest
        for number in numbers:
            await one_session(session, system, f"{name}-{number}")
            if number % 100 == 0:
                highest = max(highest, resident_megabytes(system))

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(worker() for _ in range(streams)))
    return highest


def resident_megabytes(system: GatewaySystem) -> float:
    return system.gateway.memory_info().rss / 1e6


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    settings = {"idle_limit_seconds": _IDLE_LIMIT_SECONDS, "idle_check_seconds": 1.0}
    async with gateway_system(options.model_directory, StubSpeed(), **settings) as system:
        await run_sessions(system, "warm-up", _WARM_UP_SESSIONS, options.streams)
        await asyncio.sleep(_SETTLE_SECONDS)
        before = resident_megabytes(system)
        started = time.perf_counter()
        highest = await run_sessions(system, "session", options.sessions, options.streams)
        seconds = time.perf_counter() - started
        await asyncio.sleep(_SETTLE_SECONDS)
        after = resident_megabytes(system)
    return {
        "benchmark": "gateway_memory",
        "sessions": options.sessions,
        "turns_per_second": round(2 * options.sessions / seconds, 1),
        "resident_megabytes_before": round(before, 1),
        "resident_megabytes_highest": round(highest, 1),
        "resident_megabytes_after": round(after, 1),
        "grown_megabytes": round(after - before, 1),
        "grown_bytes_per_session": round(1e6 * (after - before) / options.sessions),
        "goal_megabytes": GOAL_MEGABYTES,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_directory", type=lambda text: Path(text).resolve())
    parser.add_argument("--sessions", type=int, default=20_000)
    parser.add_argument("--streams", type=int, default=32)
    sys.stdout.write(json.dumps(asyncio.run(measure(parser.parse_args())), indent=2) + "\n")


if __name__ == "__main__":
    main()
