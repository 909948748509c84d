"""What the doctor finds, each against a machine that has it and one that lacks it."""

import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from clawstream.broker.installation import find_java, parse_java_version, resolve_kafka_jars
from clawstream.doctor.finding import Verdict
from clawstream.doctor.machine import check_java, check_kafka_jars
from clawstream.doctor.system import check_models, check_ports, connection_problem
from clawstream.errors import MissingDependencyError
from clawstream.supervisor.settings import ProcessSpecification, Service, SystemSettings


def fake_java(directory: Path, version_line: str) -> dict[str, str]:
    """An environment whose only java prints this."""
    program = directory / "java"
    program.write_text(f"#!/bin/sh\necho '{version_line}' >&2\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return {"PATH": f"{directory}:/usr/bin:/bin"}


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_392"', 8),
        ('openjdk version "21-ea" 2023-09-19', 21),
        ("no java here", None),
    ],
)
def test_java_versions(text: str, version: int | None) -> None:
    assert parse_java_version(text) == version


def test_old_missing_and_good_java(tmp_path: Path) -> None:
    with pytest.raises(MissingDependencyError, match=r"newer, but .*java is version 11.*apt-get install"):
        find_java(fake_java(tmp_path, 'openjdk version "11.0.2"'))
    with pytest.raises(MissingDependencyError, match="no java on the path"):
        find_java({"PATH": str(tmp_path / "empty")})
    with pytest.raises(MissingDependencyError, match=r"JAVA_HOME is .*which holds no bin/java"):
        find_java({"JAVA_HOME": str(tmp_path)})
    environment = fake_java(tmp_path, 'openjdk version "21.0.1"')
    assert find_java(environment).version == 21
    assert check_java(environment).verdict is Verdict.OK
    missing = check_java({"PATH": ""})
    assert missing.verdict is Verdict.MISSING
    assert "apt-get install openjdk" in missing.remedy


def test_without_maven_the_message_says_how_to_get_it(tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    with pytest.raises(MissingDependencyError, match="Maven, which fetches it, is not on the path"):
        resolve_kafka_jars(environment)
    assert "install maven" in check_kafka_jars(environment).remedy


def test_a_failing_maven_leaves_nothing_and_shows_what_it_said(tmp_path: Path) -> None:
    maven = tmp_path / "mvn"
    maven.write_text("#!/bin/sh\necho 'Could not transfer artifact'\nexit 1\n")
    maven.chmod(0o755)
    cache = tmp_path / "cache"
    with pytest.raises(MissingDependencyError, match=r"exit code 1\):\nCould not transfer artifact"):
        resolve_kafka_jars({"PATH": f"{tmp_path}:/bin:/usr/bin", "XDG_CACHE_HOME": str(cache)})
    assert [path.suffix for path in (cache / "clawstream").iterdir()] == [".lock"]


def test_connection_problems_are_named() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert connection_problem(address) == "Connection refused"
        listener.listen()
        assert connection_problem(address) is None
    assert connection_problem("nonsense") == "not host:port"


def system(tmp_path: Path, *processes: ProcessSpecification) -> SystemSettings:
    return SystemSettings(data_directory=tmp_path, processes=list(processes))


def test_ports_taken_and_wanted_twice(tmp_path: Path) -> None:
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        port = squatter.getsockname()[1]
        both = system(
            tmp_path,
            ProcessSpecification(name="gateway", service=Service.GATEWAY),
            ProcessSpecification(name="gateway-2", service=Service.GATEWAY),
        )
        details = [finding.detail for finding in check_ports(both, {"gateway": {"port": port}})]
    assert len(details) == 2
    assert details[0].startswith(f"{port}, wanted by gateway, is taken by pid ")
    assert details[1] == f"{port} is wanted by gateway and by gateway-2"


def test_models_of_every_section(tmp_path: Path) -> None:
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "config.json").touch()
    document: dict[str, Any] = {
        "engine": {"model_path": "good"},
        "trainer": {"model": "absent"},
        "judge": {"model": {"directory": "judge-model"}},
    }
    processes = [
        ProcessSpecification(name=s.value, service=s) for s in (Service.ENGINE, Service.TRAINER, Service.JUDGE)
    ]
    findings = check_models(system(tmp_path, *processes), document, tmp_path)
    assert [(finding.verdict, finding.detail.split("/")[-1]) for finding in findings] == [
        (Verdict.OK, "good"),
        (Verdict.MISSING, "absent holds no config.json"),
        (Verdict.MISSING, "judge-model holds no config.json"),
    ]
    assert "or correct trainer.model" in findings[1].remedy
    assert "or correct judge.model.directory" in findings[2].remedy
