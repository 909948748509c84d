"""The JSON Schemas of the events: what a reader in another language needs, generated from the models."""

import json
from typing import Any

from schemas.events import EVENT_MODELS, Event


def short_name(model: type[Event]) -> str:
    """`turn` for the CloudEvents type `clawstream.turn`: the stem of file names."""
    return model.event_type.removeprefix("clawstream.")


def file_name(model: type[Event]) -> str:
    """Name of the schema file of a model's current version."""
    return f"{short_name(model)}.v{model.event_version}.schema.json"


def json_schema(model: type[Event]) -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of what a reader accepts as `model`.

    Rules across fields (lengths that agree, a reason exactly when something failed) are not in it: only the models
    check those.
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:{model.event_type.replace('.', ':')}:{model.event_version}",
        **model.model_json_schema(mode="validation"),
    }


def rendered_schemas() -> dict[str, str]:
    """File name to file content for every event's current version."""
    return {
        file_name(model): json.dumps(json_schema(model), indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        for model in EVENT_MODELS.values()
    }
