"""Settings: where values come from, which source wins, and every mistake named at once."""

from pathlib import Path

import pytest
from pydantic import Field

from clawstream.errors import SettingsError
from clawstream.settings import ConfigPath, ServiceSettings, load_settings


class ExampleSettings(ServiceSettings):
    """A service of these tests."""

    port: int = Field(default=8000, ge=1, le=65535)
    """A number."""
    artefacts: ConfigPath = Path("artefacts")
    """A path."""
    words: tuple[str, ...] = ()
    """A list."""


def write(folder: Path, text: str) -> Path:
    file = folder / "clawstream.toml"
    file.write_text(text)
    return file


def load(
    file: Path | None,
    *,
    process: str | None = None,
    overrides: dict[str, object] | None = None,
    **environment: str,
) -> ExampleSettings:
    return load_settings(
        ExampleSettings, section="example", file=file, process=process, environment=environment, overrides=overrides
    )


def test_defaults_need_no_file() -> None:
    settings = load(None)
    assert (settings.name, settings.port, settings.kafka.namespace) == ("example", 8000, "clawstream")


def test_later_sources_win(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """
        policy = "shared"
        [kafka]
        bootstrap_servers = "broker:1"
        namespace = "from-file"
        [example]
        port = 1
        [[processes]]
        name = "example-1"
        service = "example"
        overrides = { port = 2, kafka = { namespace = "from-process" } }
        """,
    )
    assert load(file).port == 1
    by_process = load(file, process="example-1")
    assert (by_process.name, by_process.port, by_process.policy) == ("example-1", 2, "shared")
    assert (by_process.kafka.bootstrap_servers, by_process.kafka.namespace) == ("broker:1", "from-process")
    by_environment = load(
        file,
        process="example-1",
        CLAWSTREAM_EXAMPLE__PORT="3",
        CLAWSTREAM_KAFKA__NAMESPACE="from-environment",
        CLAWSTREAM_POLICY="other",
        CLAWSTREAM_EXAMPLE__WORDS='["a", "b"]',
        UNRELATED="x",
    )
    assert (by_environment.port, by_environment.policy, by_environment.words) == (3, "other", ("a", "b"))
    assert (by_environment.kafka.bootstrap_servers, by_environment.kafka.namespace) == ("broker:1", "from-environment")
    assert load(file, overrides={"port": 4}, CLAWSTREAM_EXAMPLE__PORT="3").port == 4


def test_every_mistake_is_named_at_once(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """
        [kafka]
        namespace = "No Spaces"
        replication_factor = 0
        [example]
        port = 70000
        prot = 8000
        """,
    )
    with pytest.raises(SettingsError) as caught:
        load(file, CLAWSTREAM_LOG__LEVEL="loud")
    message = str(caught.value)
    assert "5 wrong value(s)" in message
    for field in ("kafka.namespace", "kafka.replication_factor", "example.port", "example.prot", "log.level"):
        assert field in message, message


def test_relative_paths_start_at_the_files_folder(tmp_path: Path) -> None:
    file = write(tmp_path, '[example]\nartefacts = "here/../there"\n')
    settings = load(file)
    assert settings.artefacts == tmp_path / "here/../there"
    assert settings.data_directory == tmp_path / ".clawstream"
    assert load(file, CLAWSTREAM_EXAMPLE__ARTEFACTS="/absolute").artefacts == Path("/absolute")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port = ", "not TOML"),
        ("example = 3", "must be a table"),
        ('[[processes]]\nname = "other"\nservice = "example"', "no entry named 'example-9'"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load(write(tmp_path, text), process="example-9")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"absent\.toml: no such file"):
        load(tmp_path / "absent.toml")


def test_paths_that_lead_upwards_are_told_without_detour(tmp_path: Path) -> None:
    folder = tmp_path / "real/examples"
    folder.mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder)
    write(folder, '[example]\nartefacts = "../models"\n')
    expected = (tmp_path / "real").resolve() / "models"
    assert load(folder / "clawstream.toml").artefacts == expected
    assert load(tmp_path / "link/clawstream.toml").artefacts == expected
