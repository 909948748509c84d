"""Whether a reader with a new schema can read everything that was written under an old one.

Events live as long as their topic is retained, and replay reads all of it with the newest code, so every new version
must read every old one (backward-transitive compatibility). Changes that break this, and are found here:

- a field that was removed (its data would be lost silently, and older readers may need it),
- a field that is required now and could be absent before,
- a type that was narrowed or replaced, a value that an enumeration no longer has,
- a bound that was tightened, a pattern that was changed, null or extra fields that are no longer allowed.
"""

from collections.abc import Mapping
from typing import Any, cast

Schema = Mapping[str, Any]

_LOWER_BOUNDS = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_UPPER_BOUNDS = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")


def incompatibilities(old: Schema, new: Schema) -> list[str]:
    """What documents valid under `old` may have that `new` refuses or loses; empty when compatible.

    Both are JSON Schemas as pydantic writes them (`$ref` into `$defs`, `anyOf`, `enum`, `const`, bounds).
    """
    return _Comparison(old, new).compare(old, new, "event")


class _Comparison:
    """One comparison of two documents. A pair of definitions that is being compared is assumed compatible meanwhile."""

    def __init__(self, old_root: Schema, new_root: Schema) -> None:
        self._old_root = old_root
        self._new_root = new_root
        self._open: set[tuple[str, str]] = set()

    def compare(self, old: Schema, new: Schema, path: str) -> list[str]:
        pair = (str(old.get("$ref", "")), str(new.get("$ref", "")))
        if pair in self._open:
            return []
        opened = {pair} if all(pair) else set[tuple[str, str]]()
        self._open |= opened
        try:
            return self._compare_resolved(_resolved(old, self._old_root), _resolved(new, self._new_root), path)
        finally:
            self._open -= opened

    def _compare_resolved(self, old: Schema, new: Schema, path: str) -> list[str]:
        old_choices, new_choices = _alternatives(old), _alternatives(new)
        if len(old_choices) > 1 or len(new_choices) > 1:
            return self._compare_alternatives(old_choices, new_choices, path)
        if _is_anything(new):
            return []
        found = _type_problems(old, new, path) + _value_problems(old, new, path)
        if found:
            return found
        found = _bound_problems(old, new, path)
        found += self._object_problems(old, new, path)
        return found + self._array_problems(old, new, path)

    def _compare_alternatives(self, old: list[Schema], new: list[Schema], path: str) -> list[str]:
        """Every alternative of before must be read by one of now; of several failures the shortest list is told."""
        found: list[str] = []
        for choice in old:
            attempts = [self.compare(choice, candidate, path) for candidate in new]
            if all(attempts):
                found += min(attempts, key=len)
        return found

    def _object_problems(self, old: Schema, new: Schema, path: str) -> list[str]:
        old_fields = _mapping(old.get("properties"))
        new_fields = _mapping(new.get("properties"))
        found = [f"{path}.{name}: field removed" for name in old_fields if name not in new_fields]
        old_required = set(cast("list[str]", old.get("required", [])))
        for name in cast("list[str]", new.get("required", [])):
            if name not in old_required:
                found.append(f"{path}.{name}: required now, could be absent before")
        for name, field in old_fields.items():
            if name in new_fields:
                found += self.compare(_mapping(field), _mapping(new_fields[name]), f"{path}.{name}")
        return found + self._extra_field_problems(old, new, path)

    def _extra_field_problems(self, old: Schema, new: Schema, path: str) -> list[str]:
        before, now = old.get("additionalProperties", True), new.get("additionalProperties", True)
        if now is True or before is False:
            return []
        if now is False:
            return [f"{path}: unknown fields are refused now"]
        return self.compare(_mapping(before) if before is not True else {}, _mapping(now), f"{path}.*")

    def _array_problems(self, old: Schema, new: Schema, path: str) -> list[str]:
        found: list[str] = []
        if "items" in new:
            found += self.compare(_mapping(old.get("items")), _mapping(new["items"]), f"{path}[]")
        old_items = cast("list[Schema]", old.get("prefixItems", []))
        for index, item in enumerate(cast("list[Schema]", new.get("prefixItems", []))):
            before = old_items[index] if index < len(old_items) else _mapping(old.get("items"))
            found += self.compare(before, item, f"{path}[{index}]")
        return found


def _resolved(schema: Schema, root: Schema) -> Schema:
    """`schema` with its `$ref` followed; keywords beside the reference are kept."""
    while "$ref" in schema:
        name = str(schema["$ref"]).removeprefix("#/$defs/")
        siblings = {key: value for key, value in schema.items() if key != "$ref"}
        schema = {**_mapping(_mapping(root["$defs"])[name]), **siblings}
    return schema


def _mapping(value: object) -> Schema:
    return cast("Schema", value) if isinstance(value, Mapping) else {}


def _alternatives(schema: Schema) -> list[Schema]:
    choices = schema.get("anyOf", schema.get("oneOf"))
    return cast("list[Schema]", choices) if choices else [schema]


def _is_anything(schema: Schema) -> bool:
    return not any(
        key in schema for key in ("type", "enum", "const", "properties", "items", "prefixItems", "anyOf", "oneOf")
    )


def _type_problems(old: Schema, new: Schema, path: str) -> list[str]:
    before, now = old.get("type"), new.get("type")
    if now is None or before == now or (before == "integer" and now == "number"):
        return []
    return [f"{path}: type changed from {before or 'anything'} to {now}"]


def _value_problems(old: Schema, new: Schema, path: str) -> list[str]:
    now = _values(new)
    if now is None:
        return []
    before = _values(old)
    if before is None:
        return [f"{path}: restricted to {now} now"]
    lost = [value for value in before if value not in now]
    return [f"{path}: no longer allows {lost}"] if lost else []


def _values(schema: Schema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema.get("enum")


def _bound_problems(old: Schema, new: Schema, path: str) -> list[str]:
    found: list[str] = []
    for keyword in _LOWER_BOUNDS:
        if keyword in new and (keyword not in old or new[keyword] > old[keyword]):
            found.append(f"{path}: {keyword} raised from {old.get(keyword, 'none')} to {new[keyword]}")
    for keyword in _UPPER_BOUNDS:
        if keyword in new and (keyword not in old or new[keyword] < old[keyword]):
            found.append(f"{path}: {keyword} lowered from {old.get(keyword, 'none')} to {new[keyword]}")
    for keyword in ("pattern", "format"):
        if keyword in new and new[keyword] != old.get(keyword):
            found.append(f"{path}: {keyword} changed from {old.get(keyword, 'none')} to {new[keyword]}")
    return found
