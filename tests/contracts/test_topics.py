"""Topics and events know each other, and the YAML files are strict."""

from importlib import resources
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from clawstream import topics
from clawstream.topics import TopicDefinition, topic_definitions
from schemas.events import EVENT_MODELS

DEFINITIONS = topic_definitions()
FILES = sorted((Path(__file__).parents[2] / "schemas" / "topics").glob("*.yaml"))
CONSTANTS = {
    value for name, value in vars(topics).items() if name.isupper() and isinstance(value, str) and value.endswith(".v1")
}
DEAD_LETTER_SOURCES = {
    topics.JUDGE_DLQ: topics.NEXT_STATES,
    topics.TEACHER_DLQ: topics.SCORES,
    topics.TRAINER_DLQ: topics.SAMPLES,
}


def test_every_topic_has_a_constant_and_every_constant_a_topic() -> None:
    assert set(DEFINITIONS) == CONSTANTS


def test_every_file_is_read_and_named_after_its_topic() -> None:
    assert len(FILES) == len(DEFINITIONS) == len(list(resources.files("schemas.topics").iterdir())) - _other_files()
    for file in FILES:
        topic = yaml.safe_load(file.read_text())["topic"]
        assert file.stem == topic.rsplit(".v", 1)[0].replace("-", "_").replace(".", "_")


def _other_files() -> int:
    return sum(not entry.name.endswith(".yaml") for entry in resources.files("schemas.topics").iterdir())


def test_events_of_topics_are_registered_and_every_event_is_on_exactly_one_topic() -> None:
    on_topics = [event for definition in DEFINITIONS.values() for event in definition.events]
    assert sorted(on_topics) == sorted(EVENT_MODELS)


def test_only_dead_letter_topics_have_no_events() -> None:
    assert {name for name, definition in DEFINITIONS.items() if not definition.events} == set(DEAD_LETTER_SOURCES)


@pytest.mark.parametrize(("dead_letters", "source"), DEAD_LETTER_SOURCES.items())
def test_dead_letter_topics_match_their_source(dead_letters: str, source: str) -> None:
    dead, live = DEFINITIONS[dead_letters], DEFINITIONS[source]
    assert dead.partitions == live.partitions
    assert dead.producers == [dead_letters.split(".")[0]]
    assert set(dead.producers) <= set(live.consumers)
    assert int(dead.config["max.message.bytes"]) >= int(live.config["max.message.bytes"]) + 65_536, (
        "a record that came in must fit into the dead-letter topic, with the headers that say why"
    )


@pytest.mark.parametrize("definition", DEFINITIONS.values(), ids=lambda definition: definition.topic)
def test_settings_follow_the_rules(definition: TopicDefinition) -> None:
    config = definition.config
    assert config["cleanup.policy"] in {"delete", "compact", "compact,delete"}
    assert config["compression.type"] == "producer"
    assert int(config["max.message.bytes"]) >= 2 * 1024 * 1024
    assert ("retention.ms" in config) == ("delete" in config["cleanup.policy"])
    assert definition.partitions == (1 if definition.partition_by == "none" else 12)
    if "compact" in config["cleanup.policy"]:
        assert "segment.ms" in config, "an active segment is never compacted: without a limit nothing ever is"


def test_session_keyed_topics_are_partitioned_alike() -> None:
    sizes = {d.partitions for d in DEFINITIONS.values() if d.partition_by in {"session_id", "original key"}}
    assert sizes == {12}


@pytest.mark.parametrize("wrong", ["partition", "aditional", "Topic", "retention"])
def test_a_misspelt_key_is_refused(wrong: str) -> None:
    document = yaml.safe_load(FILES[0].read_text())
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        TopicDefinition.model_validate({**document, wrong: 12})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("topic", "Turns.v1"),
        ("topic", "turns"),
        ("topic", "turns.v0"),
        ("description", "short"),
        ("partitions", 0),
        ("producers", []),
        ("consumers", []),
        ("config", {"retention.ms": None}),
    ],
)
def test_a_wrong_value_is_refused(field: str, value: object) -> None:
    document = yaml.safe_load(FILES[0].read_text())
    with pytest.raises(ValidationError, match=field):
        TopicDefinition.model_validate({**document, field: value})
