"""What the supervisor reads from the TOML file: shared values and the list of processes."""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from clawstream.settings import ConfigPath, KafkaSettings, LogSettings, Section, load_settings


class Service(StrEnum):
    """What a process is."""

    BROKER = "broker"
    """Apache Kafka on this machine."""
    TOPICS = "topics"
    """Creates the topics and ends."""
    ENGINE = "engine"
    """The CPU inference engine."""
    GATEWAY = "gateway"
    """The OpenAI-compatible endpoint."""
    JUDGE = "judge"
    """Scores next states."""
    TEACHER = "teacher"
    """Assembles samples."""
    TRAINER = "trainer"
    """Updates the policy."""
    COMMAND = "command"
    """Any other program, for example SGLang."""


DEFAULT_DEPENDENCIES: Mapping[Service, frozenset[Service]] = {
    Service.BROKER: frozenset(),
    Service.TOPICS: frozenset({Service.BROKER}),
    Service.ENGINE: frozenset(),
    Service.GATEWAY: frozenset({Service.TOPICS, Service.ENGINE}),
    Service.JUDGE: frozenset({Service.TOPICS}),
    Service.TEACHER: frozenset({Service.TOPICS}),
    Service.TRAINER: frozenset({Service.TOPICS}),
    Service.COMMAND: frozenset(),
}
"""What must be ready before a process of this service starts, where `depends_on` does not say."""


class ReadySpecification(Section):
    """How to see that a process is ready. Exactly one of the fields is given."""

    url: str | None = None
    """Answers 200 when ready."""
    file: ConfigPath | None = None
    """Exists when ready. Removed by the supervisor before each start."""
    log_pattern: str | None = None
    """A regular expression that one line of the process's log matches when ready."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if sum(value is not None for value in (self.url, self.file, self.log_pattern)) != 1:
            raise ValueError("exactly one of url, file and log_pattern is needed")
        return self


class ProcessSpecification(Section):
    """One entry of `[[processes]]`."""

    name: str = Field(pattern=r"^[a-z][a-z0-9-]*$")
    """Name of the process and of its log file. Stable over restarts: client and transactional ids come from it."""
    service: Service
    """What it is."""
    overrides: dict[str, Any] = Field(default={})
    """Laid over the service's section for this process alone."""
    depends_on: list[str] | None = None
    """Names of processes that must be ready first. Without it, what the service usually needs."""
    command: list[str] = Field(default=[])
    """Program and arguments, for `service = "command"` only."""
    environment: dict[str, str] = Field(default={})
    """Further environment variables."""
    ranks: int = Field(default=1, ge=1)
    """Number of trainer ranks; more than one runs under `services.trainer.launch_ranks`."""
    ready: ReadySpecification | None = None
    """How to see that it is ready. Services know this by themselves; a command without it is ready once it runs."""
    ready_timeout_seconds: float = Field(default=300.0, gt=0)
    """After this time a process that is not ready is reported. It is not killed: it may be waiting for something."""
    stop_timeout_seconds: float = Field(default=30.0, gt=0)
    """Time between SIGTERM and SIGKILL."""
    restart: bool = True
    """Whether it is started again when it ends by itself."""

    @model_validator(mode="after")
    def _fields_fit_the_service(self) -> Self:
        if (self.service is Service.COMMAND) != bool(self.command):
            raise ValueError('a command is needed for service = "command" and for no other')
        if self.ranks > 1 and self.service is not Service.TRAINER:
            raise ValueError("only a trainer has ranks")
        return self

    @property
    def is_one_shot(self) -> bool:
        """Whether it is ready when it has ended with exit code 0."""
        return self.service is Service.TOPICS


class RestartSettings(Section):
    """When a process that ended is started again."""

    first_delay_seconds: float = Field(default=0.5, ge=0)
    """Delay before the first restart; doubles with every further one."""
    largest_delay_seconds: float = Field(default=30.0, ge=0)
    """The delay grows no further."""
    stable_seconds: float = Field(default=60.0, ge=0)
    """A process that ran so long is healthy: its failures are forgotten."""
    largest_failure_count: int = Field(default=8, ge=1)
    """With so many failures in a row it is crash-looping: reported, and not started again."""


class SystemSettings(Section):
    """The whole system as the supervisor and the command line see it."""

    name: str = "system"
    """Name in error messages."""
    policy: str = Field(default="default", pattern=r"^[a-z][a-z0-9-]*$")
    """The policy that this system trains and serves."""
    data_directory: ConfigPath = Path(".clawstream")
    """Where processes keep what must survive a restart."""
    kafka: KafkaSettings = KafkaSettings()
    """The log."""
    log: LogSettings = LogSettings()
    """Logging."""
    restart: RestartSettings = RestartSettings()
    """Restarts."""
    processes: list[ProcessSpecification] = Field(default=[])
    """What to run."""

    @model_validator(mode="after")
    def _processes_fit_together(self) -> Self:
        names = [process.name for process in self.processes]
        problems = [f"name {name!r} is used twice" for name in sorted({n for n in names if names.count(n) > 1})]
        for process in self.processes:
            problems += [
                f"{process.name} depends on {other!r}, which is not in [[processes]]"
                for other in process.depends_on or []
                if other not in names
            ]
        if sum(process.service is Service.BROKER for process in self.processes) > 1:
            problems.append("there is more than one broker; one node is all that runs here")
        if not problems:
            try:
                start_order(self.processes)
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def broker_directory(self) -> Path:
        """Where a broker on this machine keeps everything."""
        return self.data_directory / "kafka"

    @property
    def supervisor_directory(self) -> Path:
        """Lock, pid file and report of the supervisor."""
        return self.data_directory / "supervisor"

    @property
    def log_directory(self) -> Path:
        """One log file per process."""
        return self.data_directory / "logs"


def dependencies(process: ProcessSpecification, processes: list[ProcessSpecification]) -> frozenset[str]:
    """Names of the processes that must be ready before `process` starts."""
    if process.depends_on is not None:
        return frozenset(process.depends_on)
    needed = DEFAULT_DEPENDENCIES[process.service]
    if Service.TOPICS in needed and not any(other.service is Service.TOPICS for other in processes):
        needed = needed | {Service.BROKER}
    return frozenset(other.name for other in processes if other.service in needed and other.name != process.name)


def start_order(processes: list[ProcessSpecification]) -> list[str]:
    """Names, each after all that it depends on. Raises ValueError naming the members of a cycle."""
    waiting = {process.name: dependencies(process, processes) for process in processes}
    order: list[str] = []
    while waiting:
        free = [name for name, needed in waiting.items() if needed.isdisjoint(waiting)]
        if not free:
            raise ValueError(f"these processes wait for each other: {', '.join(sorted(waiting))}")
        order += free
        for name in free:
            del waiting[name]
    return order


def load_system_settings(file: Path | None, environment: Mapping[str, str]) -> SystemSettings:
    """The system's settings. Without a file, defaults and environment. Raises SettingsError with every mistake."""
    return load_settings(SystemSettings, section="system", file=file, environment=environment)
