"""What a replay is to do: written down before it begins, so that it can be continued after any end."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from clawstream.bus.interface import TopicPartition
from clawstream.bus.ranges import OffsetRange
from clawstream.durable_files import replace_file
from clawstream.errors import ReplayError
from clawstream.topics import NEXT_STATES, full_name
from schemas.judge_spec import JudgeSpec

_FILE = "plan.json"


class ReplayPlan(BaseModel):
    """One replay."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    """Given by a person; the folder's name."""
    replay_id: str
    """Stands in every score of the replay."""
    namespace: str
    """Of the log that it reads."""
    spec: JudgeSpec
    """Complete."""
    baseline_epoch: int
    """The promotion epoch that counted when the replay was made: its scores are what the replay is compared with."""
    created_at: AwareDatetime
    """When."""
    oldest_milliseconds: int | None
    """Time of the oldest input; null when there is none. No ledger entry that may be used is much older."""
    bounds: dict[int, tuple[int, int]]
    """Partition of `next-states` to the first offset, and the offset after the last input."""

    @property
    def group(self) -> str:
        """Its consumer group."""
        return f"{self.namespace}.replay.{self.replay_id}"

    @property
    def ranges(self) -> dict[TopicPartition, OffsetRange]:
        """What it reads."""
        topic = full_name(self.namespace, NEXT_STATES)
        return {TopicPartition(topic, number): bounds for number, bounds in self.bounds.items()}


class ReplayDirectory:
    """Where a replay keeps its plan, its ledger and its report: `root/NAME/`."""

    def __init__(self, root: Path, name: str) -> None:
        """Raises ReplayError for a name that cannot be a folder's."""
        if "/" in name or name.startswith("."):
            raise ReplayError(f"{name!r} cannot be the name of a replay: letters, digits, dots, dashes, underscores")
        self.path = root / name

    def load(self) -> ReplayPlan | None:
        """The plan, or None when there is none yet. Raises ReplayError for a file that is none."""
        file = self.path / _FILE
        if not file.exists():
            return None
        try:
            return ReplayPlan.model_validate_json(file.read_bytes())
        except ValidationError as error:
            raise ReplayError(f"{file} is no plan of a replay: {error}") from error

    def save(self, plan: ReplayPlan) -> None:
        """Returns when it is on the disk."""
        self.path.mkdir(parents=True, exist_ok=True)
        replace_file(self.path / _FILE, plan.model_dump_json(indent=2).encode())


def replay_names(root: Path) -> list[str]:
    """Every replay of this machine, oldest first."""
    plans = sorted(root.glob(f"*/{_FILE}"), key=lambda file: file.stat().st_mtime)
    return [file.parent.name for file in plans]


def check_same(plan: ReplayPlan, *, spec: JudgeSpec, namespace: str) -> None:
    """A replay is continued only as what it was. Raises ReplayError."""
    if plan.spec.spec_hash != spec.spec_hash or plan.namespace != namespace:
        raise ReplayError(
            f"replay {plan.name!r} was made with spec {plan.spec.spec_hash} in namespace {plan.namespace!r}, not "
            f"{spec.spec_hash} in {namespace!r}: give the new one another --name"
        )


def committed_share(
    plan_ranges: Mapping[TopicPartition, OffsetRange], committed: Mapping[TopicPartition, int]
) -> tuple[int, int]:
    """(offsets done, offsets in all) of a bounded run of a group."""
    total = sum(end - start for start, end in plan_ranges.values())
    done = sum(
        min(max(committed.get(partition, start), start), end) - start for partition, (start, end) in plan_ranges.items()
    )
    return done, total
