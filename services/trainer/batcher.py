"""Which samples make the next batch: a pure fold over candidates, with no clock and no I/O of its own.

- Of a turn the highest revision counts, whatever order they come in; lower ones are dropped as superseded.
- A turn is trained at most once per lineage; what comes later is listed, never trained.
- The turns of a rollout wait until it is over, and train together (`rollouts`); so do the rollouts of a group that are
  compared with each other. What each is worth is worked out from the whole of it (`credit`).
- Tokens of too old weights are left out; a sample that has no others is dropped.
- A batch closes on the number of *effective* samples, on the age of the oldest one, or on the number of drops (so
  that a stream of samples without signal moves the offsets too). Dead letters, which only a step announces, count as
  drops, and their bytes are bounded.
- Every sample that was added leaves exactly once: in a batch, or as a drop with its reason.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from schemas.events.base import RecordReference
from schemas.events.train_step import DroppedSample, DropReason
from services.trainer.advantages import AdvantageMode, UserBaselines
from services.trainer.ages import age, is_too_old, stale_tokens
from services.trainer.candidates import Candidate
from services.trainer.credit import CreditRules, beside_baselines, credited, may_have_signal
from services.trainer.rollouts import Arrival, RolloutRules, units
from services.trainer.turn_ledger import LedgerEntry, TurnLedger


@dataclass(frozen=True, slots=True)
class BatchRules:
    """When a batch closes."""

    batch_size: int
    max_batch_age_seconds: float
    max_age_versions: int | None
    at_least_one: bool = False
    max_drops: int = 1000
    """Keeps a train-step event far below the topic's largest message."""
    max_dead_letter_bytes: int = 16 * 1024 * 1024
    """Keeps the transaction and the checkpoint that hold a step's dead letters small."""

    rollouts: RolloutRules = field(default_factory=RolloutRules)
    """When a rollout is over."""
    credit: CreditRules = field(default_factory=CreditRules)
    """How advantages follow from rewards."""


@dataclass(frozen=True, slots=True)
class ClosedBatch:
    """What a step trains and what it lists."""

    candidates: list[Candidate]
    drops: list[DroppedSample]
    closed_by: str
    """`count`, `age` or `drops`."""


@dataclass(slots=True)
class _Waiting:
    candidate: Candidate
    since_seconds: float
    """When the turn's first revision came."""
    arrived_seconds: float
    """When this one came."""
    ready_seconds: float | None = None
    """When its rollout was found to be over; a batch does not age by what it had to wait for."""


class Batcher:
    """See the module's docstring. Times are monotonic seconds, given by the caller."""

    def __init__(
        self,
        rules: BatchRules,
        ledger: TurnLedger,
        *,
        current_version: int,
        baselines: UserBaselines | None = None,
    ) -> None:
        """`baselines` are needed for advantages beside them, and move on with every batch."""
        if (rules.credit.mode is AdvantageMode.USER_BASELINE) != (baselines is not None):
            raise ValueError(f"advantages of mode {rules.credit.mode.value} and baselines={baselines}")
        self._baselines = baselines
        self._now_seconds = 0.0
        """The latest time that the batcher was told."""
        self._rules = rules
        self._ledger = ledger
        self._current_version = current_version
        self._waiting: dict[str, _Waiting] = {}
        self._drops: list[DroppedSample] = []
        self._drops_since: float | None = None
        self._num_dead_letters = 0
        self._dead_letter_bytes = 0
        self.drop_counts: Counter[str] = Counter()
        """Drops by reason, ever. Part of the checkpoint."""

    # -- what comes in

    def add(self, candidate: Candidate, now_seconds: float) -> None:
        """Takes in a candidate."""
        self._now_seconds = now_seconds
        turn = candidate.turn_id
        left = self._ledger.find(turn)
        if left is not None and left.revision is None:
            self._drop(candidate, DropReason.ALREADY_TRAINED, now_seconds)
            return
        if left is not None and left.revision is not None and candidate.revision.order <= left.revision:
            self._drop(candidate, DropReason.SUPERSEDED, now_seconds, "a later revision was dropped before")
            return
        held = self._waiting.get(turn)
        if held is not None and candidate.revision.order <= held.candidate.revision.order:
            self._drop(candidate, DropReason.SUPERSEDED, now_seconds, f"by sample {held.candidate.sample.sample_id}")
            return
        if held is not None:
            superseded = f"by sample {candidate.sample.sample_id}"
            self._drop(held.candidate, DropReason.SUPERSEDED, now_seconds, superseded)
            del self._waiting[turn]
        since = now_seconds if held is None else held.since_seconds  # waiting since the turn's first revision came
        ready = since if candidate.rollout is None else held.ready_seconds if held is not None else None
        self._waiting[turn] = _Waiting(candidate, since, now_seconds, ready)
        self._expire(now_seconds)

    def remove(self, turn_id: str, ref: RecordReference, now_seconds: float) -> None:
        """A tombstone: the turn's sample must not be trained. Nothing happens when none waits."""
        held = self._waiting.pop(turn_id, None)
        if held is not None:
            self._drop(held.candidate, DropReason.TOMBSTONE, now_seconds, f"removed by {ref}")

    def drop(self, dropped: DroppedSample, now_seconds: float) -> None:
        """Lists a sample that never became a candidate."""
        self._drops.append(dropped)
        self.drop_counts[dropped.reason.value] += 1
        if self._drops_since is None:
            self._drops_since = now_seconds

    def dead_letter(self, size_bytes: int, now_seconds: float) -> None:
        """A record that is no sample waits for a step that announces it."""
        self._num_dead_letters += 1
        self._dead_letter_bytes += size_bytes
        if self._drops_since is None:
            self._drops_since = now_seconds

    def forget_before(self, seconds: float) -> None:
        """Forgets users who were not heard of since this time in seconds since 1970."""
        if self._baselines is not None:
            self._baselines.forget_before(seconds)

    @property
    def baselines(self) -> dict[str, tuple[float, float]]:
        """Every user's average reward, for the checkpoint; empty when there are none."""
        return {} if self._baselines is None else dict(self._baselines.averages)

    def set_version(self, current_version: int, now_seconds: float) -> None:
        """The weights moved on: samples grow older."""
        self._current_version = current_version
        self._expire(now_seconds)

    # -- what goes out

    @property
    def have(self) -> int:
        """What counts toward `batch_size`."""
        return self._count([candidate for unit in self._ready() for candidate in unit])

    @property
    def num_waiting(self) -> int:
        """All samples that are held, with signal or without, of rollouts that are over or not."""
        return len(self._waiting)

    def waiting(self) -> list[Candidate]:
        """What is held now, oldest first."""
        return [waiting.candidate for waiting in self._waiting.values()]

    def closes(self, now_seconds: float) -> str | None:
        """What closes the batch now: `count`, `age`, `drops`, or None."""
        self._now_seconds = now_seconds
        ready = [candidate for unit in self._ready() for candidate in unit]
        waiting_since = [self._ready_since(candidate, now_seconds) for candidate in ready]
        if self._count(ready) >= self._rules.batch_size:
            return "count"
        num_drops = len(self._drops) + sum(not self._has_signal(each) for each in ready)
        if num_drops + self._num_dead_letters >= self._rules.max_drops:
            return "drops"
        if self._dead_letter_bytes >= self._rules.max_dead_letter_bytes:
            return "drops"
        if self._drops_since is not None:
            waiting_since.append(self._drops_since)
        if waiting_since and now_seconds - min(waiting_since) >= self._rules.max_batch_age_seconds:
            return "age"
        return None

    def close(self, closed_by: str, now_seconds: float, wall_seconds: float) -> ClosedBatch:
        """Takes the oldest effective samples, about `batch_size`, and everything that is to be listed.

        A rollout, or a group, is never torn apart: the last one may bring more than fit. From here on their turns count
        as trained: what becomes of the step, they are not trained again.
        """
        self._now_seconds = now_seconds
        chosen: list[Candidate] = []
        without_signal: list[Candidate] = []
        for unit in self._ready():
            effective = [candidate for candidate in unit if self._has_signal(candidate)]
            if effective and len(chosen) >= self._rules.batch_size:
                continue  # whole, until the next batch
            chosen += effective
            without_signal += [candidate for candidate in unit if not self._has_signal(candidate)]
        if self._baselines is not None:
            chosen = beside_baselines(chosen, self._baselines, wall_seconds)
            without_signal += [candidate for candidate in chosen if not candidate.sample.has_signal]
            chosen = [candidate for candidate in chosen if candidate.sample.has_signal]
        for candidate in chosen:
            del self._waiting[candidate.turn_id]
            self._ledger.add(LedgerEntry(candidate.turn_id, wall_seconds))
        for candidate in without_signal:
            del self._waiting[candidate.turn_id]
            detail = f"reward {candidate.reward:g}" if candidate.reward else ""
            self._drop(candidate, DropReason.ZERO_ADVANTAGE, now_seconds, detail)
            self._ledger.add(LedgerEntry(candidate.turn_id, wall_seconds, candidate.revision.order))
        drops, self._drops, self._drops_since = self._drops, [], None
        self._num_dead_letters = self._dead_letter_bytes = 0
        return ClosedBatch(chosen, drops, closed_by)

    # -- inside

    def _count(self, ready: list[Candidate]) -> int:
        effective = [candidate for candidate in ready if self._has_signal(candidate)]
        return len(effective) + (_sessions_without_signal(ready, effective) if self._rules.at_least_one else 0)

    def _ready(self) -> list[list[Candidate]]:
        """What may be trained now, in pieces that must not be torn apart, with rewards and without stale tokens."""
        arrivals = [Arrival(waiting.candidate, waiting.arrived_seconds) for waiting in self._waiting.values()]
        pieces = units(arrivals, self._now_seconds, self._rules.rollouts)
        return [[self._fresh(candidate) for candidate in credited(unit, self._rules.credit)] for unit in pieces]

    def _ready_since(self, candidate: Candidate, now_seconds: float) -> float:
        waiting = self._waiting[candidate.turn_id]
        if waiting.ready_seconds is None:
            waiting.ready_seconds = now_seconds
        return waiting.ready_seconds

    def _has_signal(self, candidate: Candidate) -> bool:
        return may_have_signal(candidate, self._rules.credit)

    def _fresh(self, candidate: Candidate) -> Candidate:
        sample = candidate.sample
        stale = stale_tokens(
            candidate.version_spans, sample.response_ids.size, self._current_version, self._rules.max_age_versions
        )
        if not stale.any():
            return candidate
        return replace(candidate, sample=sample.without_tokens(stale), stale_tokens=int(stale.sum()))

    def _expire(self, now_seconds: float) -> None:
        for turn, waiting in list(self._waiting.items()):
            candidate = waiting.candidate
            newest = candidate.newest_version if candidate.version_spans else candidate.oldest_version
            if is_too_old(newest, self._current_version, self._rules.max_age_versions):
                del self._waiting[turn]
                versions = age(newest, self._current_version)
                detail = f"{versions} versions old, but max_age_versions is {self._rules.max_age_versions}"
                self._drop(candidate, DropReason.TOO_OLD, now_seconds, detail)

    def _drop(self, candidate: Candidate, reason: DropReason, now_seconds: float, detail: str = "") -> None:
        self.drop(
            DroppedSample(
                sample_id=candidate.sample.sample_id,
                turn_id=candidate.turn_id,
                ref=candidate.ref,
                reason=reason,
                detail=detail,
            ),
            now_seconds,
        )


def _sessions_without_signal(ready: Iterable[Candidate], effective: Iterable[Candidate]) -> int:
    return len({candidate.session_id for candidate in ready} - {candidate.session_id for candidate in effective})
