"""What happened on the log during a demo run, read back from Kafka for the report."""

from dataclasses import dataclass

from clawstream import topics
from clawstream.bus.fold import LogReader, latest_by_key
from clawstream.bus.interface import Bus, Record
from clawstream.codec import decode
from schemas.events import ScoreEvent, TrainStepEvent, TurnEvent, WeightVersionEvent
from schemas.events.base import TurnType


@dataclass(frozen=True, slots=True)
class VersionRow:
    """What was observed of the answers that one weight version gave."""

    weight_version: int
    turns: int
    """Judged main turns that began under this version."""
    reward: float
    """Mean reward that the judge gave."""
    length_tokens: float
    """Mean response length."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """One training step."""

    step: int
    weight_version: int | None
    samples: int
    mean_age: float
    mean_reward: float
    entropy: float | None
    """As the trainer measured it, in nats; None when it did not."""
    seconds: float


@dataclass(frozen=True, slots=True)
class History:
    """A run as the log tells it."""

    versions: list[VersionRow]
    steps: list[StepRow]
    turns: int
    """All turns, side turns and reactions included."""
    scores: int
    failed_scores: int
    drops_by_reason: dict[str, int]
    judged: dict[str, float]
    """Turn id to the judge's reward, to compare the judge with what the user meant."""
    turn_of_response: dict[str, str]
    """OpenAI response id to turn id."""


def read_history(bus: Bus, namespace: str) -> History:
    """Reads turns, scores and training steps from the start of the log to its present end."""
    names = [topics.full_name(namespace, topic) for topic in (topics.TURNS, topics.SCORES, topics.TRAIN_STEPS)]
    turns: dict[str, TurnEvent] = {}
    scores: list[ScoreEvent] = []
    steps: list[TrainStepEvent] = []
    for record in _read_all(bus, names):
        event = decode(record)
        if isinstance(event, TurnEvent):
            turns[event.turn_id] = event
        elif isinstance(event, ScoreEvent):
            scores.append(event)
        elif isinstance(event, TrainStepEvent):
            steps.append(event)
    judged = {score.turn_id: score.reward for score in scores if score.reward is not None}
    drops: dict[str, int] = {}
    for step in steps:
        for drop in step.drops:
            drops[drop.reason.value] = drops.get(drop.reason.value, 0) + 1
    return History(
        versions=_versions(turns, judged),
        steps=[_step_row(step) for step in steps],
        turns=len(turns),
        scores=len(scores),
        failed_scores=sum(score.reward is None for score in scores),
        drops_by_reason=drops,
        judged=judged,
        turn_of_response={turn.response_id: turn.turn_id for turn in turns.values()},
    )


def newest_version(bus: Bus, namespace: str) -> int:
    """The newest published weight version; 0 when there is none yet."""
    records = latest_by_key(_read_all(bus, [topics.full_name(namespace, topics.WEIGHTS)])).values()
    events = [decode(record) for record in records]
    versions = [event.weight_version for event in events if isinstance(event, WeightVersionEvent)]
    return max(versions, default=0)


def _read_all(bus: Bus, names: list[str]) -> list[Record]:
    records: list[Record] = []
    reader = LogReader(bus, names)
    try:
        reader.bootstrap(records.append)
    finally:
        reader.close()
    return records


def _versions(turns: dict[str, TurnEvent], judged: dict[str, float]) -> list[VersionRow]:
    by_version: dict[int, list[TurnEvent]] = {}
    for turn in turns.values():
        if turn.turn_id in judged and turn.turn_type is TurnType.MAIN and turn.version_spans:
            by_version.setdefault(turn.version_spans[0].weight_version, []).append(turn)
    return [
        VersionRow(
            weight_version=version,
            turns=len(group),
            reward=sum(judged[turn.turn_id] for turn in group) / len(group),
            length_tokens=sum(turn.response_ids.element_count for turn in group) / len(group),
        )
        for version, group in sorted(by_version.items())
    ]


def _step_row(step: TrainStepEvent) -> StepRow:
    rewards = [sample.reward for sample in step.samples if sample.reward is not None]
    ages = [sample.age for sample in step.samples]
    return StepRow(
        step=step.step,
        weight_version=step.weight_version,
        samples=len(step.samples),
        mean_age=sum(ages) / max(len(ages), 1),
        mean_reward=sum(rewards) / max(len(rewards), 1),
        entropy=step.metrics.get("entropy_mean"),
        seconds=(step.finished_at - step.started_at).total_seconds(),
    )
