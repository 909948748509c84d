"""The golden corpus: every example of every version ever written decodes for ever, every invalid one is refused.

`invalid-rule-*` breaks a rule across fields, which only the models check; every other `invalid-*` breaks the JSON
Schema too.
"""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from clawstream.codec import decode_value, encode, header
from clawstream.errors import DecodeError
from schemas.events import EVENT_MODELS, Event
from schemas.json_schema import json_schema, short_name

EXAMPLES = Path(__file__).parents[2] / "schemas" / "examples"
MODELS = {short_name(model): model for model in EVENT_MODELS.values()}
ALL_FILES = sorted(EXAMPLES.glob("*/*/*.json"))
VALID_FILES = [file for file in ALL_FILES if not file.name.startswith("invalid-")]
INVALID_FILES = [file for file in ALL_FILES if file.name.startswith("invalid-")]


def name_of(file: Path) -> str:
    return str(file.relative_to(EXAMPLES))


def model_of(file: Path) -> type[Event]:
    return MODELS[file.relative_to(EXAMPLES).parts[0]]


def validator_of(model: type[Event]) -> Any:
    return jsonschema.Draft202012Validator(json_schema(model))


@pytest.mark.parametrize("file", VALID_FILES, ids=name_of)
def test_valid_example_decodes_and_survives_a_round_trip(file: Path) -> None:
    model = model_of(file)
    event = decode_value(file.read_bytes(), model, where=name_of(file))
    record = encode(event, topic="clawstream.any.v1", key="key", event_id="id", source="tests")
    assert header(record.headers, "ce_type") == model.event_type
    assert record.value is not None
    assert decode_value(record.value, model, where=name_of(file)) == event


@pytest.mark.parametrize("file", VALID_FILES, ids=name_of)
def test_json_schema_accepts_the_example_and_what_the_model_writes(file: Path) -> None:
    model = model_of(file)
    validator_of(model).validate(json.loads(file.read_text()))
    event = decode_value(file.read_bytes(), model, where=name_of(file))
    validator_of(model).validate(event.model_dump(mode="json"))


@pytest.mark.parametrize("file", INVALID_FILES, ids=name_of)
def test_invalid_example_is_refused_by_the_model(file: Path) -> None:
    with pytest.raises(DecodeError, match=r"not a valid clawstream\."):
        decode_value(file.read_bytes(), model_of(file), where=name_of(file))


@pytest.mark.parametrize("file", INVALID_FILES, ids=name_of)
def test_json_schema_refuses_the_example_unless_only_a_rule_across_fields_is_broken(file: Path) -> None:
    accepted = validator_of(model_of(file)).is_valid(json.loads(file.read_text()))
    assert accepted == file.name.startswith("invalid-rule-")


@pytest.mark.parametrize("model", EVENT_MODELS.values(), ids=short_name)
def test_every_version_of_every_event_has_examples(model: type[Event]) -> None:
    for version in range(1, model.event_version + 1):
        folder = EXAMPLES / short_name(model) / str(version)
        names = [file.name for file in folder.glob("*.json")]
        assert len([name for name in names if not name.startswith("invalid-")]) >= 2, folder
        assert len([name for name in names if name.startswith("invalid-")]) >= 2, folder


def test_no_example_is_an_orphan() -> None:
    for file in EXAMPLES.rglob("*"):
        if file.is_dir():
            continue
        event, version, name = file.relative_to(EXAMPLES).parts
        assert event in MODELS, file
        assert 1 <= int(version) <= MODELS[event].event_version, file
        assert name.endswith(".json"), file


def test_values_that_are_no_events_are_refused_with_their_position() -> None:
    model = MODELS["weight-pointer"]
    for value in (b"", b"{", b"[]", b"null", b"\xff", b'"text"'):
        with pytest.raises(DecodeError, match=r"^here: "):
            decode_value(value, model, where="here")
