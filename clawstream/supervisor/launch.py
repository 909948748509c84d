"""How a process is started and how its readiness shows. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from clawstream.supervisor.settings import ProcessSpecification, Service, SystemSettings

ENGINE_DEFAULT_PORT = 30000
"""SGLang's default, and our CPU engine's."""
_PASSIVE_SERVICES = frozenset({Service.ENGINE, Service.TRAINER})


@dataclass(frozen=True, slots=True)
class Launch:
    """A command and what it needs."""

    command: list[str]
    environment: dict[str, str]
    ready_url: str | None = None
    """Answers 200 when ready."""
    ready_file: Path | None = None
    """Exists when ready."""
    ready_log_pattern: str | None = None
    """A line of the log matches when ready."""
    ready_kafka: str | None = None
    """Bootstrap servers that list topics when ready."""
    metrics_url: str | None = None
    """Where Prometheus reads, if the process has an operations port."""
    addresses: dict[str, str] = field(default_factory=dict[str, str])
    """What people may want to call: name to URL."""


def plan_launch(
    process: ProcessSpecification,
    system: SystemSettings,
    document: Mapping[str, Any],
    *,
    config_file: Path,
    python: str,
    environment: Mapping[str, str],
    operations_port: int,
) -> Launch:
    """The launch of one process. `document` is the parsed TOML file, `operations_port` a free one."""
    merged = {**environment, **process.environment}
    if process.service in _PASSIVE_SERVICES:
        # OpenMP threads that spin while idle starve every other process of a small machine.
        merged.setdefault("OMP_WAIT_POLICY", "passive")
    command_line = [python, "-m", "clawstream"]
    config = ["--config", str(config_file)]
    match process.service:
        case Service.COMMAND:
            ready = process.ready
            return Launch(
                command=process.command,
                environment=merged,
                ready_url=ready.url if ready else None,
                ready_file=ready.file if ready else None,
                ready_log_pattern=ready.log_pattern if ready else None,
            )
        case Service.BROKER:
            return Launch(
                command=[*command_line, "broker", "run", *config],
                environment=merged,
                ready_kafka=system.kafka.bootstrap_servers,
            )
        case Service.TOPICS:
            return Launch(command=[*command_line, "topics", "apply", "--claim", *config], environment=merged)
        case Service.ENGINE | Service.GATEWAY | Service.JUDGE | Service.TEACHER | Service.TRAINER:
            return _service_launch(process, document, config, python, merged, operations_port)


def _service_launch(
    process: ProcessSpecification,
    document: Mapping[str, Any],
    config: list[str],
    python: str,
    environment: dict[str, str],
    operations_port: int,
) -> Launch:
    service = process.service.value
    command = [python, "-m", f"services.{service}", *config, "--process", process.name]
    if process.ranks > 1:
        timeout = f"--stop-timeout-seconds={process.stop_timeout_seconds:g}"
        launcher = [python, "-m", f"services.{service}.launch_ranks", f"--ranks={process.ranks}", timeout]
        command = [*launcher, *config, "--process", process.name]
    values = {**cast("Mapping[str, Any]", document.get(service, {})), **process.overrides}
    host = str(values.get("host", "127.0.0.1"))
    # A wildcard address binds everywhere; on this machine it is reached by loopback.
    host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    if process.service is Service.ENGINE:
        base = f"http://{host}:{values.get('port', ENGINE_DEFAULT_PORT)}"
        return Launch(command=command, environment=environment, ready_url=f"{base}/health", addresses={"engine": base})
    port = int(values.get("operations_port", 0)) or operations_port
    environment[f"CLAWSTREAM_{service.upper()}__OPERATIONS_PORT"] = str(port)
    base = f"http://127.0.0.1:{port}"
    addresses = {"operations": base}
    if process.service is Service.GATEWAY and "port" in values:
        addresses["openai"] = f"http://{host}:{values['port']}/v1"
    return Launch(
        command=command,
        environment=environment,
        ready_url=f"{base}/readyz",
        metrics_url=f"{base}/metrics",
        addresses=addresses,
    )
