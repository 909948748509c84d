"""What can be evaluated: a model directory, an engine's address, or an OpenAI-compatible endpoint."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from clawstream.errors import SettingsError


class TargetKind(StrEnum):
    """How a target is reached."""

    DIRECTORY = "directory"
    """A Hugging Face directory, for example a published version: an engine is started for it."""
    ENGINE = "engine"
    """An engine that runs, by token ids (SGLang's API)."""
    ENDPOINT = "endpoint"
    """An OpenAI-compatible endpoint; its address ends in `/v1`."""


@dataclass(frozen=True, slots=True)
class Target:
    """Something that answers."""

    name: str
    """For tables."""
    kind: TargetKind
    place: str
    """Directory or address."""


def parse_target(text: str, *, default_name: str | None = None) -> Target:
    """`NAME=PLACE` or `PLACE`. Raises SettingsError for a directory without a model."""
    name, separator, place = text.partition("=")
    if not separator or "/" in name:
        name, place = "", text
    if place.startswith(("http://", "https://")):
        kind = TargetKind.ENDPOINT if place.rstrip("/").endswith("/v1") else TargetKind.ENGINE
        return Target(name or default_name or place.rstrip("/"), kind, place.rstrip("/"))
    directory = Path(place)
    if not (directory / "config.json").is_file():
        raise SettingsError(f"{place!r} is neither an address nor a model directory: {_what_it_lacks(directory)}")
    return Target(name or default_name or directory.resolve().name, TargetKind.DIRECTORY, str(directory))


def _what_it_lacks(directory: Path) -> str:
    if (directory / "adapter_config.json").is_file():
        return "it holds adapters, no whole model; name the address of an engine that serves them"
    if directory.is_dir():
        return "there is no config.json in it"
    beside = sorted(file.parent.name for file in directory.parent.glob("*/config.json"))
    if not beside:
        return "it does not exist"
    return (
        f"it does not exist, but beside it {', '.join(beside)}; of published versions only the newest stay "
        "(trainer.weights_keep)"
    )


def check_names(targets: list[Target]) -> None:
    """Raises SettingsError when two targets have one name."""
    names = [target.name for target in targets]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SettingsError(f"two targets are called {', '.join(twice)}: give names, NAME=PLACE")
