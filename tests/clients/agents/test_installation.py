"""What agents need of the machine itself."""

import sys
from pathlib import Path

import pytest

from tests.clients.agents.installation import python_up_to

pytestmark = pytest.mark.clients


def test_an_agent_that_cannot_be_installed_for_our_python_gets_an_older_one_or_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("PATH", str(tmp_path))
    ours = sys.version_info[:2]
    assert python_up_to("agent", None) == python_up_to("agent", ours) == sys.executable
    monkeypatch.setattr(sys, "version_info", (3, 14))
    with pytest.raises(pytest.skip.Exception, match=r"agent needs Python 3\.12 or older"):
        python_up_to("agent", (3, 12))
    for name in ("python3.13", "python3.11", "python3.12"):
        (tmp_path / name).touch(0o755)
    assert python_up_to("agent", (3, 12)) == str(tmp_path / "python3.12")
