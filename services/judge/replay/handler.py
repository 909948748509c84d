"""One input of a replay: judged by the judge's own code, written beside the scores that count."""

from collections import Counter
from collections.abc import Mapping

from clawstream import ids
from clawstream.bus.interface import OutgoingRecord, Record, TopicPartition
from clawstream.bus.ranges import OffsetRange
from clawstream.codec import encode_fields
from clawstream.errors import (
    BrokerUnavailable,
    DecodeError,
    EngineUnavailable,
    FatalBusError,
    Fenced,
    ForgottenContent,
    NoEngineReady,
    RetryLater,
)
from clawstream.forgetting.forgotten import Forgotten
from clawstream.log import Logger
from clawstream.topics import SCORES_REPLAY, full_name
from clawstream.worker.outcomes import Outcome, Skip
from schemas.events import NextStateEvent, ReplayScoreEvent, ScoreEvent
from services.judge.active import ActiveJudges
from services.judge.handler import JudgeHandler
from services.judge.judging import Judging
from services.judge.replay.ledger import ReplayLedger
from services.judge.replay.plan import ReplayPlan


class ReplayHandler(JudgeHandler):
    """The judge's handler within bounds. It buries nothing: an input that cannot be judged is a counted skip, for the
    dead letter that matters is the judge's own."""

    def __init__(
        self,
        plan: ReplayPlan,
        judges: ActiveJudges,
        judging: Judging,
        ledger: ReplayLedger,
        *,
        max_timeouts: int,
        logger: Logger,
        forgotten: Forgotten,
    ) -> None:
        super().__init__(
            judges,
            judging,
            ledger,
            namespace=plan.namespace,
            source=f"replay/{plan.name}",
            max_timeouts=max_timeouts,
            logger=logger,
            forgotten=forgotten,
        )
        self._plan = plan
        self._replay_ledger = ledger
        self._replay_logger = logger
        self._shadow_topic = full_name(plan.namespace, SCORES_REPLAY)
        self._ranges: Mapping[TopicPartition, OffsetRange] = plan.ranges
        self.results: Counter[str] = Counter()
        """What became of the inputs of this process: `scored`, or the reason of a skip."""

    async def handle(self, record: Record) -> Outcome:
        """Raises as the judge's does for an outage: the input waits."""
        start, end = self._ranges.get(record.topic_partition, (0, 0))
        if not start <= record.offset < end:
            return Skip("out_of_bounds")
        try:
            outcome = await super().handle(record)
        except ForgottenContent:
            outcome = Skip("forgotten")
        except DecodeError:
            outcome = Skip("undecodable")
        except (RetryLater, EngineUnavailable, NoEngineReady, BrokerUnavailable, Fenced, FatalBusError):
            raise
        except Exception as error:  # The boundary of a judge of one's own: a defect costs one input, as in the worker.
            self._replay_logger.warning("an input cannot be judged", record=str(record), error=repr(error))
            outcome = Skip("judge_failed")
        self.results[outcome.reason if isinstance(outcome, Skip) else "scored"] += 1
        return outcome

    async def on_deadline(self, record: Record, deadline_seconds: float) -> Outcome:
        self.results["deadline"] += 1
        return await super().on_deadline(record, deadline_seconds)

    def begin(self, next_state: NextStateEvent) -> None:
        if self._judges.current.model is not None:
            self._replay_ledger.expect(next_state)

    def outgoing(self, score: ScoreEvent, traceparent: str | None) -> OutgoingRecord:
        # A score is valid already, and a replay makes many.
        return encode_fields(
            {**score.model_dump(mode="json"), "replay_id": self._plan.replay_id},
            ReplayScoreEvent,
            topic=self._shadow_topic,
            key=score.session_id,
            event_id=ids.derive("replay-score", self._plan.replay_id, score.score_id),
            source=self._source,
            traceparent=traceparent,
        )
