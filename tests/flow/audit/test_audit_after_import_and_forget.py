"""An audit holds after an import and after forgetting, and still names what somebody did by hand."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from clawstream import topics
from clawstream.blobs import BlobStore
from clawstream.bus.interface import OutgoingRecord
from clawstream.clock import SystemClock
from clawstream.encryption.bus import open_bus
from clawstream.engine.client import HttpEngineClient
from clawstream.engine.pool import EnginePool
from clawstream.forgetting.batches import BatchTreatment
from clawstream.forgetting.forget import Forgetting
from clawstream.forgetting.survey import Subject
from clawstream.importing.importer import Importer
from clawstream.importing.openai_log import parse_openai_line
from clawstream.importing.scoring import ImportRules, TurnScorer
from clawstream.rendering.renderer import load_renderer
from clawstream.settings import EncryptionSettings, KafkaSettings
from schemas.events.forgotten import ForgottenKind
from tests.fixtures.buses import kafka_bus, read_all
from tests.fixtures.judged_log import JudgedLog
from tests.fixtures.service_process import REPOSITORY, ServiceProcess
from tests.fixtures.system import wait_for
from tests.numerics.engine.conftest import running_engine

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(900)]
CONVERSATIONS = 4


def talk(number: int) -> bytes:
    words = [("user", f"Question {number}?"), ("assistant", f"Answer {number}."), ("user", "no, shorter")]
    messages = [{"role": role, "content": each} for role, each in (*words, ("assistant", f"{number}."))]
    return json.dumps({"messages": messages, "user": "carol" if number else "dave"}).encode()


def run_audit(config: Path) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "clawstream", "audit", "--config", str(config), "--json"],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("encrypts", [False, True])
async def test_an_imported_and_forgotten_log_passes_and_damage_is_named(
    broker: str,
    namespace: str,
    tmp_path: Path,
    tiny_model_directory: Path,
    start_service: Callable[..., ServiceProcess],
    encrypts: bool,
) -> None:
    torch.set_num_threads(1)
    plain = kafka_bus(broker, "tests")
    log = JudgedLog(plain, namespace)
    log.create_topics()
    toml = f"""\
[kafka]
bootstrap_servers = "{broker}"
namespace = "{namespace}"
encryption = {{ sessions = {str(encrypts).lower()} }}

[judge]
spec = {{ backend = "rules", rules = [["thanks", 1], ["no", -1]] }}
"""
    config = tmp_path / "clawstream.toml"
    config.write_text(toml)
    settings = KafkaSettings(
        bootstrap_servers=broker, namespace=namespace, encryption=EncryptionSettings(sessions=encrypts)
    )
    clock = SystemClock()
    conversations = [parse_openai_line(talk(number), f"log:{number}") for number in range(CONVERSATIONS)]
    async with running_engine(tiny_model_directory, weight_version="0") as running:
        engines = EnginePool([HttpEngineClient("engine-0", str(running.client.base_url))])
        rules = ImportRules("default", "imported", trainable=True)
        scorer = TurnScorer(rules, load_renderer(tiny_model_directory), engines, BlobStore(str(tmp_path)), clock)
        bus = open_bus(settings, client_id="import", renews_keys=True)
        importer = Importer(bus, namespace, scorer, principal="imported", concurrent=3, clock=clock)
        assert (await importer.run(conversations)).turns == 2 * CONVERSATIONS
        await engines.close()

    def finish() -> None:
        processes = [start_service(name, toml) for name in ("judge", "teacher")]
        wait_for(
            lambda: (
                len(read_all(plain, log.topic(topics.SAMPLES), settled=False)) >= CONVERSATIONS
                and len(read_all(plain, log.topic(topics.SKIPS), settled=False)) >= 1
            ),
            "a sample of every reply, and the ends of sessions are skipped",
        )
        assert all(process.stop() == 0 for process in processes)

    await asyncio.to_thread(finish)
    code, report = run_audit(config)
    assert (code, report["first_violation"]) == (0, None)
    assert report["handled"]["judge"] == {"output": CONVERSATIONS, "skip": CONVERSATIONS, "waiting": 0}

    forgetting = Forgetting(plain, namespace, clock)
    for subject in (
        Subject(ForgottenKind.SESSION, conversations[1].session_id("carol")),
        Subject(ForgottenKind.PRINCIPAL, "dave"),
    ):
        done = forgetting.run(subject, BatchTreatment.KEEP)
        assert len(done.found.turn_ids) == 2
        assert bool(done.session_keys_deleted) == encrypts
    code, report = run_audit(config)
    assert (code, report["first_violation"]) == (0, None), "with keys or without, and after forgetting"

    turn = read_all(plain, log.topic(topics.TURNS))[0]
    (again,) = log.write([OutgoingRecord(turn.topic, turn.key, turn.value, turn.headers, turn.partition)])
    code, report = run_audit(config)
    assert code == 1
    first = report["first_violation"]
    assert (first["topic"], first["partition"], first["offset"]) == (turn.topic, turn.partition, again.offset)
