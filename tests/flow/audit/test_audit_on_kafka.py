"""The command against a real log: what judge and teacher wrote passes; what somebody added by hand does not."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clawstream import topics
from clawstream.bus.interface import OutgoingRecord
from tests.fixtures.buses import kafka_bus, read_all
from tests.fixtures.judged_log import JudgedLog, next_state_of, turn_event
from tests.fixtures.service_process import REPOSITORY, ServiceProcess
from tests.fixtures.system import wait_for

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


def run_audit(config: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "clawstream", "audit", "--config", str(config), *options],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


def document(config: Path) -> tuple[int, dict[str, Any]]:
    done = run_audit(config, "--json")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_real_log_passes_and_a_tampered_one_is_named(
    broker: str, namespace: str, tmp_path: Path, start_service: Callable[..., ServiceProcess]
) -> None:
    log = JudgedLog(kafka_bus(broker, "tests"), namespace)
    log.create_topics()
    toml = f"""\
[kafka]
bootstrap_servers = "{broker}"
namespace = "{namespace}"

[judge]
spec = {{ backend = "rules", rules = [["thanks", 1], ["no", -1]] }}
"""
    config = tmp_path / "clawstream.toml"
    config.write_text(toml)
    processes = [start_service(name, toml) for name in ("judge", "teacher")]
    log.converse({number: "thanks" if number % 2 else "no, too long" for number in range(30)})
    (place,) = log.write_turns([turn_event(100)])
    log.write_next_states([next_state_of(turn_event(100), place, "", kind="session_end", following_messages=[])])
    poison = OutgoingRecord(log.topic(topics.NEXT_STATES), b"session-0", b"not JSON")
    log.write([poison])
    dead = lambda: read_all(log.bus, log.topic(topics.JUDGE_DLQ))  # noqa: E731 - read again at every look
    skipped = lambda: read_all(log.bus, log.topic(topics.SKIPS))  # noqa: E731
    wait_for(lambda: len(log.samples()) == 30 and dead() and skipped(), "every input has its end")

    aborted = log.bus.transactional_producer(f"{namespace}.aborted")
    score = read_all(log.bus, log.topic(topics.SCORES))[0]
    again = OutgoingRecord(score.topic, score.key, score.value, score.headers, score.partition)
    aborted.begin()
    aborted.produce(again)
    aborted.flush(30)
    aborted.abort()
    aborted.close()

    code, report = document(config)
    assert (code, report["first_violation"]) == (0, None)
    assert report["handled"] == {
        "judge": {"output": 30, "skip": 1, "dead letter": 1, "waiting": 0},
        "teacher": {"output": 30, "waiting": 0},
    }
    assert all(process.stop() == 0 for process in processes)

    (delivery,) = log.write([again])
    code, report = document(config)
    assert code == 1
    first = report["first_violation"]
    assert (first["topic"], first["partition"], first["offset"]) == (score.topic, score.partition, delivery.offset)
    shown = run_audit(config)
    assert shown.returncode == 1
    assert f"{score.topic}[{score.partition}]@{delivery.offset}" in shown.stdout
