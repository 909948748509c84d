"""How commands speak: results to standard output, progress and errors to standard error."""

import sys
from pathlib import Path

from rich.console import Console

from clawstream.errors import SettingsError

_PIPE_COLUMNS = 200

output = Console(highlight=False, soft_wrap=True, markup=False, width=None if sys.stdout.isatty() else _PIPE_COLUMNS)
"""For results. Wide where no person's window limits it, so that a filter sees whole rows."""
errors = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
"""For progress and errors."""

DEFAULT_CONFIG_FILE = Path("clawstream.toml")


def required_config(given: Path | None) -> Path:
    """The TOML file: the given one, else the one in this folder. Raises SettingsError when there is none."""
    file = given or DEFAULT_CONFIG_FILE
    if not file.is_file():
        raise SettingsError(f"{file}: no such file; give --config or run in the folder that holds it")
    return file


def optional_config(given: Path | None) -> Path | None:
    """The TOML file, or None when none is given and there is none in this folder: defaults then decide."""
    if given is None and not DEFAULT_CONFIG_FILE.is_file():
        return None
    return required_config(given)
