"""Makes the scores of a replay count: copies them to `scores` under the epoch of their promotion, each once.

The teacher then makes a new revision of every sample; the epoch outranks whatever was there. The trainer takes it for
a turn that is not trained yet, and lists it for one that is.
"""

import threading
from collections.abc import Callable, Mapping

from clawstream.bus.interface import Bus, Record, TopicPartition
from clawstream.bus.ranges import OffsetRange, end_of_records, partitions_of, ranges_since, read_ranges
from clawstream.clock import Clock
from clawstream.codec import decode_as, header
from clawstream.errors import DecodeError
from clawstream.log import Logger
from clawstream.metrics import Metrics
from clawstream.topics import JUDGE_DLQ, SCORES, SCORES_REPLAY, full_name
from clawstream.worker.handler import Handler
from clawstream.worker.outcomes import Outcome, Output, Skip
from clawstream.worker.settings import WorkerSettings
from clawstream.worker.worker import EosWorker
from schemas.events import ReplayScoreEvent
from services.judge.handler import score_record
from services.judge.replay.bounded_run import begin_group, run_to_end
from services.judge.replay.plan import ReplayPlan

_TOLERANCE_MILLISECONDS = 300_000
_SETTINGS = WorkerSettings()


class PromotionHandler(Handler):
    """A score of the replay in, the same score under the promotion's epoch out."""

    def __init__(self, plan: ReplayPlan, promotion_epoch: int) -> None:
        self._plan = plan
        self._epoch = promotion_epoch
        self._topic = full_name(plan.namespace, SCORES)

    async def handle(self, record: Record) -> Outcome:
        """Scores of other replays, and what cannot be decoded, are skipped."""
        try:
            event = decode_as(record, ReplayScoreEvent)
        except DecodeError:
            return Skip("undecodable")
        if event.replay_id != self._plan.replay_id:
            return Skip("other_replay")
        score = event.promoted(self._epoch)
        traceparent = header(record.headers, "traceparent")
        return Output(
            (score_record(score, topic=self._topic, source=f"replay/{self._plan.name}", traceparent=traceparent),)
        )


def replay_scores(bus: Bus, plan: ReplayPlan) -> dict[TopicPartition, OffsetRange]:
    """The stretch of the shadow topic that holds them. Raises BusError."""
    reader = bus.reader()
    try:
        since = int(plan.created_at.timestamp() * 1000) - _TOLERANCE_MILLISECONDS
        ranges = ranges_since(reader, partitions_of(bus, full_name(plan.namespace, SCORES_REPLAY)), since)
        return {
            partition: (bounds[0], end_of_records(reader, partition, bounds)) for partition, bounds in ranges.items()
        }
    finally:
        reader.close()


def turns_of(bus: Bus, plan: ReplayPlan, ranges: Mapping[TopicPartition, OffsetRange]) -> dict[str, int]:
    """Every turn that the replay scored, with the number of its scores. Raises BusError."""
    turns: dict[str, int] = {}
    reader = bus.reader()
    try:
        for record in read_ranges(reader, ranges):
            try:
                event = decode_as(record, ReplayScoreEvent)
            except DecodeError:
                continue
            if event.replay_id == plan.replay_id:
                turns[event.turn_id] = turns.get(event.turn_id, 0) + 1
    finally:
        reader.close()
    return turns


async def copy_scores(
    bus: Bus,
    plan: ReplayPlan,
    ranges: Mapping[TopicPartition, OffsetRange],
    promotion_epoch: int,
    *,
    stop: threading.Event,
    clock: Clock,
    metrics: Metrics,
    logger: Logger,
    progress: Callable[[int, int], None],
) -> bool:
    """True when all are on `scores`; False when `stop` came first: run it again then. Raises what ended the worker."""
    group = f"{plan.namespace}.promote.{plan.replay_id}.{promotion_epoch}"
    begin_group(bus, group, ranges)
    worker = EosWorker(
        bus,
        PromotionHandler(plan, promotion_epoch),
        input_topics=[full_name(plan.namespace, SCORES_REPLAY)],
        dead_letter_topic=full_name(plan.namespace, JUDGE_DLQ),
        group=group,
        instance="promote-0",
        transactional_id=group,
        settings=_SETTINGS,
        metrics=metrics,
        clock=clock,
        logger=logger,
    )
    return await run_to_end(bus, worker, group, ranges, stop=stop, progress=progress)
