"""Ranks as processes: what they end with is what the whole ends with, and none is left behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from clawstream.process_identity import ProcessIdentity
from clawstream.settings import EXIT_CODE_WRONG_SETTINGS
from services.trainer.launch_ranks import exit_code
from tests.fixtures.service_process import REPOSITORY
from tests.fixtures.system import wait_for

LAUNCH = """
import asyncio, json, os, sys
from services.trainer.launch_ranks import launch
command, options = json.loads(sys.argv[1])
sys.exit(asyncio.run(launch(command, 2, environment=os.environ, **options)))
"""
TELLS = "open(f'rank-{rank}', 'w').write(str(os.getpid()))"
WAITS = "signal.pause()"
IGNORES = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
STOPS = "signal.signal(signal.SIGTERM, lambda *_: os._exit(0))"
LOSES_ITS_PEER = "open('peer').read()"
"""Returns when the other rank, which holds the other end, has ended."""
HOLDS_ITS_PEER = "held = os.open('peer', os.O_WRONLY)"
"""Until the process is gone: a file object would be closed while Python still ends, and the other might end first."""


def start(directory: Path, first: str, second: str, **options: float) -> subprocess.Popen[bytes]:
    """Two ranks that run these statements."""
    os.mkfifo(directory / "peer")
    head = "import os, signal, sys; rank = int(os.environ['RANK'])"
    program = "\n".join([head, f"for step in ({first!r}, {second!r})[rank].split(';'): exec(step)"])
    options = {"stop_timeout_seconds": 60.0, "peers_seconds": 60.0} | options
    arguments = json.dumps([[sys.executable, "-c", program], options])
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen([sys.executable, "-c", LAUNCH, arguments], cwd=directory, env=environment)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("sys.exit(0)", "sys.exit(0)", 0),
        ("sys.exit(2)", "sys.exit(2)", EXIT_CODE_WRONG_SETTINGS),
        (f"{LOSES_ITS_PEER};sys.exit(2)", f"{HOLDS_ITS_PEER};sys.exit(1)", EXIT_CODE_WRONG_SETTINGS),
        (f"{HOLDS_ITS_PEER};sys.exit(2)", f"{LOSES_ITS_PEER};sys.exit(1)", EXIT_CODE_WRONG_SETTINGS),
        (f"{HOLDS_ITS_PEER};sys.exit(3)", f"{LOSES_ITS_PEER};sys.exit(1)", 3),
        (f"{LOSES_ITS_PEER};sys.exit(1)", f"{HOLDS_ITS_PEER};os.kill(os.getpid(), 9)", 137),
        (f"{LOSES_ITS_PEER};sys.exit(1)", f"{HOLDS_ITS_PEER};sys.exit(0)", 1),
    ],
)
def test_the_exit_code_is_that_of_the_ranks(tmp_path: Path, first: str, second: str, expected: int) -> None:
    assert start(tmp_path, first, second).wait(60) == expected


def test_a_rank_that_does_not_notice_that_it_is_alone_is_ended(tmp_path: Path) -> None:
    assert (
        start(tmp_path, f"{IGNORES};{WAITS}", "sys.exit(2)", stop_timeout_seconds=0.0, peers_seconds=0.0).wait(60) == 2
    )


@pytest.mark.parametrize(("reacts", "expected"), [(STOPS, 0), (IGNORES, 137)])
def test_a_signal_to_stop_is_passed_on_and_outlasted(tmp_path: Path, reacts: str, expected: int) -> None:
    rank = f"{reacts};{TELLS};{WAITS}"
    launcher = start(tmp_path, rank, rank, stop_timeout_seconds=0.2 if reacts == IGNORES else 60.0)
    files = [tmp_path / f"rank-{number}" for number in range(2)]
    wait_for(lambda: all(file.exists() and file.read_text() for file in files), "both ranks run")
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(60) == expected
    assert not any(psutil.pid_exists(int(file.read_text())) for file in files)


def test_ranks_end_with_a_launcher_that_was_killed(tmp_path: Path) -> None:
    """Nobody passes a signal on then. Under a supervisor the whole group is ended; started by hand it was not."""
    if shutil.which("setpriv") is None:
        missing = "setpriv (util-linux) is needed for ranks to end with their launcher"
        pytest.fail(missing) if os.environ.get("CI") == "true" else pytest.skip(missing)
    rank = f"{TELLS};{WAITS}"
    launcher = start(tmp_path, rank, rank)
    files = [tmp_path / f"rank-{number}" for number in range(2)]
    wait_for(lambda: all(file.exists() and file.read_text() for file in files), "both ranks run")
    ranks = [ProcessIdentity.of(int(file.read_text())) for file in files]
    launcher.kill()
    launcher.wait(60)
    try:
        assert all(each.wait(60) for each in ranks), "a rank outlived its launcher"
    finally:
        for each in ranks:
            each.signal(signal.SIGKILL)


@pytest.mark.parametrize(
    ("codes", "expected"), [([], 0), ([0, 0], 0), ([1, 2], 2), ([-9, 1], 137), ([0, 3, 1], 3), ([-15, 2], 2)]
)
def test_wrong_settings_count_before_what_follows_from_them(codes: list[int], expected: int) -> None:
    assert exit_code(codes) == expected
