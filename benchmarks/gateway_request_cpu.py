"""What one request costs the gateway in processor time: a figure that other work on the machine changes little.

Rounds of requests against one gateway process, a stub engine that answers at once, and a real broker. The gateway's
own processor time, all its threads, is divided by requests, or by streamed tokens. Three kinds of requests:

- a short question, answered whole with one token: parsing, placing, rendering, the record, its way to the log;
- the same after a conversation of 40 messages, which the gateway has seen before;
- a stream of 256 tokens: less a short question it gives the price of a token.

    python -m benchmarks.gateway_request_cpu MODEL_DIRECTORY [--requests 200] [--rounds 5]

MODEL_DIRECTORY gives the tokenizer.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.gateway_system import GatewaySystem, StubSpeed, gateway_system

STREAMED_TOKENS = 256
_SETTLE_SECONDS = 1.0
"""Until what the last requests left behind is on the log and read back."""


def question(number: int, *, messages_before: int = 0, tokens: int = 1, stream: bool = False) -> dict[str, Any]:
    """A request that no other one equals."""
    history = [
        {"role": ("user", "assistant")[index % 2], "content": f"{number}.{index}: {'words of a conversation ' * 8}"}
        for index in range(messages_before)
    ]
    asked = {"role": "user", "content": f"{number} {time.monotonic_ns()}: what is the capital of France?"}
    return {"model": "default", "messages": [*history, asked], "max_tokens": tokens, "stream": stream}


async def cpu_milliseconds(system: GatewaySystem, requests: list[dict[str, Any]], concurrent: int) -> float:
    """Of the gateway, for each of these requests, at so many at a time."""
    left = iter(requests)

    async def worker(session: aiohttp.ClientSession) -> None:
        for body in left:
            async with session.post(f"{system.gateway_url}/v1/chat/completions", json=body) as answer:
                text = await answer.read()
                if answer.status != 200 or b'"error"' in text:
                    raise RuntimeError(f"{answer.status}: {text[-300:]!r}")

    before = system.gateway.cpu_times()
    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(worker(session) for _ in range(concurrent)))
        await asyncio.sleep(_SETTLE_SECONDS)
    after = system.gateway.cpu_times()
    return 1000 * (after.user + after.system - before.user - before.system) / len(requests)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, list[float]] = {"short_question": [], "after_40_messages": [], "streamed_token": []}
    speed = StubSpeed(answer_tokens=STREAMED_TOKENS)
    async with gateway_system(options.model_directory, speed) as system:
        for number in range(options.rounds + 1):
            count = options.requests
            short = await cpu_milliseconds(system, [question(index) for index in range(count)], options.concurrent)
            long = await cpu_milliseconds(
                system, [question(index, messages_before=40) for index in range(count)], options.concurrent
            )
            streams = [question(index, tokens=STREAMED_TOKENS, stream=True) for index in range(max(8, count // 8))]
            streamed = await cpu_milliseconds(system, streams, options.concurrent)
            if number:  # the first round warms up
                found["short_question"].append(short)
                found["after_40_messages"].append(long)
                found["streamed_token"].append((streamed - short) / STREAMED_TOKENS)
    return {
        "benchmark": "gateway_request_cpu",
        "rounds": options.rounds,
        "requests_per_round": options.requests,
        "concurrent": options.concurrent,
        "cpu_milliseconds": {
            name: {
                "median": round(statistics.median(values), 3),
                "least": round(min(values), 3),
                "most": round(max(values), 3),
            }
            for name, values in found.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_directory", type=lambda text: Path(text).resolve())
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrent", type=int, default=8)
    sys.stdout.write(json.dumps(asyncio.run(measure(parser.parse_args())), indent=2) + "\n")


if __name__ == "__main__":
    main()
