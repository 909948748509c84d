"""The committed JSON Schemas are those of the models, and none breaks what was released."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.compatibility import incompatibilities
from schemas.events import EVENT_MODELS, Event
from schemas.generate import main as generate
from schemas.json_schema import json_schema, rendered_schemas, short_name

SCHEMAS = Path(__file__).parents[2] / "schemas"


def test_committed_schemas_are_those_of_the_models() -> None:
    committed = {file.name: file.read_text(encoding="utf-8") for file in (SCHEMAS / "json").iterdir()}
    rendered = rendered_schemas()
    assert sorted(committed) == sorted(rendered), "orphan or missing schema: run python -m schemas.generate"
    for name, content in rendered.items():
        assert committed[name] == content, f"{name} differs from its model: run python -m schemas.generate"


def test_generate_changes_nothing_when_all_is_committed(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate([]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("file", sorted((SCHEMAS / "released").iterdir()), ids=lambda file: file.name)
def test_every_released_version_can_still_be_read(file: Path) -> None:
    models = {short_name(model): model for model in EVENT_MODELS.values()}
    name, version = file.name.removesuffix(".schema.json").split(".v")
    assert name in models, f"{file.name} was released, but no model reads it any more"
    assert 1 <= int(version) <= models[name].event_version
    assert incompatibilities(json.loads(file.read_text(encoding="utf-8")), json_schema(models[name])) == []


@pytest.mark.parametrize("model", EVENT_MODELS.values(), ids=short_name)
def test_every_field_says_what_it_is(model: type[Event]) -> None:
    schema = json_schema(model)
    parts = [schema, *(part for part in schema.get("$defs", {}).values() if "properties" in part)]
    silent = [
        f"{part['title']}.{name}"
        for part in parts
        for name, field in part["properties"].items()
        if not field.get("description")
    ]
    assert silent == []


BASE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "minLength": 1},
        "count": {"type": "integer", "minimum": 0},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "kind": {"$ref": "#/$defs/Kind"},
        "parts": {"type": "array", "items": {"$ref": "#/$defs/Part"}},
        "numbers": {"type": "object", "additionalProperties": {"type": "integer"}},
        "anything": {},
    },
    "required": ["id", "count"],
    "$defs": {
        "Kind": {"type": "string", "enum": ["a", "b"]},
        "Part": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "inner": {"$ref": "#/$defs/Part"}},
            "required": ["x"],
        },
    },
}


def changed(**values: Any) -> dict[str, Any]:
    """BASE with the values at these paths (parts joined by two underscores) replaced; None removes."""
    document = json.loads(json.dumps(BASE))
    for path, value in values.items():
        *parents, last = path.split("__")
        target = document
        for parent in parents:
            target = target["$defs" if parent == "defs" else parent]
        if value is None:
            del target[last]
        else:
            target[last] = value
    return document


@pytest.mark.parametrize(
    ("new", "problem"),
    [
        (changed(properties__note=None), "event.note: field removed"),
        (changed(required=["id", "count", "note"]), "event.note: required now, could be absent before"),
        (
            {**changed(), "properties": {**BASE["properties"], "fresh": {"type": "string"}}, "required": ["fresh"]},
            "event.fresh: required now, could be absent before",
        ),
        (changed(properties__count={"type": "string"}), "event.count: type changed from integer to string"),
        (changed(defs__Kind__enum=["a"]), "event.kind: no longer allows ['b']"),
        (changed(properties__id={"type": "string", "enum": ["x"]}), "event.id: restricted to ['x'] now"),
        (changed(properties__note={"type": "string"}), "event.note: type changed from null to string"),
        (changed(properties__count__minimum=1), "event.count: minimum raised from 0 to 1"),
        (changed(properties__count__maximum=9), "event.count: maximum lowered from none to 9"),
        (changed(properties__id__pattern="^x"), "event.id: pattern changed from none to ^x"),
        (changed(properties__anything={"type": "string"}), "event.anything: type changed from anything to string"),
        (
            changed(defs__Part__properties__x={"type": "integer"}),
            "event.parts[].x: type changed from number to integer",
        ),
        (changed(defs__Part__required=["x", "inner"]), "event.parts[].inner: required now, could be absent before"),
        (
            changed(properties__numbers__additionalProperties={"type": "string"}),
            "event.numbers.*: type changed from integer to string",
        ),
        ({**changed(), "additionalProperties": False}, "event: unknown fields are refused now"),
    ],
)
def test_incompatible_changes_are_found(new: dict[str, Any], problem: str) -> None:
    assert incompatibilities(BASE, new) == [problem]


@pytest.mark.parametrize(
    "new",
    [
        BASE,
        changed(required=["id"]),
        changed(properties__count__minimum=None),
        changed(properties__count={"type": "number"}),
        changed(defs__Kind__enum=["a", "b", "c"]),
        changed(properties__count={"anyOf": [{"type": "integer"}, {"type": "null"}]}),
        {**changed(), "properties": {**BASE["properties"], "fresh": {"type": "string", "default": ""}}},
        changed(properties__id__description="another text"),
        changed(properties__id={}),
    ],
)
def test_compatible_changes_pass(new: dict[str, Any]) -> None:
    assert incompatibilities(BASE, new) == []


@given(
    st.sampled_from(sorted(EVENT_MODELS)),
    st.data(),
)
def test_any_new_required_field_of_any_event_is_found(event_type: str, data: st.DataObject) -> None:
    new = json_schema(EVENT_MODELS[event_type])
    old = json.loads(json.dumps(new))
    field = data.draw(st.sampled_from(new["required"]))
    old["required"].remove(field)
    assert incompatibilities(old, new) == [f"event.{field}: required now, could be absent before"]
