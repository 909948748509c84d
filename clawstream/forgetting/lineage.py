"""Which training steps learned from forgotten turns, and which weight versions carry what they learned. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from schemas.events.train_step import TrainStepEvent


@dataclass(frozen=True, slots=True)
class SeenStep:
    """One step that learned from something that is forgotten."""

    lineage: str
    policy: str
    step: int
    weight_version: int | None
    """The version that it made; None when the weights did not change."""
    sample_ids: tuple[str, ...]
    """Its forgotten samples."""
    num_samples: int
    """All samples of the step."""
    batch_uri: str
    batch_sha256: str

    @classmethod
    def of(cls, event: TrainStepEvent, sample_ids: Sequence[str]) -> "SeenStep":
        """From the step's event."""
        return cls(
            event.lineage,
            event.policy,
            event.step,
            event.weight_version,
            tuple(sample_ids),
            len(event.samples),
            event.batch_uri,
            event.batch_sha256,
        )


def descendants(seen: Iterable[SeenStep], made: Iterable[tuple[str, int, int]]) -> list[int]:
    """Versions that the steps `seen` made and all that were made from those, in order.

    `made` holds policy, base version and made version of every step; a base is always lower than what is made of it.
    """
    carrying = {(step.policy, step.weight_version) for step in seen if step.weight_version is not None}
    for policy, base, version in sorted(made, key=lambda each: each[2]):
        if (policy, base) in carrying:
            carrying.add((policy, version))
    return sorted({version for _, version in carrying})
