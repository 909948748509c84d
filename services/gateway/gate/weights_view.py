"""What the topic `weights` says of one policy: which artefacts exist, and which version should be in service. Pure."""

from clawstream.bus.interface import Record
from clawstream.codec import decode
from clawstream.weights.pointer import PointerFold
from schemas.events import WeightVersionEvent


class WeightsView:
    """A fold over `weights`, for one policy."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._artefacts: dict[int, WeightVersionEvent] = {}
        self._pointer = PointerFold(policy)

    @property
    def pointer_version(self) -> int:
        """The version that should be in service; 0, the base model, before anything was published."""
        return self._pointer.version or 0

    @property
    def is_rolled_back(self) -> bool:
        """Whether people went back to `pointer_version`, which then holds until they release it."""
        return self._pointer.rollback is not None

    def artefact(self, weight_version: int) -> WeightVersionEvent | None:
        """Where a version's files are; None when it was never published or was removed."""
        return self._artefacts.get(weight_version)

    def versions_below(self, weight_version: int) -> list[int]:
        """Published versions that could stand in for `weight_version`, newest first."""
        return sorted((version for version in self._artefacts if version < weight_version), reverse=True)

    def apply(self, record: Record) -> bool:
        """Takes in one record; True when the version to serve changed. Raises DecodeError."""
        before = self.pointer_version
        key = (record.key or b"").decode()
        event = decode(record) if record.value is not None else None
        self._pointer.apply(key, event)
        if isinstance(event, WeightVersionEvent) and event.policy == self._policy:
            self._artefacts[event.weight_version] = event
        elif event is None:
            self._remove(key)
        return self.pointer_version != before

    def _remove(self, key: str) -> None:
        policy, _, version = key.rpartition("/")
        if policy == self._policy and version.isdecimal():
            self._artefacts.pop(int(version), None)
