"""The disk of a whole system is full: its supervisor goes on, and so does everything it started."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from clawstream.supervisor.log_files import LARGEST_FILE_BYTES
from clawstream.supervisor.report import ProcessReport, ProcessState, read_report, running_supervisor
from tests.faults.chaos import Chaos
from tests.fixtures.service_process import REPOSITORY
from tests.fixtures.small_disk import SmallDisk
from tests.fixtures.system import wait_for

STUB = REPOSITORY / "tests" / "fixtures" / "stub_process.py"


def test_a_supervisor_whose_disk_is_full_keeps_its_processes(
    small_disk: Callable[[int], SmallDisk], tmp_path: Path, chaos: Chaos
) -> None:
    disk = small_disk(2 * LARGEST_FILE_BYTES + (4 << 20))
    file, journal = tmp_path / "clawstream.toml", tmp_path / "journal"
    command = [sys.executable, str(STUB), "judge", str(journal)]
    file.write_text(
        f'data_directory = "{disk.path / "data"}"\n'
        f'[[processes]]\nname = "judge"\nservice = "command"\ncommand = {command}\n'
    )
    directory = disk.path / "data" / "supervisor"

    def clawstream(*arguments: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        subprocess.run(
            [sys.executable, "-m", "clawstream", *arguments, "--config", str(file)], check=True, env=environment
        )

    def judge() -> ProcessReport:
        report = read_report(directory)
        assert report is not None
        return report.processes[0]

    def starts() -> int:
        return journal.read_text().count("judge start")

    clawstream("up")
    try:
        supervisor = running_supervisor(directory)
        assert supervisor is not None
        with judge().log_file.open("ab") as log:  # large enough to be rotated, and no space for the copy
            log.write(bytes(LARGEST_FILE_BYTES))
        disk.fill()
        first = judge().identity
        assert first is not None
        first.signal(signal.SIGKILL)
        wait_for(lambda: starts() == 2, "it is started again though nothing can be written down")
        assert supervisor.is_alive()
        assert judge().starts == 1, "the old report is whole"
        disk.free()
        wait_for(lambda: judge().starts == 2 and judge().state is ProcessState.READY, "it is written down")
        assert supervisor.is_alive()
        assert starts() == 2
        wait_for(lambda: judge().log_file.with_name("judge.log.1").exists(), "its log is rotated")
    finally:
        clawstream("down", "--now")
    chaos.counts.faults_survived += 1
