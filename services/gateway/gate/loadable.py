"""Which versions an engine may be given, and where their files are."""

import asyncio
from pathlib import Path

from clawstream.weights.tensors import check_same_tensors
from services.gateway.gate.artefacts import artefact_directory, verified_directory
from services.gateway.gate.charge import Charge
from services.gateway.gate.update import LoadableVersion
from services.gateway.gate.weights_view import WeightsView

_FALLBACK_VERSIONS = 3
"""How many older versions are tried on an engine that has none and cannot load the pointer's."""


def loadable(weights: WeightsView, charge: Charge, version: int) -> LoadableVersion | None:
    """A published version, or the base model that the engine was started with; None when it is neither."""
    event = weights.artefact(version)
    if event is not None:
        reference = _served_directory(weights, charge)

        async def published() -> str:
            directory = await verified_directory(event)
            if reference is not None:
                await asyncio.to_thread(check_same_tensors, directory, reference)
            return str(directory)

        return LoadableVersion(version, published)
    if version == 0 and charge.model_directory is not None:
        directory = charge.model_directory

        async def started_with() -> str:
            return directory

        return LoadableVersion(0, started_with)
    return None


def _served_directory(weights: WeightsView, charge: Charge) -> Path | None:
    """Files of what the engine serves, or of what it was started with: what comes must look the same."""
    event = weights.artefact(charge.served) if charge.served is not None else None
    if event is not None:
        return artefact_directory(event)
    return Path(charge.model_directory) if charge.model_directory is not None else None


def fallbacks(weights: WeightsView, charge: Charge, version: int) -> list[LoadableVersion]:
    """What stands in for `version` when it cannot be loaded: what the engine serves, or else older ones."""
    numbers = [charge.served] if charge.served is not None else weights.versions_below(version)[:_FALLBACK_VERSIONS]
    return [found for number in numbers if (found := loadable(weights, charge, number)) is not None]
