"""pyproject, constraints, Makefile and CI fit together."""

import re
import runpy
import sys
import tomllib
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from clawstream.doctor.machine import EXTRA_MODULES
from tests.unit.architecture.source_tree import ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements() -> list[Requirement]:
    lines = [*PROJECT["dependencies"], *(line for extra in PROJECT["optional-dependencies"].values() for line in extra)]
    return [requirement for requirement in map(Requirement, lines) if requirement.name != "clawstream"]


def constraints() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line) for line in lines), "exact versions only"
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def test_every_dependency_is_pinned_to_a_version_it_allows() -> None:
    pinned = constraints()
    missing = [str(r) for r in requirements() if canonicalize_name(r.name) not in pinned]
    assert missing == []
    refused = [
        f"{r} but {pinned[canonicalize_name(r.name)]}"
        for r in requirements()
        if not r.specifier.contains(pinned[canonicalize_name(r.name)], prereleases=True)
    ]
    assert refused == []


def test_every_dependency_says_why() -> None:
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    declared = [line.strip() for line in lines if re.match(r'\s+"[A-Za-z][\w-]*(\[[\w,]+\])?[>=<~!; ].*",', line)]
    assert len(declared) > 30, "the pattern does not match the file any more"
    first_mention: dict[str, str] = {}
    for line in declared:
        first_mention.setdefault(Requirement(line.split('"')[1]).name, line)
    silent = [name for name, line in first_mention.items() if "#" not in line]
    assert silent == []


def test_the_doctor_knows_every_extra() -> None:
    assert set(EXTRA_MODULES) == set(PROJECT["optional-dependencies"]) - {"dev", "clients"}  # those are for tests


def test_the_command_exists(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert PROJECT["scripts"] == {"clawstream": "clawstream.cli:main"}
    monkeypatch.setattr(sys, "argv", ["clawstream", "--help"])
    with pytest.raises(SystemExit) as ended:  # what `python -m clawstream` does, without another interpreter
        runpy.run_module("clawstream", run_name="__main__")
    assert ended.value.code == 0
    said = capsys.readouterr().out
    for command in ("up", "down", "status", "logs", "doctor", "broker", "topics", "models"):
        assert re.search(rf"\b{command}\b", said), f"{command} is missing"


def test_ci_runs_the_readmes_own_test_command() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "\n$ make test\n" in readme
    assert "\nmake test\n" in (ROOT / ".ci" / "run").read_text()
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111, "it must be executable"


def test_agents_page_is_short_and_true() -> None:
    text = (ROOT / "AGENTS.md").read_text()
    assert len(text.splitlines()) < 110
    paths = re.findall(r"`((?:clawstream|schemas|services|deploy|tests|docs|examples)/[\w./-]*)`", text)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_pom_is_found_from_the_checkout_and_shipped_in_the_wheel() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert build["force-include"] == {"deploy/kafka": "clawstream/broker/deploy"}
    assert {file.name for file in (ROOT / "deploy" / "kafka").iterdir()} == {
        "pom.xml",
        "server.properties",
        "log4j2.properties",
    }
