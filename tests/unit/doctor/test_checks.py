"""What the doctor finds, each against a machine that has it and one that lacks it."""

import socket
import stat
from pathlib import Path

import pytest

from clawstream.broker.installation import find_java, parse_java_version, resolve_kafka_jars
from clawstream.doctor.finding import Verdict
from clawstream.doctor.machine import check_java, check_kafka_jars, check_memory
from clawstream.doctor.system import check_broker, check_settings, connection_problem
from clawstream.errors import MissingDependencyError
from clawstream.memory_need import MemoryNeed
from clawstream.process_identity import free_port
from clawstream.settings import KafkaSettings
from clawstream.supervisor.preflight import Preflight
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


GIBIBYTE = 1024**3


@pytest.mark.parametrize(
    ("available", "verdict", "remedy"),
    [(12, Verdict.OK, ""), (5, Verdict.NOTE, "may not fit under load"), (3, Verdict.MISSING, "will not fit")],
)
def test_memory_is_compared_with_what_the_processes_take(available: int, verdict: Verdict, remedy: str) -> None:
    needs = {"trainer": MemoryNeed(3 * GIBIBYTE, 5 * GIBIBYTE), "broker": MemoryNeed(GIBIBYTE)}
    finding = check_memory(needs, available_bytes=available * GIBIBYTE)
    assert finding.verdict is verdict
    assert remedy in finding.remedy
    assert (
        "about 4.0 from the start and at most 9.0 (the largest: trainer 3.0 to 8.0, broker 1.0 to 1.0)"
        in finding.detail
    )


def test_a_broker_that_up_would_start_is_not_missing(tmp_path: Path) -> None:
    closed = KafkaSettings(bootstrap_servers=f"127.0.0.1:{free_port()}")
    broker = ProcessSpecification(name="broker", service=Service.BROKER)
    (of_up,) = check_broker(SystemSettings(data_directory=tmp_path, kafka=closed, processes=[broker]))
    assert (of_up.verdict, of_up.remedy) == (Verdict.NOTE, "`clawstream up` starts it")
    (of_others,) = check_broker(SystemSettings(data_directory=tmp_path, kafka=closed))
    assert of_others.verdict is Verdict.MISSING


def test_the_doctor_names_what_up_would_refuse(tmp_path: Path) -> None:
    file = tmp_path / "clawstream.toml"
    file.write_text('[[processes]]\nname = "trainer"\nservice = "trainer"\n')
    findings = check_settings(Preflight(file, {}))
    assert [(finding.verdict, finding.detail) for finding in findings] == [
        (Verdict.MISSING, "trainer.model: Field required (trainer)")
    ]
