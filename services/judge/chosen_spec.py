"""The judge spec that a person names: a TOML file, or changes to the one that counts."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from clawstream.errors import SettingsError
from schemas.judge_spec import JudgeSpec
from services.judge.specs import completed


def chosen_spec(counting: JudgeSpec, file: Path | None, changes: Sequence[str]) -> JudgeSpec:
    """`file` (fields of a spec) or else the one that counts, with `changes` (`votes=5`, `prompt="mine-2"`) laid over.

    Checksums of prompts that are replaced are made anew. The result is complete. Raises SettingsError for an unknown
    prompt, field or backend.
    """
    values = _file_values(file) if file is not None else counting.model_dump(mode="json")
    for change in changes:
        name, separator, text = change.partition("=")
        if not separator:
            raise SettingsError(f"{change!r} is no change: write FIELD=VALUE, for example votes=5")
        values[name] = _value(text)
        if name in ("prompt", "hint_prompt", "backend"):
            values["hint_prompt_sha256" if name == "hint_prompt" else "prompt_sha256"] = ""
        if name == "backend":
            values["prompt"] = (
                values.get("prompt", "") if "prompt" in {each.partition("=")[0] for each in changes} else ""
            )
    try:
        spec = JudgeSpec.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"
            for problem in error.errors(include_url=False)
        )
        raise SettingsError(f"not a judge spec: {problems}") from error
    return completed(spec)


def _file_values(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file}: no judge spec can be read from it: {error}") from error


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
