"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", envvar="CLAWSTREAM_CONFIG", help="The TOML file (default: clawstream.toml)."),
]
