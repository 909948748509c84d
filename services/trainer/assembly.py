"""Puts a trainer together from its settings, the log, the compute half and the checkpoint it starts from."""

import threading
from dataclasses import dataclass

from clawstream import topics
from clawstream.bus.interface import Bus, Record
from clawstream.bus.ranges import partitions_of
from clawstream.bus.topic_follower import TopicFollower
from clawstream.clock import Clock
from clawstream.errors import DecodeError
from clawstream.forgetting.forgotten import Forgotten
from clawstream.log import Logger
from clawstream.metrics import Metrics
from services.trainer.advantages import AdvantageMode, RewardRules, UserBaselines
from services.trainer.announcer import Announcer
from services.trainer.batcher import Batcher, BatchRules
from services.trainer.candidates import CandidateRules
from services.trainer.credit import CreditRules
from services.trainer.dead_letters import DeadLetter
from services.trainer.events import EventRecords
from services.trainer.finisher import FinishedStep, Finisher
from services.trainer.guards.watch import Guards
from services.trainer.history import History, read_history
from services.trainer.loop import LoopSettings, TrainerLoop
from services.trainer.ports import Archive, Policy, Store
from services.trainer.progress import Progress
from services.trainer.progress_report import ProgressReport
from services.trainer.reader import SampleReader
from services.trainer.resume import resumed_progress
from services.trainer.retention import ArtefactRetention
from services.trainer.rollouts import RolloutRules
from services.trainer.settings import TrainerSettings
from services.trainer.turn_ledger import LedgerAddition, TurnLedger


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What every part is given."""

    bus: Bus
    clock: Clock
    metrics: Metrics
    logger: Logger
    report: ProgressReport
    stop: threading.Event
    """Set when the process is to end."""


def trainer_history(settings: TrainerSettings, bus: Bus) -> History:
    """What the log knows of the policy. Raises BusError."""
    namespace = settings.kafka.namespace
    return read_history(
        bus,
        weights_topic=topics.full_name(namespace, topics.WEIGHTS),
        train_steps_topic=topics.full_name(namespace, topics.TRAIN_STEPS),
        policy=settings.policy,
    )


def batch_rules(settings: TrainerSettings) -> BatchRules:
    """When a batch closes, and what its samples are worth."""
    advantage = settings.advantage
    return BatchRules(
        settings.batch_size,
        settings.max_batch_age_seconds,
        settings.max_age_versions,
        settings.at_least_one,
        rollouts=RolloutRules(
            advantage.rollout_timeout_seconds, advantage.rollout_settle_seconds, advantage.group_size
        ),
        credit=CreditRules(
            advantage.mode,
            RewardRules(advantage.outcome_coefficient, advantage.step_coefficient, advantage.discount),
        ),
    )


class Trainer:
    """One trainer's parts on the first rank."""

    def __init__(
        self,
        settings: TrainerSettings,
        around: Surroundings,
        *,
        policy: Policy,
        store: Store,
        archive: Archive,
    ) -> None:
        """`policy` stands where its checkpoint, or the model that the run begins with, was."""
        self._settings = settings
        self._around = around
        self._policy = policy
        self._store = store
        self._archive = archive
        namespace = settings.kafka.namespace
        self._records = EventRecords(namespace, settings.policy, settings.name)
        self._announcer = Announcer(
            around.bus, f"{namespace}.trainer.{settings.name}", stop=around.stop, logger=around.logger
        )
        self._retention = ArtefactRetention(
            around.bus,
            topics.full_name(namespace, topics.WEIGHTS_APPLIED),
            policy=settings.policy,
            keep=settings.weights_keep,
            needed=[]
            if settings.own_teacher is None or settings.own_teacher.version is None
            else [settings.own_teacher.version],
            store=store,
            announcer=self._announcer,
            records=self._records,
            clock=around.clock,
            logger=around.logger,
        )
        self._finisher = Finisher(
            store=store,
            announcer=self._announcer,
            records=self._records,
            retention=self._retention,
            read_history=lambda: trainer_history(settings, around.bus),
            policy=settings.policy,
            clock=around.clock,
            metrics=around.metrics,
            logger=around.logger,
        )
        self._reader: SampleReader | None = None
        self._forgotten = Forgotten()
        self._forgotten_follower: TopicFollower | None = None

    def begin(self, progress: Progress, *, is_new: bool) -> TrainerLoop:
        """Fences a predecessor, writes down and announces what is missing, and returns the loop.

        `progress` is the checkpoint's, or for a new run what `resume.first_progress` made. Raises BusError.
        """
        around = self._around
        self._announcer.open()
        history = trainer_history(self._settings, around.bus)  # after the fence: nobody writes to it any more but us
        if is_new:
            nothing_left = LedgerAddition(progress.turns, progress.turns)
            self._finisher.finish(FinishedStep(self._policy.snapshot(), progress, nothing_left), history)
        else:
            reached = progress
            progress = resumed_progress(progress, history, self._store.versions())
            if progress.lineage != reached.lineage:
                around.logger.error(
                    "the newest checkpoints are lost: training goes on from an older one as a lineage of its own",
                    step=progress.step,
                    lost_lineage=reached.lineage,
                    lineage=progress.lineage,
                    superseded_versions=[v for v in sorted(history.versions) if v > reached.newest_version],
                )
            self._finisher.announce(self._policy.snapshot(), progress, history)
        progress = progress.announced()
        ledger = TurnLedger(self._store, progress.turns)
        settings = self._settings
        now = around.clock.monotonic_seconds()
        batcher = Batcher(
            batch_rules(settings),
            ledger,
            current_version=progress.newest_version,
            baselines=UserBaselines.restored(settings.advantage.baseline_decay, progress.baselines)
            if settings.advantage.mode is AdvantageMode.USER_BASELINE
            else None,
        )
        batcher.drop_counts.update(progress.drop_counts)
        self._forgotten_follower = TopicFollower(
            around.bus,
            topics.full_name(settings.kafka.namespace, topics.FORGOTTEN),
            self._forgotten.apply,
            on_failure=around.stop.set,
            stopped=around.stop.is_set,
        )
        samples_topic = topics.full_name(settings.kafka.namespace, topics.SAMPLES)
        self._reader = SampleReader(
            around.bus,
            samples_topic,
            partitions=[each.partition for each in partitions_of(around.bus, samples_topic)],
            progress=progress,
            batcher=batcher,
            rules=CandidateRules(
                settings.policy,
                settings.tokenizer_fingerprint,
                self._policy.vocabulary_size,
                settings.max_sample_tokens,
                settings.algorithm.learning_signal,
                self._forgotten,
                has_own_teacher=settings.own_teacher is not None,
            ),
            dead_letter=self._dead_letter,
            now_seconds=now,
            blob_patience_seconds=settings.blob_patience_seconds,
            wait=around.stop.wait,
            logger=around.logger,
        )
        return TrainerLoop(
            LoopSettings(settings.policy, settings.checkpoint_every_steps, settings.trained_retention_days),
            progress=progress,
            ledger=ledger,
            policy=self._policy,
            schedule=settings.learning_rate.schedule(),
            reader=self._reader,
            batcher=batcher,
            guards=Guards.restored(settings.guards, settings.algorithm.options, progress.knobs),
            archive=self._archive,
            finisher=self._finisher,
            report=around.report,
            clock=around.clock,
            metrics=around.metrics,
            logger=around.logger,
        )

    def check(self) -> None:
        """Raises what ended the following of forgotten sessions: without it nothing may be trained."""
        follower = self._forgotten_follower
        if follower is not None and follower.failure is not None:
            raise follower.failure

    def close(self) -> None:
        """Releases the clients."""
        for part in (self._reader, self._forgotten_follower, self._retention, self._announcer):
            if part is not None:
                part.close()

    def _dead_letter(self, record: Record, error: DecodeError) -> DeadLetter:
        around = self._around
        around.metrics.increment("dead_letters_total", reason=type(error).__name__)
        around.logger.error("a record is no sample and goes to the dead-letter topic", error=str(error))
        return DeadLetter.of(record, error, process=self._settings.name, now_iso=around.clock.now().isoformat())
