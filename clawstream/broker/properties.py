"""The broker's server.properties, filled in from the template. No I/O."""

import base64
import uuid
from pathlib import Path
from string import Template


def render_server_properties(
    template: str, *, port: int, controller_port: int, log_directory: Path, advertised_port: int | None = None
) -> str:
    """`template` with its values. Clients are told `advertised_port`, or `port` when it is None.

    Raises KeyError for a value that the template has and we don't know.
    """
    # Backslashes are escapes in Java's property files.
    escaped_directory = str(log_directory).replace("\\", "\\\\")
    return Template(template).substitute(
        port=port,
        advertised_port=port if advertised_port is None else advertised_port,
        controller_port=controller_port,
        log_directory=escaped_directory,
    )


def cluster_id_from(identity: uuid.UUID) -> str:
    """A KRaft cluster id: 16 bytes in URL-safe base64 without padding, 22 characters."""
    return base64.urlsafe_b64encode(identity.bytes).rstrip(b"=").decode()
