"""What a broker needs on this machine: Java, and Kafka's jars, which Maven fetches once."""

import fcntl
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clawstream.errors import MissingDependencyError

MINIMUM_JAVA_VERSION = 17
"""Kafka 4 needs it (KIP-1013)."""
_MAVEN_TIMEOUT_SECONDS = 600.0
_INSTALL_JAVA = (
    "Debian or Ubuntu: apt-get install openjdk-17-jre-headless; Fedora: dnf install java-17-openjdk-headless; "
    "macOS: brew install openjdk@17. Or set JAVA_HOME"
)
_INSTALL_MAVEN = "Debian or Ubuntu: apt-get install maven; Fedora: dnf install maven; macOS: brew install maven"


@dataclass(frozen=True, slots=True)
class Java:
    """A Java runtime."""

    executable: Path
    """The `java` program."""
    version: int
    """Feature version, for example 17."""


def deploy_directory() -> Path:
    """The folder with Kafka's pom.xml, server.properties and log4j2.properties: in the wheel, or in a checkout."""
    in_wheel = Path(__file__).parent / "deploy"
    in_checkout = Path(__file__).parents[2] / "deploy" / "kafka"
    for candidate in (in_wheel, in_checkout):
        if (candidate / "pom.xml").is_file():
            return candidate
    raise MissingDependencyError(
        f"Kafka's pom.xml is in neither {in_wheel} nor {in_checkout}; install clawstream again"
    )


def find_java(environment: Mapping[str, str]) -> Java:
    """`$JAVA_HOME/bin/java`, else the first `java` on the path.

    Raises MissingDependencyError when there is none, it does not run, or it is older than version 17.
    """
    home = environment.get("JAVA_HOME")
    found = str(Path(home) / "bin" / "java") if home else shutil.which("java", path=environment.get("PATH"))
    needed = f"Apache Kafka 4 needs Java {MINIMUM_JAVA_VERSION} or newer"
    if found is None or not Path(found).is_file():
        where = f"JAVA_HOME is {home}, which holds no bin/java" if home else "there is no java on the path"
        raise MissingDependencyError(f"{needed}, but {where}. {_INSTALL_JAVA}.")
    try:
        answer = subprocess.run([found, "-version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise MissingDependencyError(f"{needed}, but {found} does not run: {error}. {_INSTALL_JAVA}.") from error
    version = parse_java_version(answer.stderr + answer.stdout)
    if version is None or version < MINIMUM_JAVA_VERSION:
        raise MissingDependencyError(f"{needed}, but {found} is version {version or 'unknown'}. {_INSTALL_JAVA}.")
    return Java(executable=Path(found), version=version)


def parse_java_version(text: str) -> int | None:
    """The feature version in what `java -version` prints: 8 for `1.8.0_392`, 17 for `17.0.9`, 21 for `21-ea`."""
    match = re.search(r'version "(?:1\.)?(\d+)', text)
    return int(match.group(1)) if match else None


def cache_directory(environment: Mapping[str, str]) -> Path:
    """Where jars are kept: `$XDG_CACHE_HOME/clawstream`, else `~/.cache/clawstream`."""
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "clawstream"


def resolve_kafka_jars(environment: Mapping[str, str]) -> Path:
    """The folder with Kafka's jars. Maven fetches them the first time; later calls need neither Maven nor network.

    The folder is named after the content of pom.xml, so a new Kafka version gets a new one. It appears whole or not at
    all, and two processes that need it at once fetch it once.

    Raises MissingDependencyError when Maven is missing or fails.
    """
    pom = deploy_directory() / "pom.xml"
    digest = hashlib.sha256(pom.read_bytes()).hexdigest()[:12]
    cache = cache_directory(environment)
    jars = cache / f"kafka-{digest}"
    if jars.is_dir():
        return jars
    maven = shutil.which("mvn", path=environment.get("PATH"))
    if maven is None:
        raise MissingDependencyError(
            f"Apache Kafka is not in {cache} yet and Maven, which fetches it, is not on the path. {_INSTALL_MAVEN}."
        )
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"kafka-{digest}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not jars.is_dir():
            _fetch(maven, pom, jars, environment)
    return jars


def _fetch(maven: str, pom: Path, jars: Path, environment: Mapping[str, str]) -> None:
    with tempfile.TemporaryDirectory(dir=jars.parent, prefix="kafka-fetch-") as scratch:
        # Maven writes beside the pom that it is given: work on a copy, the original may be read-only.
        project = Path(scratch)
        shutil.copy(pom, project / "pom.xml")
        output = project / "jars"
        command = [maven, "-B", "-q", "dependency:copy-dependencies", f"-DoutputDirectory={output}"]
        try:
            result = subprocess.run(
                command,
                cwd=project,
                capture_output=True,
                text=True,
                timeout=_MAVEN_TIMEOUT_SECONDS,
                env=dict(environment),
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise MissingDependencyError(
                f"Maven did not fetch Kafka within {_MAVEN_TIMEOUT_SECONDS:.0f} seconds; is the network reachable?"
            ) from error
        if result.returncode != 0 or not output.is_dir():
            tail = "\n".join((result.stdout + result.stderr).strip().splitlines()[-15:])
            raise MissingDependencyError(f"Maven could not fetch Kafka (exit code {result.returncode}):\n{tail}")
        output.replace(jars)
