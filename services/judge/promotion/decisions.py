"""The decisions on `config`, and how another one is made.

Every decision has a key of its own, so that compaction keeps them all: what a rollback goes back to must not be
forgotten. The highest epoch counts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from clawstream import ids
from clawstream.bus.fold import LogReader
from clawstream.bus.interface import Bus, Record
from clawstream.bus.overtaken import telling_who_overtook
from clawstream.bus.write_together import write_together
from clawstream.codec import decode, encode
from clawstream.errors import SettingsError
from clawstream.topics import CONFIG, full_name
from schemas.events import ActiveJudgeSpecEvent
from schemas.judge_spec import JudgeSpec


@dataclass(slots=True)
class Decisions:
    """A fold over `config`."""

    default: JudgeSpec
    """The spec of the settings, completed: it counts with epoch 0."""
    events: dict[int, ActiveJudgeSpecEvent] = field(default_factory=dict[int, ActiveJudgeSpecEvent])
    """By epoch."""

    def apply(self, record: Record) -> None:
        """Takes a decision in. Raises DecodeError."""
        if record.value is None:
            return
        event = decode(record)
        if isinstance(event, ActiveJudgeSpecEvent) and event.promotion_epoch > 0:
            self.events.setdefault(event.promotion_epoch, event)  # As judges do: the first of an epoch counts.

    @property
    def epoch(self) -> int:
        """The one that counts."""
        return max(self.events, default=0)

    @property
    def spec(self) -> JudgeSpec:
        """The one that counts."""
        return self.spec_of(self.epoch)

    def spec_of(self, epoch: int) -> JudgeSpec:
        """What was decided. Raises SettingsError for an epoch that never was."""
        if epoch == 0:
            return self.default
        if epoch not in self.events:
            raise SettingsError(f"there is no promotion epoch {epoch}; `clawstream judge list` shows those there are")
        return self.events[epoch].spec

    def before(self) -> int:
        """The newest epoch whose spec is not the one that counts. Raises SettingsError when there is none."""
        others = [epoch for epoch in [0, *self.events] if self.spec_of(epoch).spec_hash != self.spec.spec_hash]
        if not others:
            raise SettingsError(
                f"no other judge spec than {self.spec.spec_hash} has ever counted: nothing to go back to"
            )
        return max(others)


def read_decisions(bus: Bus, namespace: str, default: JudgeSpec) -> Decisions:
    """Everything that was decided until now. Raises BusError and DecodeError."""
    decisions = Decisions(default)
    reader = LogReader(bus, [full_name(namespace, CONFIG)])
    try:
        reader.bootstrap(decisions.apply)
    finally:
        reader.close()
    return decisions


def decide(
    bus: Bus,
    namespace: str,
    default: JudgeSpec,
    choose: Callable[[Decisions], JudgeSpec],
    *,
    reason: str,
    now: datetime,
    source: str,
) -> tuple[Decisions, bool]:
    """Makes the spec that `choose` picks count. Returns the decisions and whether one was added.

    Nothing is written when that spec counts already. Two who decide at once get different epochs: the second fences the
    first before it reads. Raises Overtaken then, and what `choose` raises.
    """
    producer = bus.transactional_producer(f"{namespace}.config")
    try:
        decisions = read_decisions(bus, namespace, default)
        spec = choose(decisions)
        if spec.spec_hash == decisions.spec.spec_hash:
            return decisions, False
        event = ActiveJudgeSpecEvent(
            spec=spec,
            spec_hash=spec.spec_hash,
            promotion_epoch=decisions.epoch + 1,
            reason=reason,
            activated_at=now,
        )
        decision = encode(
            event,
            topic=full_name(namespace, CONFIG),
            key=f"active-judge-spec/{event.promotion_epoch:08d}",
            event_id=ids.derive("active-judge-spec", event.promotion_epoch, event.spec_hash),
            source=source,
        )
        with telling_who_overtook(
            f"{full_name(namespace, CONFIG)}: making judge spec {spec.spec_hash} count",
            "another promotion or rollback",
            then="Look at what counts now, then decide again",
        ):
            write_together(producer, [decision])
        decisions.events[event.promotion_epoch] = event
        return decisions, True
    finally:
        producer.close()


def decision_rows(decisions: Decisions) -> list[Mapping[str, object]]:
    """Every decision with its spec, oldest first, for people and programs."""
    rows: list[Mapping[str, object]] = []
    for epoch in [0, *sorted(decisions.events)]:
        event = decisions.events.get(epoch)
        spec = decisions.spec_of(epoch)
        rows.append(
            {
                "promotion_epoch": epoch,
                "counts": epoch == decisions.epoch,
                "spec_hash": spec.spec_hash,
                "spec": spec.model_dump(mode="json"),
                "reason": "settings" if event is None else event.reason,
                "activated_at": None if event is None else event.activated_at.isoformat(),
            }
        )
    return rows
