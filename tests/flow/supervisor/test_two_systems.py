"""`clawstream up` in two folders on one broker: the second one says whose names it would take, and starts nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.configuration import kafka_toml
from tests.fixtures.service_process import REPOSITORY

pytestmark = pytest.mark.kafka


def clawstream(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "clawstream", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_a_second_system_in_a_namespace_is_refused_until_it_joins(broker: str, namespace: str, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    worker = [sys.executable, "-c", f"open({str(journal)!r}, 'a').write('started ')"]
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "clawstream.toml").write_text(
            f"""\
data_directory = "data"
{kafka_toml(broker, namespace)}[[processes]]
name = "topics"
service = "topics"
[[processes]]
name = "worker"
service = "command"
command = {worker}
restart = false
depends_on = ["topics"]
"""
        )
    one, two = tmp_path / "one", tmp_path / "two"
    for _ in range(2):
        up = clawstream(one, "up")
        assert up.returncode == 0, up.stderr
    assert journal.read_text() == "started started "
    refused = clawstream(two, "up")
    assert refused.returncode != 0
    for part in (one / "data", two / "data", "--join"):
        assert str(part) in refused.stderr, refused.stderr
    assert journal.read_text() == "started started "
    assert clawstream(two, "topics", "apply", "--join").returncode == 0
    assert clawstream(two, "up").returncode == 0
    assert journal.read_text() == "started started started "
