"""From a weight-version event to a directory that is whole."""

import asyncio
from pathlib import Path
from urllib.parse import unquote, urlparse

from clawstream.errors import WeightsError
from clawstream.weights.manifest import verify
from schemas.events import WeightVersionEvent


def artefact_directory(event: WeightVersionEvent) -> Path:
    """The directory as engines see it. Raises WeightsError for a URL that is no path: engines read file systems."""
    parts = urlparse(event.artefact_uri)
    if parts.scheme not in ("", "file"):
        raise WeightsError(
            f"version {event.weight_version} is at {event.artefact_uri}, but engines load from a shared file system; "
            "mount it and publish a path or a file:// URL"
        )
    return Path(unquote(parts.path))


async def verified_directory(event: WeightVersionEvent) -> Path:
    """The artefact's directory, after every byte was checked against the event. Raises WeightsError."""
    directory = artefact_directory(event)
    manifest = await asyncio.to_thread(verify, directory, event.manifest_sha256)
    if (manifest.policy, manifest.weight_version) != (event.policy, event.weight_version):
        raise WeightsError(
            f"{directory} holds version {manifest.weight_version} of {manifest.policy}, but its weight-version event "
            f"says version {event.weight_version} of {event.policy}"
        )
    return directory
