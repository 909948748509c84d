"""Every service ends with the exit code that tells the supervisor not to start it again when its settings are wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

from clawstream.supervisor.managed_process import EXIT_CODE_WRONG_SETTINGS


def test_settings_that_prove_wrong_once_a_trainer_runs_end_it_for_good(tmp_path: Path) -> None:
    file = tmp_path / "clawstream.toml"
    file.write_text(f'data_directory = "data"\n[trainer]\nmodel = "{tmp_path}"\ntensor_parallel_size = 2\n')
    ended = subprocess.run(
        [sys.executable, "-m", "services.trainer", "--config", str(file)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == EXIT_CODE_WRONG_SETTINGS, ended.stderr
    assert "tensor_parallel_size=2 does not divide the 1 processes" in ended.stderr


@pytest.mark.parametrize("service", ["gateway", "judge", "teacher", "trainer", "engine"])
def test_wrong_settings_end_a_service_for_good_and_name_the_field(tmp_path: Path, service: str) -> None:
    file = tmp_path / "clawstream.toml"
    file.write_text(f'[{service}]\nname = 7\nno_such_setting = 1\n[[processes]]\nname = "it"\nservice = "{service}"\n')
    ended = subprocess.run(
        [sys.executable, "-m", f"services.{service}", "--config", str(file), "--process", "it"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == EXIT_CODE_WRONG_SETTINGS, ended.stderr
    assert "no_such_setting" in ended.stderr
    assert "Traceback" not in ended.stderr
