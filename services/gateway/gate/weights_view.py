"""What the topic `weights` says of one policy: which artefacts exist, and which version should be in service. Pure."""

from clawstream.bus.interface import Record
from clawstream.codec import decode
from schemas.events import WeightPointerEvent, WeightVersionEvent


class WeightsView:
    """A fold over `weights`, for one policy."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._artefacts: dict[int, WeightVersionEvent] = {}
        self._pointer: WeightPointerEvent | None = None

    @property
    def pointer_version(self) -> int:
        """The version that should be in service; 0, the base model, before anything was published."""
        return self._pointer.weight_version if self._pointer is not None else 0

    def artefact(self, weight_version: int) -> WeightVersionEvent | None:
        """Where a version's files are; None when it was never published or was removed."""
        return self._artefacts.get(weight_version)

    def versions_below(self, weight_version: int) -> list[int]:
        """Published versions that could stand in for `weight_version`, newest first."""
        return sorted((version for version in self._artefacts if version < weight_version), reverse=True)

    def apply(self, record: Record) -> bool:
        """Takes in one record; True when the version to serve changed.

        A pointer to a lower version counts only if it says `rollback`: a late or repeated record never takes the
        policy back. Raises DecodeError.
        """
        if record.value is None:
            self._remove((record.key or b"").decode())
            return False
        event = decode(record)
        if isinstance(event, WeightVersionEvent) and event.policy == self._policy:
            self._artefacts[event.weight_version] = event
        elif isinstance(event, WeightPointerEvent) and event.policy == self._policy:
            before = self.pointer_version
            if event.weight_version < before and not event.rollback:
                return False
            self._pointer = event
            return event.weight_version != before
        return False

    def _remove(self, key: str) -> None:
        policy, _, version = key.rpartition("/")
        if policy == self._policy and version.isdecimal():
            self._artefacts.pop(int(version), None)
