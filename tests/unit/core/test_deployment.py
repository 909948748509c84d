"""A namespace belongs to the system that came first; another one is told both, and stays as it was."""

import uuid
from datetime import UTC, datetime
from pathlib import Path

import pytest

from clawstream.bus.memory import MemoryBus
from clawstream.cli import topics
from clawstream.deployment import FILE_NAME, claim_namespace
from clawstream.errors import NamespaceTaken
from clawstream.topics import TURNS
from tests.fixtures.conversations import create_topics

NOW = datetime(2026, 3, 1, tzinfo=UTC)


@pytest.fixture
def bus() -> MemoryBus:
    bus = MemoryBus()
    create_topics(bus)
    create_topics(bus, "other")
    return bus


def claim(bus: MemoryBus, directory: Path, *, namespace: str = "clawstream", joins: bool = False) -> str:
    return claim_namespace(
        bus, namespace, directory, host=f"host-of-{directory.name}", now=NOW, id_source=uuid.uuid4, joins=joins
    )


def test_the_first_to_come_owns_the_namespace_and_comes_again(bus: MemoryBus, tmp_path: Path) -> None:
    first = claim(bus, tmp_path / "a")
    assert claim(bus, tmp_path / "a") == first
    assert (tmp_path / "a" / FILE_NAME).read_text() == first


def test_another_system_is_refused_and_told_both(bus: MemoryBus, tmp_path: Path) -> None:
    first = claim(bus, tmp_path / "a")
    second = claim(bus, tmp_path / "b", namespace="other")
    assert second != first
    for name, is_known in (("b", True), ("c", False)):
        with pytest.raises(NamespaceTaken) as refused:
            claim(bus, tmp_path / name)
        for part in (tmp_path / "a", tmp_path / name, "host-of-a", f"host-of-{name}", first, "'clawstream'", "--join"):
            assert str(part) in str(refused.value)
        assert (tmp_path / name / FILE_NAME).exists() is is_known
    assert claim(bus, tmp_path / "b", namespace="other") == second, "where it belongs nothing has changed"
    assert claim(bus, tmp_path / "a") == first


def test_a_system_that_is_refused_leaves_the_other_ones_topics_as_they_are(
    bus: MemoryBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim(bus, tmp_path / "a")
    turns = f"clawstream.{TURNS}"
    admin = bus.admin()
    admin.alter_topic_config(turns, {"max.message.bytes": "12345"})
    config = tmp_path / "clawstream.toml"
    config.write_text('data_directory = "b"\n')
    monkeypatch.setattr(topics, "KafkaBus", lambda *_, **__: bus)  # pyright: ignore[reportUnknownLambdaType]
    with pytest.raises(NamespaceTaken):
        topics.apply(config, claim=True)
    assert admin.describe_topics([turns])[turns].config["max.message.bytes"] == "12345"
    topics.apply(config, join=True)
    assert admin.describe_topics([turns])[turns].config["max.message.bytes"] != "12345"


def test_a_data_directory_that_joins_belongs_to_that_system(bus: MemoryBus, tmp_path: Path) -> None:
    first = claim(bus, tmp_path / "a")
    assert claim(bus, tmp_path / "b", joins=True) == first
    assert claim(bus, tmp_path / "b") == first


def test_a_data_directory_claims_what_nobody_owns(bus: MemoryBus, tmp_path: Path) -> None:
    first = claim(bus, tmp_path / "a")
    assert claim(bus, tmp_path / "a", namespace="other", joins=True) == first


def test_a_claim_that_was_cut_off_is_finished(bus: MemoryBus, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / FILE_NAME).write_text("written before the claim")
    assert claim(bus, tmp_path / "a") == "written before the claim"
    with pytest.raises(NamespaceTaken):
        claim(bus, tmp_path / "b")
