"""docker-compose.yml: valid by the compose specification, and every name in it exists in the code.

No Docker engine is needed here, and none of this says that the containers run.
"""

import importlib
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from clawstream.cli import app
from clawstream.settings import KafkaSettings, Section, load_settings
from clawstream.supervisor.settings import SystemSettings
from tests.unit.architecture.source_tree import ROOT

FILE = ROOT / "docker-compose.yml"
COMPOSE: dict[str, Any] = yaml.safe_load(FILE.read_text())
CONTAINERS: dict[str, dict[str, Any]] = COMPOSE["services"]
PROFILES = ("cpu", "gpu8")
OURS = sorted(name for name, container in CONTAINERS.items() if "build" in container)
LOOPS = sorted(name for name in OURS if name != "topics")
KEY_HASH = "0" * 64


def config_file(name: str) -> Path:
    """The repository's file that is mounted where the command expects its configuration."""
    container = CONTAINERS[name]
    wanted = container["command"][container["command"].index("--config") + 1]
    sources = [volume.split(":")[0] for volume in container["volumes"] if f":{wanted}:" in volume]
    assert len(sources) == 1, f"{name}: {wanted} is not mounted"
    return ROOT / sources[0]


def service_of(name: str) -> str:
    module = next(word for word in CONTAINERS[name]["command"] if word.startswith("services."))
    return module.split(".")[1]


def settings_model(service: str) -> type[Section]:
    module = importlib.import_module(f"services.{service}.settings")
    return getattr(module, f"{service.title()}Settings")


def environment_of(name: str) -> dict[str, str]:
    """As the container sees it, with the user's variables filled in."""
    values = CONTAINERS[name].get("environment", {})
    return {key: re.sub(r"\$\{[^}]*\}", KEY_HASH, str(value)) for key, value in values.items()}


def settings_of(name: str) -> Any:
    """The settings that the container's process would load."""
    command = CONTAINERS[name]["command"]
    return load_settings(
        settings_model(service_of(name)),
        section=service_of(name),
        file=config_file(name),
        process=command[command.index("--process") + 1],
        environment=environment_of(name),
    )


def names_on_the_network(profile: str) -> dict[str, str]:
    """Every host name of a profile to the container behind it."""
    found: dict[str, str] = {}
    for name, container in CONTAINERS.items():
        if profile in container["profiles"]:
            aliases = container.get("networks", {}).get("default", {}).get("aliases", [])
            found.update(dict.fromkeys([name, *aliases], name))
    return found


def test_it_follows_the_compose_specification(tmp_path: Path) -> None:
    from check_jsonschema import main  # Every process of a run imports this file, one runs this test.

    def check(file: Path) -> Result:
        return CliRunner().invoke(main, ["--builtin-schema", "vendor.compose-spec", str(file)])

    result = check(FILE)
    assert result.exit_code == 0, result.output
    broken = tmp_path / "docker-compose.yml"
    broken.write_text(FILE.read_text().replace("stop_grace_period", "stop_grace_time"))
    result = check(broken)
    assert result.exit_code == 1
    assert "stop_grace_time" in result.output


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_has_every_part_of_the_system(profile: str) -> None:
    parts = {"kafka", "topics", "engine-policy", "engine-judge", "gateway", "judge", "teacher", "trainer"}
    assert parts <= set(names_on_the_network(profile))


def test_dependencies_are_in_the_same_profile() -> None:
    for name, container in CONTAINERS.items():
        for other in container.get("depends_on", {}):
            assert set(container["profiles"]) <= set(CONTAINERS[other]["profiles"]), f"{name} needs {other}"


@pytest.mark.parametrize("name", LOOPS)
def test_commands_and_settings_exist(name: str) -> None:
    command = CONTAINERS[name]["command"]
    assert command[0] == "python"
    assert (ROOT / "services" / service_of(name) / "__main__.py").is_file()
    assert settings_of(name).name == command[command.index("--process") + 1]
    sections = set(tomllib.loads(config_file(name).read_text()))
    shared = set(SystemSettings.model_fields) | {"operations_host", "operations_port"}
    assert sections - shared <= {service_of(other) for other in LOOPS}


def test_the_command_that_makes_topics_exists() -> None:
    program, group, command = CONTAINERS["topics"]["command"]
    assert program == "clawstream"
    groups = {info.name: info.typer_instance for info in app.registered_groups}
    typer_instance = groups[group]
    assert typer_instance is not None
    assert command in {
        info.name or getattr(info.callback, "__name__", "") for info in typer_instance.registered_commands
    }


@pytest.mark.parametrize("name", OURS)
def test_every_variable_of_ours_is_a_setting(name: str) -> None:
    for variable in environment_of(name):
        if not variable.startswith("CLAWSTREAM_"):
            continue
        section, _, field = variable.removeprefix("CLAWSTREAM_").lower().partition("__")
        if name == "topics":
            assert section == "kafka"
            assert field in KafkaSettings.model_fields
        else:
            assert section == service_of(name)
            assert field in settings_model(section).model_fields


def test_every_path_of_the_repository_exists() -> None:
    for container in CONTAINERS.values():
        for volume in container.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (ROOT / source).is_file(), volume
            elif not source.startswith("${"):
                assert source in COMPOSE["volumes"], volume
    build = COMPOSE["x-ours"]["build"]
    dockerfile = (ROOT / build["dockerfile"]).read_text()
    copied = [path for line in re.findall(r"^COPY (.*) \S+$", dockerfile, re.MULTILINE) for path in line.split()]
    assert copied
    admitted = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for path in copied:
        assert (ROOT / path).exists(), path
        assert path in admitted, f"{path} is copied and ignored"
    extras = re.search(r"\.\[([\w,]+)\]", dockerfile)
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras is not None
    assert set(extras.group(1).split(",")) <= set(known)


def listens_on(name: str) -> set[int]:
    """Ports that the container's process binds."""
    container = CONTAINERS[name]
    if name == "kafka":
        return {int(port) for port in re.findall(r":(\d+)", container["environment"]["KAFKA_LISTENERS"])}
    if "command" in container and name in LOOPS:
        settings = settings_of(name)
        return {getattr(settings, field) for field in ("port", "operations_port") if hasattr(settings, field)}
    return {int(port) for word in container.get("command", []) for port in re.findall(r"^--port=(\d+)$", word)}


@pytest.mark.parametrize("profile", PROFILES)
def test_every_address_is_that_of_a_container_and_a_port_it_binds(profile: str) -> None:
    names = names_on_the_network(profile)
    text = (ROOT / "deploy" / "docker" / f"{profile}.toml").read_text()
    addresses = re.findall(r"(?:http://|\")([a-z][a-z-]*):(\d+)", text)
    assert len(addresses) == 3, "broker, policy engine, judge engine"
    targets = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    addresses += [
        tuple(target.split(":")) for job in targets for group in job["static_configs"] for target in group["targets"]
    ]
    for host, port in addresses:
        assert host in names, f"{host}:{port}"
        assert int(port) in listens_on(names[host]), f"{host}:{port}"


def test_published_ports_are_on_loopback_and_bound_inside() -> None:
    published = [(name, port) for name, container in CONTAINERS.items() for port in container.get("ports", [])]
    assert published
    for name, port in published:
        host, outside, inside = port.split(":")
        assert host == "127.0.0.1", f"{name} is open to the network"
        assert outside == inside
        if name not in ("prometheus", "grafana"):
            assert int(inside) in listens_on(name)


def test_healthchecks_ask_ports_that_are_bound() -> None:
    for name, container in CONTAINERS.items():
        if "monitoring" in container["profiles"] or name == "topics":
            continue
        port = re.search(r"127\.0\.0\.1:(\d+)", " ".join(container["healthcheck"]["test"]))
        assert port is not None
        assert int(port.group(1)) in listens_on(name), name


def test_images_are_pinned() -> None:
    images = {container["image"] for container in CONTAINERS.values()}
    assert all(re.search(r":v?\d+\.\d+\.\d+", image) for image in images), images
    pom = (ROOT / "deploy" / "kafka" / "pom.xml").read_text()
    assert f"<version>{CONTAINERS['kafka']['image'].split(':')[1]}</version>" in pom, "tests run another Kafka"


LAUNCHERS = sorted(name for name in LOOPS if "services.trainer.launch_ranks" in CONTAINERS[name]["command"])


@pytest.mark.parametrize("name", LAUNCHERS)
def test_ranks_get_the_time_that_their_container_gets(name: str) -> None:
    """Less would kill a step that Docker would have waited for; more, and Docker kills them unasked."""
    grace = re.fullmatch(r"(\d+)s", CONTAINERS[name]["stop_grace_period"])
    ranks = re.search(r"--stop-timeout-seconds=(\d+)", " ".join(CONTAINERS[name]["command"]))
    assert grace is not None
    assert ranks is not None, "the launcher's own default is that of a supervisor"
    assert 1 <= int(grace.group(1)) - int(ranks.group(1)) <= 10


def test_a_trainer_of_several_ranks_is_in_a_container() -> None:
    assert LAUNCHERS == ["trainer-gpu8"]


def test_gpus_are_used_once() -> None:
    reserved = [
        device
        for container in CONTAINERS.values()
        for entry in container.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
        for device in entry["device_ids"]
    ]
    assert sorted(reserved) == [str(number) for number in range(8)]
    ranks = next(word for word in CONTAINERS["trainer-gpu8"]["command"] if word.startswith("--ranks="))
    assert int(ranks.split("=")[1]) % settings_of("trainer-gpu8").tensor_parallel_size == 0
