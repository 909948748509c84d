"""Which version should be in service: the newest that was trained, or the one that people went back to. Pure.

Two keys of the compacted topic `weights` decide, so that neither can make the log forget the other:

- under `<policy>` the trainer points to each version that it publishes;
- under `<policy>/rollback` people point to an older one (`clawstream weights rollback`). It holds, whatever is trained
  meanwhile, until its tombstone (`clawstream weights release`).

So the only way back is a rollback, and a late or repeated record of the trainer never takes the policy back.
"""

from schemas.events import Event, WeightPointerEvent


def rollback_key(policy: str) -> str:
    """Key of a policy's rollback on `weights`."""
    return f"{policy}/rollback"


class PointerFold:
    """A fold over `weights`, for one policy."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._rollback_key = rollback_key(policy)
        self._trained: WeightPointerEvent | None = None
        self._rollback: WeightPointerEvent | None = None

    @property
    def version(self) -> int | None:
        """The version that should be in service; None before anything was published."""
        event = self._rollback or self._trained
        return event.weight_version if event is not None else None

    @property
    def trained_version(self) -> int | None:
        """The version that would be in service without a rollback."""
        return self._trained.weight_version if self._trained is not None else None

    @property
    def rollback(self) -> WeightPointerEvent | None:
        """The rollback that holds, if any."""
        return self._rollback

    def apply(self, key: str, event: Event | None) -> None:
        """Takes in a record of `weights`; None is a tombstone. Records of other kinds and policies change nothing."""
        if event is None:
            if key == self._rollback_key:
                self._rollback = None
        elif isinstance(event, WeightPointerEvent) and event.policy == self._policy:
            if event.rollback:
                self._rollback = event
            elif self._trained is None or event.weight_version >= self._trained.weight_version:
                self._trained = event
