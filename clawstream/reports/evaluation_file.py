"""What `clawstream eval` measured, from its `report.json`."""

from pathlib import Path
from typing import Any

import orjson

from clawstream.errors import SettingsError

_MEASURED = ("satisfied", "correct")


def read_evaluation(file: Path) -> dict[str, dict[str, float | None]]:
    """Version name to `satisfied` and `correct`. Raises SettingsError for a file that is not one of its reports."""
    try:
        document: Any = orjson.loads(file.read_bytes())
        return {
            version["name"]: {name: _mean(version["estimates"][name]) for name in _MEASURED}
            for version in document["comparison"]["versions"]
        }
    except OSError as error:
        raise SettingsError(f"{file} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise SettingsError(f"{file} is no report of `clawstream eval`: {error!r}") from error


def _mean(estimate: Any) -> float | None:
    return None if estimate is None else float(estimate["mean"])
