"""The weight gate with real engines, gateways and broker: an owner that dies, a load that fails, the way back.

The engines are told to pause, as SGLang is: they could load beside their old weights, but then nothing could be left
half done.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from clawstream.bus.kafka import KafkaBus
from clawstream.settings import KafkaSettings
from services.engine.tiny_model import write_tiny_model
from tests.fixtures.engine_proxy import EngineProxy
from tests.fixtures.service_process import ServiceProcess
from tests.fixtures.system import free_ports, wait_for
from tests.fixtures.turns import turns_on_log
from tests.fixtures.weights import make_artefact, pointer_record, version_record, write

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass
class Fleet:
    """Two gateways on one log, two engines behind proxies."""

    directory: Path
    config: Path
    kafka: str
    namespace: str
    model: Path
    urls: list[str]
    gateways: list[ServiceProcess]
    engine_urls: list[str]
    engines: list[ServiceProcess]
    start_engine: Callable[[int], ServiceProcess]
    proxies: list[EngineProxy]

    async def publish(self, version: int) -> None:
        def put() -> None:
            model = write_tiny_model(self.directory / f"model-{version}", seed=version)
            event = make_artefact(self.directory, version, model)
            settings = KafkaSettings(bootstrap_servers=self.kafka, namespace=self.namespace)
            bus = KafkaBus(settings, client_id="publisher")
            write(bus, version_record(event, self.namespace), pointer_record(version, self.namespace))

        await asyncio.to_thread(put)

    def status(self, gateway: int) -> dict[str, Any]:
        return httpx.get(f"{self.urls[gateway]}/status", timeout=60).json()["gate"]

    def owner(self) -> int | None:
        alive = [number for number, each in enumerate(self.gateways) if each.process.poll() is None]
        return next((number for number in alive if self.status(number)["owner"]), None)

    async def until_known(self, gateway: int, *versions: int) -> None:
        """Until this gateway knows that the engines serve these."""

        def known() -> bool:
            engines = self.status(gateway)["engines"].values()
            return [each["weight_version"] if each["ready"] else None for each in engines] == list(versions)

        await asyncio.to_thread(wait_for, known, f"gateway {gateway} knows versions {versions}")

    def reported(self) -> list[str]:
        """What the engines themselves say."""
        return [httpx.get(f"{url}/model_info").json()["weight_version"] for url in self.engine_urls]

    def is_paused(self, engine: int) -> bool:
        return httpx.get(f"{self.engine_urls[engine]}/ready").status_code == 503

    def command(self, *arguments: str) -> str:
        """`clawstream ARGUMENTS`."""
        command = [sys.executable, "-m", "clawstream", *arguments, "--config", str(self.config)]
        environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
        return subprocess.run(command, check=True, env=environment, capture_output=True, text=True).stdout


@pytest.fixture
async def fleet(
    broker: str, namespace: str, start_service: Callable[..., ServiceProcess], tmp_path: Path
) -> AsyncIterator[Fleet]:
    model = write_tiny_model(tmp_path / "model")
    ports = free_ports(6)
    engine_urls = [f"http://127.0.0.1:{port}" for port in ports[:2]]
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(EngineProxy(url)) for url in engine_urls]

        def start_engine(number: int) -> ServiceProcess:
            toml = f"""
[engine]
model_path = "{model}"
port = {ports[number]}
weight_version = "0"
incremental_streaming_output = true
"""
            return start_service("engine", toml, {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"})

        processes = [start_engine(number) for number in range(2)]
        engines = ", ".join(f'{{ name = "engine-{n}", url = "{proxy.url}" }}' for n, proxy in enumerate(proxies))
        gateways: list[ServiceProcess] = []
        config = tmp_path / "clawstream.toml"
        for number, (port, operations_port) in enumerate(zip(ports[2:4], ports[4:], strict=True)):
            toml = f"""
data_directory = "data-{number}"
[kafka]
bootstrap_servers = "{broker}"
namespace = "{namespace}"
[gateway]
name = "gateway-{number}"
model_path = "{model}"
port = {port}
operations_port = {operations_port}
gate = {{ heartbeat_seconds = 0.3, heartbeat_expiry_seconds = 3.0, retry_seconds = 0.5, retry_max_seconds = 600.0 }}
engines = [{engines}]
"""
            if number == 0:
                config.write_text(toml)
                await asyncio.to_thread(
                    subprocess.run,
                    [sys.executable, "-m", "clawstream", "topics", "apply", "--config", str(config)],
                    check=True,
                    env={**os.environ, "PYTHONPATH": str(Path.cwd())},
                    capture_output=True,
                )
            gateways.append(start_service("gateway", toml, {"OMP_NUM_THREADS": "1"}))
        urls = [f"http://127.0.0.1:{port}" for port in ports[2:4]]
        found = Fleet(
            *(tmp_path, config, broker, namespace, model),
            *(urls, gateways, engine_urls, processes, start_engine, proxies),
        )

        def all_ready() -> bool:
            for gateway in gateways:
                assert gateway.process.poll() is None, gateway.text()
            try:
                return all(httpx.get(f"{url}/readyz").status_code == 200 for url in urls)
            except httpx.TransportError:
                return False

        await asyncio.to_thread(wait_for, all_ready, "both gateways are ready")
        await asyncio.to_thread(wait_for, lambda: found.owner() is not None, "one of them owns the gate")
        yield found


class Users:
    """People who talk through one gateway until they are told to stop. Answers that are none are kept."""

    def __init__(self, url: str, count: int) -> None:
        self._url = url
        self._count = count
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.answers = 0
        self.errors: list[str] = []

    async def __aenter__(self) -> "Users":
        self._client = httpx.AsyncClient(base_url=self._url, timeout=120)
        self._tasks = [asyncio.create_task(self._talk(number)) for number in range(self._count)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)
        await self._client.aclose()

    async def heard(self, more: int) -> None:
        """Until so many more answers came."""
        goal = self.answers + more
        async with asyncio.timeout(180):
            while self.answers < goal:
                await asyncio.sleep(0.02)

    async def _talk(self, number: int) -> None:
        rounds = 0
        while not self._stop.is_set():
            rounds += 1
            messages = [{"role": "user", "content": f"{number} asks for the {rounds}th time"}]
            body = {"model": "default", "messages": messages, "stream": True, "max_tokens": 60}
            async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                text = (await response.aread()).decode()
            if response.status_code != 200 or "[DONE]" not in text or '"error"' in text:
                self.errors.append(f"{response.status_code} {text[-300:]}")
            self.answers += 1


async def test_an_owner_killed_in_mid_update_is_followed_by_one_that_finishes_it(fleet: Fleet) -> None:
    owner = fleet.owner()
    assert owner is not None
    survivor = 1 - owner
    holds = [proxy.hold_next("/update_weights_from_disk") for proxy in fleet.proxies]
    async with Users(fleet.urls[survivor], 4) as users:
        await users.heard(8)
        await fleet.publish(1)
        waiting = [asyncio.create_task(hold.arrived.wait()) for hold in holds]
        done, others = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        assert len(done) == 1, "one engine after the other"
        paused = next(number for number, hold in enumerate(holds) if hold.arrived.is_set())
        for other in others:
            other.cancel()
        assert fleet.is_paused(paused)
        fleet.gateways[owner].kill()
        await users.heard(8)  # by the other engine
        for hold in holds:
            hold.go_on.set()
        await fleet.until_known(survivor, 1, 1)
        await users.heard(8)
    assert users.errors == []
    assert fleet.owner() == survivor
    assert fleet.reported() == ["1", "1"]
    assert not any(fleet.is_paused(number) for number in range(2))
    # With the drain of the outbox the last turns come a moment later.
    turns = await asyncio.to_thread(
        wait_for,
        lambda: found if len(found := turns_on_log(fleet.kafka, fleet.namespace)) == users.answers else None,
        "every turn is on the log",
    )
    assert {span.weight_version for turn in turns for span in turn.version_spans} == {0, 1}
    assert all(turn.trainable for turn in turns), [turn.untrainable_detail for turn in turns if not turn.trainable]


async def test_one_engine_that_cannot_load_serves_the_old_version_and_moves_with_the_next(fleet: Fleet) -> None:
    owner = fleet.owner()
    assert owner is not None
    await fleet.publish(1)
    await fleet.until_known(owner, 1, 1)
    # The third and later tries wait for minutes; the load of the old version after each failure passes.
    fleet.proxies[1].fail_next("/update_weights_from_disk", 503)
    async with Users(fleet.urls[1 - owner], 4) as users:
        await users.heard(4)
        before = len(fleet.proxies[1].calls)
        await fleet.publish(2)
        await fleet.until_known(1 - owner, 2, 2)
        await users.heard(4)
    assert users.errors == []
    assert fleet.reported() == ["2", "2"]
    assert fleet.proxies[1].calls[before:].count("/update_weights_from_disk") == 3, "failed, old version, tried again"
    assert fleet.status(owner)["engines"]["engine-1"]["error"] == ""


async def test_a_rollback_by_command_holds_until_it_is_released(fleet: Fleet) -> None:
    for version in (1, 2):
        await fleet.publish(version)
    await fleet.until_known(0, 2, 2)
    async with Users(fleet.urls[0], 2) as users:
        told = await asyncio.to_thread(fleet.command, "weights", "rollback", "1", "--reason", "it swears")
        assert "Version 1 goes into service now and is held" in told
        for gateway in (0, 1):
            await fleet.until_known(gateway, 1, 1)
        await fleet.publish(3)
        listed = await asyncio.to_thread(fleet.command, "weights", "list")
        assert "yes, held" in listed
        assert "it swears" in listed
        assert "after the release" in listed
        await users.heard(4)
        assert fleet.reported() == ["1", "1"]
        told = await asyncio.to_thread(fleet.command, "weights", "release")
        assert "Version 3 goes into service now" in told
        await fleet.until_known(1, 3, 3)
    assert users.errors == []
    assert fleet.reported() == ["3", "3"]


async def test_an_engine_that_restarts_with_base_weights_gets_its_version_back(fleet: Fleet) -> None:
    await fleet.publish(1)
    await fleet.until_known(0, 1, 1)
    fleet.engines[0].kill()
    async with Users(fleet.urls[0], 2) as users:
        await users.heard(4)
        fleet.start_engine(0)
        await fleet.until_known(0, 1, 1)
        await users.heard(4)
    assert users.errors == []
    assert fleet.reported() == ["1", "1"]
    assert fleet.proxies[0].calls.count("/update_weights_from_disk") == 2
    turns = await asyncio.to_thread(
        wait_for,
        lambda: found if len(found := turns_on_log(fleet.kafka, fleet.namespace)) == users.answers else None,
        "every turn is on the log",
    )
    assert {span.weight_version for turn in turns for span in turn.version_spans} == {1}, "never the base weights"
