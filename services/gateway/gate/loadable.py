"""Which versions an engine may be given, and where their files are."""

from services.gateway.gate.artefacts import verified_directory
from services.gateway.gate.charge import Charge
from services.gateway.gate.update import LoadableVersion
from services.gateway.gate.weights_view import WeightsView

_FALLBACK_VERSIONS = 3
"""How many older versions are tried on an engine that has none and cannot load the pointer's."""


def loadable(weights: WeightsView, charge: Charge, version: int) -> LoadableVersion | None:
    """A published version, or the base model that the engine was started with; None when it is neither."""
    event = weights.artefact(version)
    if event is not None:

        async def published() -> str:
            return str(await verified_directory(event))

        return LoadableVersion(version, published)
    if version == 0 and charge.model_directory is not None:
        directory = charge.model_directory

        async def started_with() -> str:
            return directory

        return LoadableVersion(0, started_with)
    return None


def fallbacks(weights: WeightsView, charge: Charge, version: int) -> list[LoadableVersion]:
    """What stands in for `version` when it cannot be loaded: what the engine serves, or else older ones."""
    numbers = [charge.served] if charge.served is not None else weights.versions_below(version)[:_FALLBACK_VERSIONS]
    return [found for number in numbers if (found := loadable(weights, charge, number)) is not None]
