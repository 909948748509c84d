"""A log with turns and replies, and the command line beside it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fixtures.buses import kafka_bus
from tests.fixtures.judged_log import JudgedLog
from tests.fixtures.service_process import REPOSITORY, start_service

__all__ = ["start_service"]
COMMAND_SECONDS = 400


def kill_with_children(process: "subprocess.Popen[str]") -> None:
    """As a power cut would: the command and what it started."""
    children = psutil.Process(process.pid).children(recursive=True)
    for each in children:
        each.kill()
    process.kill()
    psutil.wait_procs(children, timeout=30)


@dataclass(frozen=True)
class CommandLine:
    """`clawstream ARGUMENTS` in a folder with a TOML file."""

    folder: Path
    environment: dict[str, str]

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "clawstream", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
            cwd=self.folder,
        )

    def __call__(self, *arguments: str, code: int = 0) -> str:
        process = self.start(*arguments)
        try:
            output, errors = process.communicate(timeout=COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            kill_with_children(process)
            output, errors = process.communicate()
            raise AssertionError(f"{arguments} did not end:\n{output}\n{errors}") from None
        assert process.returncode == code, output + errors
        return output if code == 0 else errors

    def json(self, *arguments: str) -> Any:
        return json.loads(self(*arguments, "--json"))


@pytest.fixture
def log(broker: str, namespace: str) -> JudgedLog:
    made = JudgedLog(kafka_bus(broker, "tests"), namespace)
    made.create_topics()
    return made


@pytest.fixture
def toml(broker: str, namespace: str) -> str:
    return f"""\
data_directory = "data"
[kafka]
bootstrap_servers = "{broker}"
namespace = "{namespace}"
[judge]
spec = {{ backend = "rules", rules = [["thanks", 1], ["no", -1]] }}
"""


@pytest.fixture
def clawstream(tmp_path: Path, toml: str) -> Callable[..., Any]:
    (tmp_path / "clawstream.toml").write_text(toml)
    return CommandLine(tmp_path, {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"})
