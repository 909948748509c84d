"""A process whose settings are wrong says so and ends with the code that a supervisor does not start again.

The engine's and the trainer's are in tests/numerics, and all five as real processes in tests/flow/supervisor.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clawstream.settings import EXIT_CODE_WRONG_SETTINGS
from services.gateway.__main__ import main as gateway
from services.judge.__main__ import main as judge
from services.teacher.__main__ import main as teacher


@pytest.mark.parametrize(("section", "main"), [("gateway", gateway), ("judge", judge), ("teacher", teacher)])
def test_wrong_settings_are_named_and_not_tried_again(
    section: str, main: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "clawstream.toml"
    file.write_text(f"[{section}]\nno_such_field = 1\n")
    with pytest.raises(SystemExit) as ended:
        main(config=file, process=None)
    assert ended.value.code == EXIT_CODE_WRONG_SETTINGS
    assert f"{section}.no_such_field" in capsys.readouterr().err
