"""What the gateway's benchmarks run on: a broker, a stub engine and a gateway, each a process of its own."""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil

from clawstream.broker import LocalBroker
from clawstream.bus.kafka import KafkaBus
from clawstream.clock import SystemClock
from clawstream.process_identity import free_ports
from clawstream.settings import KafkaSettings
from clawstream.topics import topic_definitions
from clawstream.topics_admin import apply_topics, wait_until_readable

_REPOSITORY = Path(__file__).parents[1]
_READY_SECONDS = 300.0
_STOP_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class StubSpeed:
    """How the stub engine answers. No time at all by default."""

    first_token_seconds: float = 0.0
    token_seconds: float = 0.0
    answer_tokens: int = 8


@dataclass(frozen=True, slots=True)
class GatewaySystem:
    """Everything is up."""

    gateway_url: str
    engine_url: str
    bootstrap_servers: str
    namespace: str
    gateway: psutil.Process

    async def phase_milliseconds(self) -> dict[str, float]:
        """Mean duration of each phase of a drain so far, and of all of it."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.gateway_url}/metrics") as answer:
            text = await answer.text()
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        found: dict[str, float] = {}
        for name, value in values.items():
            if name.startswith("clawstream_outbox_drain") and "_sum" in name:
                count = float(values[name.replace("_sum", "_count")])
                phase = name.partition('phase="')[2].partition('"')[0] or "all"
                found[phase] = round(1000 * float(value) / count, 2) if count else 0.0
        return found


@asynccontextmanager
async def gateway_system(
    model_directory: Path, speed: StubSpeed, **conversations: float
) -> AsyncIterator[GatewaySystem]:
    """Starts everything in a temporary folder and ends it.

    `model_directory` is absolute and gives the tokenizer; `conversations` are settings of that section.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="clawstream-benchmark-")))
        broker = stack.enter_context(LocalBroker(folder / "kafka", ends_with_parent=True))
        namespace = "benchmark"
        bus = KafkaBus(KafkaSettings(bootstrap_servers=broker.bootstrap_servers), client_id="benchmark")
        admin = bus.admin()
        apply_topics(admin, namespace, 1, topic_definitions().values())
        admin.close()
        wait_until_readable(bus, namespace, topic_definitions().values(), SystemClock(), timeout_seconds=_READY_SECONDS)
        engine_port, gateway_port = free_ports(2)
        config = folder / "clawstream.toml"
        extra = "\n".join(f"{name} = {value}" for name, value in conversations.items())
        config.write_text(f"""
data_directory = "data"
[kafka]
bootstrap_servers = "{broker.bootstrap_servers}"
namespace = "{namespace}"
[log]
level = "warning"
[gateway]
model_path = "{model_directory}"
port = {gateway_port}
engines = [{{ name = "stub", url = "http://127.0.0.1:{engine_port}" }}]
[gateway.conversations]
{extra}
""")
        _start(
            stack,
            "tests.fixtures.stub_engine",
            *("--port", str(engine_port)),
            *("--first-token-seconds", str(speed.first_token_seconds)),
            *("--token-seconds", str(speed.token_seconds)),
            *("--answer-tokens", str(speed.answer_tokens)),
        )
        gateway = _start(stack, "services.gateway", "--config", str(config))
        system = GatewaySystem(
            gateway_url=f"http://127.0.0.1:{gateway_port}",
            engine_url=f"http://127.0.0.1:{engine_port}",
            bootstrap_servers=broker.bootstrap_servers,
            namespace=namespace,
            gateway=psutil.Process(gateway.pid),
        )
        await _until_ready(f"{system.gateway_url}/readyz", gateway)
        yield system


def _start(stack: ExitStack, module: str, *arguments: str) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=_REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(_REPOSITORY)},
        stdout=subprocess.DEVNULL,
    )
    stack.callback(_stop, process)
    return process


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


async def _until_ready(url: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + _READY_SECONDS
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise RuntimeError(f"the gateway ended with code {process.returncode}")
            try:
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
    raise RuntimeError(f"{url}: not ready within {_READY_SECONDS:.0f} seconds")
