"""Everything that is wrong with a system's file, found before anything is started.

A process ends with an exit code when its settings are wrong. Told only then, one mistake after the other costs a start
each, and a system that half runs. The settings of the services are asked for by import path, as the services
themselves are started by name: the core imports none.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast

from clawstream.bus.kafka_properties import common
from clawstream.dependence import Provision
from clawstream.errors import SettingsError, WrongValues
from clawstream.import_path import import_callable
from clawstream.memory_need import MemoryNeed
from clawstream.process_identity import describe_port_owner, is_port_free
from clawstream.settings import ProcessSettings, ServiceSettings, load_settings, read_settings_file, unknown_key
from clawstream.supervisor.report import read_report, running_supervisor
from clawstream.supervisor.settings import Service, SystemSettings, load_system_settings

_SETTINGS: Final = MappingProxyType(
    {
        Service.ENGINE: "services.engine.settings:EngineSettings",
        Service.GATEWAY: "services.gateway.settings:GatewaySettings",
        Service.JUDGE: "services.judge.settings:JudgeSettings",
        Service.TEACHER: "services.teacher.settings:TeacherSettings",
        Service.TRAINER: "services.trainer.settings:TrainerSettings",
    }
)
_BROKER_BYTES: Final = 800 * 1024**2
"""Its heap is bounded (`clawstream.broker.local`); Java takes more beside it."""
_NOT_STARTED: Final = "; nothing was started"


def refuse_wrong_settings(file: Path, environment: Mapping[str, str]) -> SystemSettings:
    """The system's settings, when those of all its processes are right too. Raises WrongValues with every mistake."""
    preflight = Preflight(file, environment)
    if preflight.problems:
        raise WrongValues(file, preflight.problems, consequence=_NOT_STARTED)
    assert preflight.system is not None
    return preflight.system


class Preflight:
    """One look at a file: what each process would be started with, and what is wrong."""

    def __init__(self, file: Path, environment: Mapping[str, str]) -> None:
        """Raises SettingsError when the file is missing or is not TOML: then there is nothing else to say."""
        self._file = file
        self._environment = environment
        self._document = read_settings_file(file)
        self._found: dict[str, list[str]] = {}
        self.system: SystemSettings | None = None
        """None when its own settings are wrong."""
        self.processes: dict[str, ProcessSettings] = {}
        """Settings by the process's name, of those that are right."""
        self._models: dict[Service, type[ProcessSettings]] = {}
        try:
            self.system = load_system_settings(file, environment)
            common("", "", self.system.kafka.client_properties)
        except SettingsError as error:
            self._note(error, "")
        for name, service in self._declared():
            self._examine(name, service)
        self._note_all(self._unknown_keys(), "")
        if self.system is not None:
            self._note_all(self._port_problems(self.system), "")
        self._note_disagreements()

    @property
    def problems(self) -> list[str]:
        """Each mistake once, with the processes that have it."""
        return [f"{problem} ({', '.join(names)})" if all(names) else problem for problem, names in self._found.items()]

    def memory_needs(self) -> dict[str, MemoryNeed]:
        """About what each process takes, by its name. Programs that are not ours are not known."""
        needs = {name: settings.memory_need() for name, settings in self.processes.items()}
        for process in self.system.processes if self.system is not None else []:
            if process.service is Service.BROKER:
                needs[process.name] = MemoryNeed(_BROKER_BYTES)
            elif process.ranks > 1 and process.name in needs:
                rank = needs[process.name]
                needs[process.name] = MemoryNeed(rank.fixed_bytes * process.ranks, rank.working_bytes * process.ranks)
        return needs

    def _declared(self) -> Iterator[tuple[str, Service]]:
        """Processes with settings of their own, also of a file with other mistakes."""
        entries = self._document.get("processes")
        for entry in cast("list[Any]", entries) if isinstance(entries, list) else []:
            values = cast("Mapping[str, Any]", entry if isinstance(entry, dict) else {})
            name, service = values.get("name"), values.get("service")
            if isinstance(name, str) and service in set(_SETTINGS):
                yield name, Service(cast("str", service))

    def _examine(self, name: str, service: Service) -> None:
        try:
            model = self._model(service)
            settings = load_settings(
                model, section=service.value, file=self._file, process=name, environment=self._environment
            )
        except SettingsError as error:
            self._note(error, name)
            return
        self.processes[name] = settings
        self._note_all([f"{service.value}.{each}" for each in settings.problems(self._environment)], name)

    def _model(self, service: Service) -> type[ProcessSettings]:
        """Raises SettingsError when the service's packages are not installed."""
        if service not in self._models:
            what = f"{service.value}: pip install 'clawstream[{service.value}]'; its settings"
            self._models[service] = cast("type[ProcessSettings]", import_callable(_SETTINGS[service], what))
        return self._models[service]

    def _unknown_keys(self) -> Iterator[str]:
        """Keys at the top that nobody would read: a section's name with a letter too many is silent otherwise."""
        known = {*SystemSettings.model_fields, *ServiceSettings.model_fields, *(service.value for service in Service)}
        known |= {field for model in self._models.values() for field in model.model_fields}
        for key in sorted(self._document.keys() - known):
            yield f"{key}: {unknown_key(key, known)}"

    def _port_problems(self, system: SystemSettings) -> Iterator[str]:
        """Ports that two processes want, or that are taken. While our supervisor or what it left runs they are ours."""
        report = read_report(system.supervisor_directory)
        left = [process.identity for process in report.processes if process.identity] if report else []
        are_ours = running_supervisor(system.supervisor_directory) is not None or any(each.is_alive() for each in left)
        services = dict(self._declared())
        users: dict[int, str] = {}
        for name, settings in self.processes.items():
            for field in ("port", "operations_port"):
                port = getattr(settings, field, 0)
                place = f"{services[name].value}.{field}"
                if not port:
                    continue
                if port in users:
                    yield f"{place}: {port} is wanted by {users[port]} and by {name}; give one another in its overrides"
                elif not are_ours and not is_port_free(port):
                    yield f"{place}: {port}, wanted by {name}, is taken by {describe_port_owner(port)}"
                users.setdefault(port, name)

    def _note_disagreements(self) -> None:
        """What a process needs of a service that runs here, when no process of it makes it.

        Of a service that runs elsewhere, or whose settings are wrong themselves, nothing is known.
        """
        services = dict(self._declared())
        made: dict[str, set[Provision]] = {}
        for name, service in services.items():
            made.setdefault(service.value, set()).update(
                self.processes[name].provides() if name in self.processes else Provision
            )
        for name, settings in self.processes.items():
            for dependence in settings.depends_on():
                if dependence.provision not in made.get(dependence.service, Provision):
                    self._note_all([f"{services[name].value}.{dependence.problem}"], name)

    def _note(self, error: SettingsError, name: str) -> None:
        self._note_all(error.problems if isinstance(error, WrongValues) else [str(error)], name)

    def _note_all(self, problems: Iterator[str] | list[str] | tuple[str, ...], name: str) -> None:
        for problem in problems:
            names = self._found.setdefault(problem, [])
            if name not in names:
                names.append(name)
