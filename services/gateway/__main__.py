"""`python -m services.gateway --config clawstream.toml [--process NAME]`."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from clawstream.crash_points import crash_point, with_bus_crash
from clawstream.encryption.bus import open_bus
from clawstream.errors import ClawstreamError, SettingsError
from clawstream.log import configure_logging
from clawstream.settings import EXIT_CODE_WRONG_SETTINGS, load_settings
from services.gateway.server import serve
from services.gateway.settings import GatewaySettings


def main(
    config: Annotated[Path | None, typer.Option(help="The TOML file.")] = None,
    process: Annotated[str | None, typer.Option(help="Its name among the file's processes.")] = None,
) -> None:
    """Serve a policy over OpenAI's API and write down every turn."""
    try:
        settings = load_settings(
            GatewaySettings, section="gateway", file=config, process=process, environment=os.environ
        )
        logger = configure_logging(settings.log, process=settings.name)
        crash = crash_point(os.environ)
        encrypted = open_bus(settings.kafka, client_id=settings.name, renews_keys=True)
        bus = with_bus_crash(encrypted, crash)
        code = uvloop.run(serve(settings, bus, logger, crash, check_keys=encrypted.check_keys))
    except SettingsError as error:
        sys.stderr.write(f"gateway: {error}\n")
        sys.exit(EXIT_CODE_WRONG_SETTINGS)
    except (ClawstreamError, OSError) as error:
        sys.exit(f"gateway: {error}")
    sys.exit(code)


if __name__ == "__main__":
    typer.run(main)
