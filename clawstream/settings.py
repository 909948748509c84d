"""Settings: one TOML file for the whole system, environment variables on top, every mistake named at once.

    policy = "default"              # top-level values are shared by all processes
    data_directory = ".clawstream"

    [kafka]                         # shared too
    bootstrap_servers = "127.0.0.1:9092"

    [gateway]                       # one section per service
    port = 8000

    [[processes]]                   # what the supervisor runs; overrides apply to that process alone
    name = "gateway-1"
    service = "gateway"
    overrides = { port = 8001 }

`CLAWSTREAM_GATEWAY__PORT=9000` overrides `gateway.port`, `CLAWSTREAM_KAFKA__NAMESPACE=x` overrides `kafka.namespace`,
`CLAWSTREAM_POLICY=x` overrides the top-level value. Values of environment variables are read as TOML, else as text.
Relative paths are relative to the folder of the TOML file.
"""

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, cast, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo
from pydantic_core import ErrorDetails

from clawstream.dependence import Dependence, Provision
from clawstream.errors import SettingsError, WrongValues
from clawstream.memory_need import PROCESS_BYTES, MemoryNeed

_ENVIRONMENT_PREFIX = "CLAWSTREAM_"


def _relative_to_file(path: Path, info: ValidationInfo) -> Path:
    base = cast("Mapping[str, Path]", info.context or {}).get("base_directory")
    if path.is_absolute() or base is None:
        return path
    parts = path.parts
    while parts and parts[0] == "..":  # the base holds no symbolic link, so its parent is what `..` means
        base, parts = base.parent, parts[1:]
    return base.joinpath(*parts)


ConfigPath = Annotated[Path, AfterValidator(_relative_to_file)]
"""A path in the TOML file: relative ones start at the file's folder."""


class _HoldsModel:
    """Marks a path whose content is looked at before a process starts."""


ModelDirectory = Annotated[Path, AfterValidator(_relative_to_file), _HoldsModel()]
"""As `ConfigPath`: a model in Hugging Face's form, which must be there when its process starts."""


class Section(BaseModel):
    """A part of the settings. Unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)


EXIT_CODE_WRONG_SETTINGS: Final = 2
"""Of a process whose settings are wrong. Tells the supervisor that starting it again would not help."""


class EncryptionSettings(Section):
    """Content on the log, encrypted per session. The same for all processes of a system."""

    sessions: bool = False
    """Whether what is said, and what follows from it, is written encrypted under a key of its session. Reading needs no
    setting: what is encrypted is decrypted wherever its key is."""
    master_key_file: ConfigPath | None = None
    """File with base64 of 32 bytes that wrap the sessions' keys; else CLAWSTREAM_MASTER_KEY in the environment. Several
    lines are several keys, the newest last (docs/encryption.md: changing the master key). Without either the sessions'
    keys stand on the log as they are: then `clawstream forget` works, but the log keeps no secret."""


class KafkaSettings(Section):
    """How to reach the log."""

    bootstrap_servers: str = "127.0.0.1:9092"
    """Comma-separated host:port."""
    namespace: str = Field(default="clawstream", pattern=r"^[a-z][a-z0-9-]*$")
    """First part of every topic, group and transactional id. Belongs to one system (docs/exactly-once.md)."""
    replication_factor: int = Field(default=1, ge=1)
    """Of topics that `clawstream topics apply` creates."""
    missing_records: str = Field(default="stop", pattern=r"^(stop|continue)$")
    """What a consumer group does when retention removed records that it had not read: stop, or continue from the
    earliest that is left. Both name the lost range in the log."""
    client_properties: dict[str, str] = {}
    """Further librdkafka properties, for example for SASL. They cannot override what exactly-once rests on."""
    encryption: EncryptionSettings = EncryptionSettings()
    """Content encrypted per session."""


class LogSettings(Section):
    """How a process logs to standard error."""

    level: str = Field(default="info", pattern=r"^(debug|info|warning|error)$")
    """Lowest level that is written."""
    json_lines: bool = False
    """JSON, one object a line, instead of text for people."""


class ProcessSettings(Section):
    """Settings of one process."""

    def problems(self, environment: Mapping[str, str]) -> list[str]:
        """What keeps a process with these values from working on this machine, each as `field: what, and what to do`.

        It is asked before anything is started, so it answers within milliseconds, without torch and without network.
        """
        return [
            f"{field}: {directory} {problem}"
            for field, directory in _model_directories(self)
            if (problem := _model_problem(directory)) is not None
        ]

    def provides(self) -> frozenset[Provision]:
        """What the process makes that others may depend on."""
        return frozenset()

    def depends_on(self) -> list[Dependence]:
        """What the process needs others to make."""
        return []

    def memory_need(self) -> MemoryNeed:
        """About how much memory the process takes with these values."""
        return MemoryNeed(PROCESS_BYTES)


def _model_directories(section: Section, prefix: str = "") -> Iterator[tuple[str, Path]]:
    """The fields that name a model's folder, with their dotted names."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _model_directories(value, f"{prefix}{name}.")
        marks = [*field.metadata, *(mark for each in get_args(field.annotation) for mark in get_args(each)[1:])]
        if isinstance(value, Path) and any(isinstance(mark, _HoldsModel) for mark in marks):
            yield f"{prefix}{name}", value


def _model_problem(directory: Path) -> str | None:
    """Why a folder holds no model, or None."""
    if not directory.is_dir():
        return "is no folder; fetch a model (`clawstream models fetch`), or correct the path"
    file = directory / "config.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "holds no config.json, so it is no model in Hugging Face's form"
    except (OSError, ValueError) as error:
        return f"holds a config.json that cannot be read: {error}"
    return None if isinstance(content, dict) else "holds a config.json that is no JSON object"


class ServiceSettings(ProcessSettings):
    """What every process has."""

    name: str = Field(pattern=r"^[a-z][a-z0-9-]*$")
    """Name of this process: the stem of its client, group-instance and transactional ids. Stable over restarts."""
    policy: str = Field(default="default", pattern=r"^[a-z][a-z0-9-]*$")
    """The policy that this system trains and serves."""
    data_directory: ConfigPath = Path(".clawstream")
    """Where processes keep what must survive a restart."""
    kafka: KafkaSettings = KafkaSettings()
    """The log."""
    log: LogSettings = LogSettings()
    """Logging."""
    operations_host: str = "127.0.0.1"
    """Address of the operations port."""
    operations_port: int = Field(default=0, ge=0, le=65535)
    """Serves /healthz, /readyz, /status and /metrics; 0 picks a free one."""


SettingsType = TypeVar("SettingsType", bound=Section)


def load_settings(
    model: type[SettingsType],
    *,
    section: str,
    file: Path | None,
    process: str | None = None,
    environment: Mapping[str, str],
    overrides: Mapping[str, Any] | None = None,
) -> SettingsType:
    """Settings of one process.

    Later sources win: top-level values and shared sections, the service's `section`, the overrides of the entry
    `process` in `[[processes]]`, the environment, `overrides`. Without a `file`, defaults and environment decide.

    Raises SettingsError with every wrong field.
    """
    document = read_settings_file(file) if file is not None else {}
    values = _values_for(model, document, section)
    own = _table(document, section, file)
    shared = values.keys() - own.keys()
    values.update(own)
    if process is not None:
        values["name"] = process
        values = _merged(values, _process_overrides(document, process, file))
    values = _merged(values, _from_environment(model, section, environment))
    values = _merged(values, overrides or {})
    values.setdefault("name", section)
    base_directory = file.resolve().parent if file is not None else Path.cwd()
    try:
        return model.model_validate(values, context={"base_directory": base_directory})
    except ValidationError as error:
        problems = [_problem(model, section, shared, values, each) for each in error.errors(include_url=False)]
        raise WrongValues(file, problems) from error


def _problem(
    model: type[Section], section: str, shared: Set[str], values: Mapping[str, Any], error: ErrorDetails
) -> str:
    """A value that all sections share is named as it stands in the file: at the top. Of a list's entry that has a name
    this is told, too: nobody counts entries.
    """
    place = ".".join(str(part) for part in error["loc"])
    if (name := _name_at(values, error["loc"])) is not None:
        place = f"{place} ({name})"
    is_shared = bool(error["loc"]) and error["loc"][0] in shared
    told = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        told = unknown_key(str(error["loc"][-1]), _fields_beside(model, error["loc"]))
    return f"{place if is_shared else f'{section}.{place}'.rstrip('.')}: {told}"


def _name_of(entry: object) -> str | None:
    name = cast("dict[str, object]", entry).get("name") if isinstance(entry, dict) else None
    return name if isinstance(name, str) else None


def _name_at(values: Mapping[str, Any], place: Sequence[int | str]) -> str | None:
    """The name of the innermost entry of a list that the place leads through; None without one."""
    found: str | None = None
    value = cast("Any", values)
    for part in place:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):  # a field that is missing, or something else than its section
            break
        if isinstance(part, int):
            found = _name_of(value)
    return found


def unknown_key(key: str, known: Iterable[str]) -> str:
    """What is wrong with a key that has no field, and which of the known ones may be meant."""
    near = get_close_matches(key, sorted(known), n=1)
    return "nothing reads it" + (f"; is {near[0]} meant?" if near else "")


def _fields_beside(model: type[Section], place: Sequence[int | str]) -> Set[str]:
    """Fields of the section in which the last part of the place stands; none where several sections are possible."""
    for part in place[:-1]:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        sections = [
            each for each in (annotation, *get_args(annotation)) if isinstance(each, type) and issubclass(each, Section)
        ]
        if len(sections) != 1:
            return frozenset()
        model = sections[0]
    return model.model_fields.keys()


def read_settings_file(file: Path) -> dict[str, Any]:
    """The parsed TOML file. Raises SettingsError when it is missing or malformed."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SettingsError(f"{file}: no such file; give --config or run in the folder that holds it") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file}: not TOML: {error}") from error


def _values_for(model: type[Section], document: Mapping[str, Any], section: str) -> dict[str, Any]:
    """Top-level values of the file that the model has a field for; the service's own section is merged later."""
    return {key: value for key, value in document.items() if key in model.model_fields and key != section}


def _table(document: Mapping[str, Any], section: str, file: Path | None) -> dict[str, Any]:
    table = document.get(section, {})
    if not isinstance(table, dict):
        raise SettingsError(f"{file}: {section} must be a table")
    return dict(cast("dict[str, Any]", table))


def _process_overrides(document: Mapping[str, Any], process: str, file: Path | None) -> dict[str, Any]:
    for entry in cast("list[dict[str, Any]]", document.get("processes", [])):
        if entry.get("name") == process:
            return dict(entry.get("overrides", {}))
    if file is None or not document.get("processes"):
        return {}
    raise SettingsError(f"{file}: no entry named {process!r} in [[processes]]")


def _from_environment(model: type[Section], section: str, environment: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, text in sorted(environment.items()):
        if not name.startswith(_ENVIRONMENT_PREFIX):
            continue
        path = name.removeprefix(_ENVIRONMENT_PREFIX).lower().split("__")
        if path[0] == section:
            path = path[1:]
        if not path or path[0] not in model.model_fields:
            continue
        target = found
        for part in path[:-1]:
            target = cast("dict[str, Any]", target.setdefault(part, {}))
        target[path[-1]] = _toml_value(text)
    return found


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid over `base`, table by table."""
    result = dict(base)
    for key, value in over.items():
        before = result.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            result[key] = _merged(cast("Mapping[str, Any]", before), cast("Mapping[str, Any]", value))
        else:
            result[key] = value
    return result
