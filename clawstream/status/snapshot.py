"""Everything that `status` knows at one moment, as data: collected elsewhere, judged and shown elsewhere."""

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from clawstream.supervisor.report import ProcessReport, SupervisorReport
from schemas.events.weights import EngineState


class Part(BaseModel):
    """A piece of the snapshot."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class StageLag(Part):
    """What a stage has not resolved yet."""

    stage: str
    """`judge`, `teacher` or `trainer`."""
    topic: str
    """What it reads, without namespace."""
    records: int
    """Records that it has not resolved."""
    is_lower_bound: bool
    """True when counting stopped early: there are more."""
    oldest_seconds: float | None
    """Age of the oldest of them; null when there is none."""


class EngineVersion(Part):
    """What the weight gate last said about an engine."""

    engine: str
    """Its name."""
    state: EngineState
    """What it was doing."""
    weight_version: int | None
    """What it served; null when unknown."""
    target_version: int | None
    """What it was being moved to."""
    is_expired: bool
    """True when the heartbeat says nothing any more: nobody watches this engine."""
    error: str
    """What went wrong."""


class Step(Part):
    """A training step, in short."""

    step: int
    """Its number."""
    base_version: int
    """Where it started from."""
    weight_version: int | None
    """What it made; null when the weights did not change."""
    unchanged_reason: str
    """Why they did not."""
    closed_by: str
    """What closed the batch."""
    samples: int
    """Trained samples."""
    drops: dict[str, int]
    """Dropped samples by reason."""
    guards: list[str] = Field(default=[])
    """What guards found and did, in words."""
    knobs: dict[str, float] = Field(default={})
    """What guards may turn, as it was in this step."""
    mean_reward: float | None
    """Of the samples with a reward; null when none has one."""
    mean_age: float | None
    """In versions; null without samples."""
    seconds: float
    """How long it took."""
    finished_at: AwareDatetime
    """When."""


class LogSnapshot(Part):
    """What the log says."""

    offsets: dict[str, int]
    """Topic without namespace to the number of retained offsets: at most so many records, since transactions and
    compaction leave gaps."""
    lags: list[StageLag]
    """What each stage still has before it."""
    pointer_version: int | None
    """The version that should be in service; null before any was published."""
    newest_version: int | None
    """The newest published version."""
    rollback_reason: str | None = None
    """Why people went back to `pointer_version`, which is held; null when no rollback holds."""
    engines: list[EngineVersion]
    """By name."""
    steps: list[Step]
    """The last steps, oldest first."""
    drops: dict[str, int]
    """Samples that the trainer dropped, by reason, over the steps that were read."""
    steps_read: int
    """How many steps that is."""
    guard_actions: dict[str, int] = Field(default={})
    """How often guards acted over these steps, by guard and action: `shift: hold`."""


class MetricSample(Part):
    """One value of a process's metrics."""

    process: str
    """Whose."""
    name: str
    """Prometheus name, with prefix."""
    labels: dict[str, str]
    """Its labels."""
    value: float
    """Its value."""


class Snapshot(Part):
    """Everything at one moment."""

    taken_at: AwareDatetime
    """When."""
    supervisor_pid: int | None
    """The running supervisor; null when none runs here."""
    report: SupervisorReport | None
    """Its last report, also of one that ended."""
    log: LogSnapshot | None
    """Null when the log could not be read."""
    log_problem: str = ""
    """Why not; empty where nobody tried, since the broker belongs to a system that is down."""
    metrics: list[MetricSample] = Field(default=[])
    """Of all processes that answered."""
    silent: list[str] = Field(default=[])
    """Running processes whose metrics could not be read."""
    alive: list[str] = Field(default=[])
    """Processes of the report that run now, by pid and creation time. Without a supervisor they are orphans."""

    @property
    def is_down(self) -> bool:
        """Whether a system that ran here has ended: no process of it runs, and nobody would start one."""
        return self.report is not None and self.supervisor_pid is None and not self.alive

    @property
    def orphans(self) -> list[ProcessReport]:
        """Processes that a killed supervisor left running."""
        return [process for process in self._left_by_a_killed_supervisor() if process.name in self.alive]

    @property
    def vanished(self) -> list[ProcessReport]:
        """Processes that the last report says to run, and that ended after their supervisor was killed."""
        return [process for process in self._left_by_a_killed_supervisor() if process.name not in self.alive]

    def _left_by_a_killed_supervisor(self) -> list[ProcessReport]:
        if self.report is None or self.supervisor_pid is not None:
            return []
        return [process for process in self.report.processes if process.identity is not None]

    def total(self, name: str, **labels: str) -> float | None:
        """Sum of a metric over processes and all labels that are not given; None when nobody has it."""
        found = [
            sample.value
            for sample in self.metrics
            if sample.name == name and all(sample.labels.get(key) == value for key, value in labels.items())
        ]
        return sum(found) if found else None

    def by_label(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Sums of a metric by the values of one label, without zeros."""
        sums: dict[str, float] = {}
        for sample in self.metrics:
            if sample.name == name and all(sample.labels.get(key) == value for key, value in labels.items()):
                key = sample.labels.get(label, "")
                sums[key] = sums.get(key, 0.0) + sample.value
        return {key: value for key, value in sums.items() if value}
