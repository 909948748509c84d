"""Which samples make the next batch: a pure fold over candidates, with no clock and no I/O of its own.

- Of a turn the highest revision counts, whatever order they come in; lower ones are dropped as superseded.
- A turn is trained at most once per lineage; what comes later is listed, never trained.
- A batch closes on the number of *effective* samples, on the age of the oldest one, or on the number of drops (so
  that a stream of samples without signal moves the offsets too). Dead letters, which only a step announces, count as
  drops, and their bytes are bounded.
- Every sample that was added leaves exactly once: in a batch, or as a drop with its reason.

The batcher takes turns one by one. A joiner of rollouts (all turns of one attempt train together) belongs in front of
`add`: it holds back the candidates of a rollout until its end or a timeout.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from schemas.events.base import RecordReference
from schemas.events.train_step import DroppedSample, DropReason
from services.trainer.ages import age, is_too_old
from services.trainer.candidates import Candidate

RevisionOrder = tuple[int, bool, int]


@dataclass(slots=True)
class TurnLedger:
    """What is remembered of turns that have left the batcher. Part of the checkpoint."""

    trained: dict[str, float] = field(default_factory=dict[str, float])
    """Turn id to when it was trained, in seconds since 1970."""
    settled: dict[str, tuple[RevisionOrder, float]] = field(default_factory=dict[str, tuple[RevisionOrder, float]])
    """Turn id to the highest revision that was dropped for good, and when: a lower one must not be trained after it."""

    def forget_before(self, seconds: float) -> None:
        """Forgets turns that left earlier."""
        self.trained = {turn: when for turn, when in self.trained.items() if when >= seconds}
        self.settled = {turn: entry for turn, entry in self.settled.items() if entry[1] >= seconds}


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


class Batcher:
    """See the module's docstring. Times are monotonic seconds, given by the caller."""

    def __init__(self, rules: BatchRules, ledger: TurnLedger, *, current_version: int) -> None:
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
        turn = candidate.turn_id
        if turn in self._ledger.trained:
            self._drop(candidate, DropReason.ALREADY_TRAINED, now_seconds)
            return
        settled = self._ledger.settled.get(turn)
        if settled is not None and candidate.revision.order <= settled[0]:
            self._drop(candidate, DropReason.SUPERSEDED, now_seconds, "a later revision was dropped before")
            return
        held = self._waiting.get(turn)
        if held is not None and candidate.revision.order <= held.candidate.revision.order:
            self._drop(candidate, DropReason.SUPERSEDED, now_seconds, f"by sample {held.candidate.sample.sample_id}")
            return
        if held is not None:
            superseded = f"by sample {candidate.sample.sample_id}"
            self._drop(held.candidate, DropReason.SUPERSEDED, now_seconds, superseded)
            now_seconds = held.since_seconds  # the turn has waited since its first revision came
            del self._waiting[turn]
        self._waiting[turn] = _Waiting(candidate, now_seconds)
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

    def set_version(self, current_version: int, now_seconds: float) -> None:
        """The weights moved on: samples grow older."""
        self._current_version = current_version
        self._expire(now_seconds)

    # -- what goes out

    @property
    def have(self) -> int:
        """What counts toward `batch_size`."""
        effective = [waiting.candidate for waiting in self._waiting.values() if waiting.candidate.has_signal]
        return len(effective) + (len(self._sessions_without_signal(effective)) if self._rules.at_least_one else 0)

    @property
    def num_waiting(self) -> int:
        """All samples that are held, with signal or without."""
        return len(self._waiting)

    def waiting(self) -> list[Candidate]:
        """What is held now, oldest first."""
        return [waiting.candidate for waiting in self._waiting.values()]

    def closes(self, now_seconds: float) -> str | None:
        """What closes the batch now: `count`, `age`, `drops`, or None."""
        if self.have >= self._rules.batch_size:
            return "count"
        num_drops = len(self._drops) + sum(not w.candidate.has_signal for w in self._waiting.values())
        if num_drops + self._num_dead_letters >= self._rules.max_drops:
            return "drops"
        if self._dead_letter_bytes >= self._rules.max_dead_letter_bytes:
            return "drops"
        waiting_since = [waiting.since_seconds for waiting in self._waiting.values()]
        if self._drops_since is not None:
            waiting_since.append(self._drops_since)
        if waiting_since and now_seconds - min(waiting_since) >= self._rules.max_batch_age_seconds:
            return "age"
        return None

    def close(self, closed_by: str, now_seconds: float, wall_seconds: float) -> ClosedBatch:
        """Takes the oldest effective samples, at most `batch_size`, and everything that is to be listed.

        From here on their turns count as trained: what becomes of the step, they are not trained again.
        """
        effective = [w.candidate for w in self._waiting.values() if w.candidate.has_signal][: self._rules.batch_size]
        for candidate in effective:
            del self._waiting[candidate.turn_id]
            self._ledger.trained[candidate.turn_id] = wall_seconds
            self._ledger.settled.pop(candidate.turn_id, None)
        for turn, waiting in list(self._waiting.items()):
            if not waiting.candidate.has_signal:
                del self._waiting[turn]
                self._drop(waiting.candidate, DropReason.ZERO_ADVANTAGE, now_seconds)
                self._ledger.settled[turn] = (waiting.candidate.revision.order, wall_seconds)
        drops, self._drops, self._drops_since = self._drops, [], None
        self._num_dead_letters = self._dead_letter_bytes = 0
        return ClosedBatch(effective, drops, closed_by)

    # -- inside

    def _sessions_without_signal(self, effective: Iterable[Candidate]) -> set[str]:
        with_signal = {candidate.session_id for candidate in effective}
        return {w.candidate.session_id for w in self._waiting.values()} - with_signal

    def _expire(self, now_seconds: float) -> None:
        for turn, waiting in list(self._waiting.items()):
            candidate = waiting.candidate
            if is_too_old(candidate.oldest_version, self._current_version, self._rules.max_age_versions):
                del self._waiting[turn]
                versions = age(candidate.oldest_version, self._current_version)
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
