"""20,000 sessions through one gateway: its memory comes back to where it was.

Each session is two turns over HTTP and then falls idle. Memory is the gateway's resident set: before (after a few
hundred sessions, when everything is loaded), at its highest, and after all sessions were closed and everything is on
the log. Goal: back to the start plus 50 MB, in which the bounded caches are counted that fill up meanwhile.

The stub gives every session the same answer: the session tree meets as many candidates as it ever looks at. So how
many sessions it recognised is part of the report: `replies` and `session_ends` should both be the number of sessions.

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
from benchmarks.metric_reading import read_metrics

GOAL_MEGABYTES = 50.0
_WARM_UP_SESSIONS = 500
_IDLE_LIMIT_SECONDS = 5.0
_ATTEMPTS = 30
_RETRY_SECONDS = 2.0
_QUIET_SECONDS = 10.0
"""Longer than the idle limit and the check for it: when nothing was written for so long, all sessions are closed."""
_PATIENCE_SECONDS = 600.0
_REPORT_EVERY_SESSIONS = 1000


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
        try:
            async with session.post(url, json=body) as answer:
                if answer.status < 500 or attempt == _ATTEMPTS - 1:
                    answer.raise_for_status()
                    return await answer.json()
        except (aiohttp.ClientConnectionError, TimeoutError):
            if attempt == _ATTEMPTS - 1:
                raise
        await asyncio.sleep(_RETRY_SECONDS)
    raise AssertionError


async def run_sessions(system: GatewaySystem, name: str, count: int, streams: int) -> float:
    """All sessions, so many at a time. Returns the largest resident set that was seen, in megabytes."""
    numbers = iter(range(count))
    highest = 0.0
    started = time.perf_counter()

    async def worker() -> None:
        nonlocal highest
        for number in numbers:
            await one_session(session, system, f"{name}-{number}")
            if number % 100 == 0:
                highest = max(highest, resident_megabytes(system))
            if number and number % _REPORT_EVERY_SESSIONS == 0:
                seconds = time.perf_counter() - started
                sys.stderr.write(f"{name}: {number} of {count} after {seconds:.0f} s\n")

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(worker() for _ in range(streams)))
    return highest


def resident_megabytes(system: GatewaySystem) -> float:
    return system.gateway.memory_info().rss / 1e6


async def until_settled(system: GatewaySystem) -> None:
    """Until the outbox is empty and no session has ended for a while. Raises RuntimeError when that does not come."""
    deadline = time.perf_counter() + _PATIENCE_SECONDS
    last, since = -1.0, time.perf_counter()
    while time.perf_counter() - since < _QUIET_SECONDS:
        if time.perf_counter() > deadline:
            raise RuntimeError(f"the gateway still writes {_PATIENCE_SECONDS:.0f} s after its last request")
        await asyncio.sleep(1.0)
        now = await read_metrics(system.gateway_url)
        written = now.get("clawstream_next_states_total", 0.0)
        if now["clawstream_outbox_entries"] or written != last:
            last, since = written, time.perf_counter()


async def next_states(system: GatewaySystem, kind: str) -> float:
    """How many of a kind the gateway has written."""
    return (await read_metrics(system.gateway_url, kind=kind)).get("clawstream_next_states_total", 0.0)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    settings = {"idle_limit_seconds": _IDLE_LIMIT_SECONDS, "idle_check_seconds": 1.0}
    async with gateway_system(options.model_directory, StubSpeed(), **settings) as system:
        await run_sessions(system, "warm-up", _WARM_UP_SESSIONS, options.streams)
        await until_settled(system)
        before = resident_megabytes(system)
        counted = {kind: await next_states(system, kind) for kind in ("reply", "session_end")}
        started = time.perf_counter()
        highest = await run_sessions(system, "session", options.sessions, options.streams)
        seconds = time.perf_counter() - started
        await until_settled(system)
        after = resident_megabytes(system)
        written = {kind: await next_states(system, kind) - count for kind, count in counted.items()}
    return {
        "benchmark": "gateway_memory",
        "sessions": options.sessions,
        "replies": round(written["reply"]),
        "session_ends": round(written["session_end"]),
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
