"""Puts the scores of a replay beside those that counted when it was made. Scores are kept in a file, not in memory."""

import sqlite3
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from clawstream.bus.interface import Bus, TopicPartition
from clawstream.bus.ranges import Progress, no_progress, ranges_since, read_ranges
from clawstream.bus.record_fetcher import RecordFetcher
from clawstream.codec import decode, decode_as
from clawstream.errors import DecodeError, OffsetNotRetained
from clawstream.topics import SCORES, SCORES_REPLAY, full_name
from schemas.events import NextStateEvent, ReplayScoreEvent, ScoreEvent
from schemas.events.base import RecordReference
from services.judge.replay.call_store import CallCosts, CallStore
from services.judge.replay.plan import ReplayPlan
from services.judge.replay.statistics import Agreement, agreement_of, disagreement

_TOLERANCE_MILLISECONDS = 300_000
_EXCERPT_CHARACTERS = 400

_SCHEMA = """
CREATE TABLE scores (side TEXT, next_state_id TEXT, spec_hash TEXT, explicit INTEGER, verdict INTEGER, epoch INTEGER,
    votes TEXT, turn_id TEXT, topic TEXT, partition INTEGER, position INTEGER, PRIMARY KEY (side, next_state_id));
"""
_BOTH = (
    "FROM scores AS new JOIN scores AS old ON old.next_state_id = new.next_state_id AND old.side = 'old' "
    "WHERE new.side = 'new' AND new.explicit = 0 AND old.explicit = 0"
)


@dataclass(frozen=True, slots=True)
class Disagreement:
    """One input that the two specs see differently."""

    next_state_id: str
    turn_id: str
    reference: str
    """Where the input is on the log."""
    old_verdict: int
    new_verdict: int
    old_votes: list[int | None]
    new_votes: list[int | None]
    answer: str
    """The beginning of what was judged; empty when it is no longer on the log."""
    following: str
    """The beginning of what followed."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Old against new."""

    name: str
    replay_id: str
    new_spec_hash: str
    old_spec_hashes: Mapping[str, int]
    """Specs whose scores counted before, with the number of inputs that each scored."""
    inputs_old: int
    """Inputs inside the bounds with a score that counted."""
    inputs_new: int
    """Inputs with a score of the replay."""
    inputs_both: int
    """Inputs with both."""
    explicit: int
    """Inputs of explicit evidence among those with both: the same under every spec."""
    agreement: Agreement
    worst: list[Disagreement]
    cost_old: CallCosts
    """Of all calls for the old specs that the ledger holds."""
    cost_new: CallCosts
    """Of all calls for the new spec."""
    paid_by_replay: CallCosts
    """Of those, what was called since the replay was made."""

    @property
    def coverage(self) -> float | None:
        """Share of the inputs with a score that counted which the replay scored too; None when there are none."""
        return self.inputs_both / self.inputs_old if self.inputs_old else None


def compare(
    bus: Bus, plan: ReplayPlan, store: CallStore, file: Path, *, worst: int, progress: Progress = no_progress
) -> Comparison:
    """Reads both topics. `file` is made anew. At most `worst` disagreements are told. Raises BusError."""
    file.unlink(missing_ok=True)
    database = sqlite3.connect(file, isolation_level=None)
    try:
        database.execute("PRAGMA journal_mode = OFF")
        database.execute("PRAGMA synchronous = OFF")
        database.executescript(_SCHEMA)
        _collect(bus, plan, database, progress)
        confusion: Counter[tuple[int | None, int | None]] = Counter()
        for old, new, count in database.execute(f"SELECT old.verdict, new.verdict, count(*) {_BOTH} GROUP BY 1, 2"):
            confusion[old, new] = count
        hashes = dict(
            database.execute("SELECT spec_hash, count(*) FROM scores WHERE side = 'old' GROUP BY 1 ORDER BY 2 DESC")
        )
        both = _number(
            database,
            "SELECT count(*) FROM scores AS new JOIN scores AS old ON old.next_state_id = new.next_state_id "
            "WHERE old.side = 'old' AND new.side = 'new'",
        )
        return Comparison(
            name=plan.name,
            replay_id=plan.replay_id,
            new_spec_hash=plan.spec.spec_hash,
            old_spec_hashes=hashes,
            inputs_old=_number(database, "SELECT count(*) FROM scores WHERE side = 'old'"),
            inputs_new=_number(database, "SELECT count(*) FROM scores WHERE side = 'new'"),
            inputs_both=both,
            explicit=both - _number(database, f"SELECT count(*) {_BOTH}"),
            agreement=agreement_of(confusion),
            worst=_worst(bus, database, worst),
            cost_old=_sum([store.costs(each) for each in hashes if each != plan.spec.spec_hash]),
            cost_new=store.costs(plan.spec.spec_hash),
            paid_by_replay=store.costs(plan.spec.spec_hash, plan.created_at.timestamp()),
        )
    finally:
        database.close()


def _collect(bus: Bus, plan: ReplayPlan, database: sqlite3.Connection, progress: Progress) -> None:
    """Of every input the score with the highest epoch that counted when the plan was made, and the replay's."""
    oldest = plan.oldest_milliseconds
    if oldest is None:
        return
    numbers = [number for number, (start, end) in plan.bounds.items() if start < end]
    reader = bus.reader()
    try:
        database.execute("BEGIN")
        for side, topic, since in (
            ("old", SCORES, oldest - _TOLERANCE_MILLISECONDS),
            ("new", SCORES_REPLAY, int(plan.created_at.timestamp() * 1000) - _TOLERANCE_MILLISECONDS),
        ):
            partitions = [TopicPartition(full_name(plan.namespace, topic), number) for number in numbers]
            for record in read_ranges(reader, ranges_since(reader, partitions, since), progress):
                try:
                    score = decode(record)
                except DecodeError:
                    continue
                if side == "new" and not (isinstance(score, ReplayScoreEvent) and score.replay_id == plan.replay_id):
                    continue
                if isinstance(score, ScoreEvent) and _is_meant(score, plan, side):
                    _put(database, side, score)
        database.execute("COMMIT")
    finally:
        reader.close()


def _is_meant(score: ScoreEvent, plan: ReplayPlan, side: str) -> bool:
    start, end = plan.bounds.get(score.next_state_ref.partition, (0, 0))
    return start <= score.next_state_ref.offset < end and (
        side == "new" or score.promotion_epoch <= plan.baseline_epoch
    )


def _put(database: sqlite3.Connection, side: str, score: ScoreEvent) -> None:
    database.execute(
        "INSERT INTO scores VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
        "spec_hash = excluded.spec_hash, explicit = excluded.explicit, verdict = excluded.verdict, "
        "epoch = excluded.epoch, votes = excluded.votes WHERE excluded.epoch > epoch",
        (
            side,
            score.next_state_id,
            score.judge_spec_hash,
            int(score.explicit),
            score.verdict,
            score.promotion_epoch,
            orjson.dumps([vote.verdict for vote in score.votes]).decode(),
            score.turn_id,
            score.next_state_ref.topic,
            score.next_state_ref.partition,
            score.next_state_ref.offset,
        ),
    )


def _worst(bus: Bus, database: sqlite3.Connection, limit: int) -> list[Disagreement]:
    """The worst first; of equals, in the order of their ids, so that two reports say the same."""
    database.create_function("disagreement", 4, _rank, deterministic=True)
    rows = database.execute(
        "SELECT new.next_state_id, new.turn_id, new.topic, new.partition, new.position, old.verdict, new.verdict, "
        f"old.votes, new.votes {_BOTH} AND old.verdict IS NOT NULL AND new.verdict IS NOT NULL "
        "AND old.verdict != new.verdict "
        "ORDER BY disagreement(old.verdict, new.verdict, old.votes, new.votes) DESC, new.next_state_id LIMIT ?",
        (limit,),
    ).fetchall()
    fetcher = RecordFetcher(bus)
    try:
        return [_disagreement(fetcher, row) for row in rows]
    finally:
        fetcher.close()


def _rank(old: int, new: int, old_votes: str, new_votes: str) -> float:
    return disagreement(old, new, orjson.loads(old_votes), orjson.loads(new_votes))


def _disagreement(fetcher: RecordFetcher, row: tuple[Any, ...]) -> Disagreement:
    reference = RecordReference(topic=row[2], partition=row[3], offset=row[4])
    answer = following = ""
    try:
        next_state = decode_as(fetcher.fetch(reference).result(), NextStateEvent)
    except (OffsetNotRetained, DecodeError):
        pass  # Retention took it: the verdicts are told without their words.
    else:
        answer = _words([next_state.response_message or {}])
        following = _words(next_state.following_messages)
    return Disagreement(
        next_state_id=row[0],
        turn_id=row[1],
        reference=str(reference),
        old_verdict=row[5],
        new_verdict=row[6],
        old_votes=orjson.loads(row[7]),
        new_votes=orjson.loads(row[8]),
        answer=answer,
        following=following,
    )


def _words(messages: list[dict[str, Any]]) -> str:
    texts = [message.get("content") for message in messages]
    text = "\n".join(each if isinstance(each, str) else orjson.dumps(each).decode() for each in texts if each)
    return text if len(text) <= _EXCERPT_CHARACTERS else text[:_EXCERPT_CHARACTERS] + "…"


def _number(database: sqlite3.Connection, query: str) -> int:
    return int(database.execute(query).fetchone()[0])


def _sum(costs: list[CallCosts]) -> CallCosts:
    return CallCosts(
        sum(each.calls for each in costs),
        sum(each.prompt_tokens for each in costs),
        sum(each.completion_tokens for each in costs),
        sum(each.seconds for each in costs),
    )
