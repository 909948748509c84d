"""Finds the turn that a request follows. Pure: the index is asked through `TurnLookup`.

The answer is what survives a client's rewriting, so the parent is the newest of our answers among the request's
assistant messages. Several turns may have given the same answer; they are ranked, and what remains equal is recorded
as ambiguous. docs/sessions.md holds every decision as a table, with a test for each row.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from schemas.events.turn import ParentEvidence
from services.gateway.conversation_view import ConversationView, SeenAnswer
from services.gateway.known_turn import KnownTurn


class TurnLookup(Protocol):
    """The turn index, for one principal. Every list is newest first and bounded."""

    def by_answer(self, answer_key: str) -> Sequence[KnownTurn]:
        """Turns that gave this answer."""
        ...

    def by_session(self, session_id: str) -> Sequence[KnownTurn]:
        """Newest turns of a session."""
        ...

    def by_hint(self, hint_key: str) -> Sequence[KnownTurn]:
        """Newest turns whose request carried this hint."""
        ...

    def children_of(self, turn_id: str) -> Sequence[KnownTurn]:
        """Turns whose parent is this one."""
        ...


@dataclass(frozen=True, slots=True)
class Found:
    """Where a request belongs."""

    parent: KnownTurn | None
    """The turn that it follows."""
    answer: SeenAnswer | None
    """The parent's answer in the request; None when the request no longer holds it."""
    session_id: str | None
    """None starts a new session."""
    hidden: frozenset[int]
    """Positions of assistant messages that answered the harness, not the user."""
    evidence: ParentEvidence


@dataclass(frozen=True, slots=True, order=True)
class _Rank:
    """Better candidates compare greater."""

    same_session: bool
    same_hint: bool
    same_trace: bool
    agreeing_ancestors: int
    disagreeing_ancestors: int
    """Negative number of them."""
    shared_messages: int
    unshared_messages: int
    """Negative number of the candidate's messages that the request lacks."""

    @property
    def has_something_in_common(self) -> bool:
        return (
            self.same_session
            or self.same_hint
            or self.same_trace
            or self.agreeing_ancestors > 0
            or self.shared_messages > 0
        )


@dataclass(frozen=True, slots=True)
class _Match:
    turn: KnownTurn
    candidates: int
    ambiguous: bool


def find_place(view: ConversationView, lookup: TurnLookup) -> Found:
    """Session and parent of a request."""
    hidden = {answer.position for answer in view.answers if answer.silent}
    side_session: str | None = None
    for answer in reversed(view.answers):
        if answer.empty or answer.silent:
            continue
        match = _best(view, answer, lookup)
        if match is None:
            continue
        if not match.turn.is_main:
            if not _has_user_message_after(view, answer.position) and not view.answers_summary(answer.position):
                return _found(view, match, answer, hidden)
            hidden.add(answer.position)
            side_session = side_session or match.turn.session_id
            continue
        return _found(view, match, answer, hidden)
    return _without_answer(view, lookup, frozenset(hidden), side_session)


def _found(view: ConversationView, match: _Match, answer: SeenAnswer, hidden: set[int]) -> Found:
    return Found(
        parent=match.turn,
        answer=answer,
        session_id=view.asserted_session_id or match.turn.session_id,
        hidden=frozenset(hidden),
        evidence=ParentEvidence(rule="answer", candidates=match.candidates, ambiguous=match.ambiguous),
    )


def _best(view: ConversationView, answer: SeenAnswer, lookup: TurnLookup) -> _Match | None:
    candidates = lookup.by_answer(answer.key)
    if not candidates:
        return None
    earlier = [seen.key for seen in reversed(view.answers) if seen.position < answer.position]
    messages = view.message_keys(before=answer.position)
    ranked = [(_rank(view, candidate, earlier, messages), candidate) for candidate in candidates]
    accepted = [(rank, turn) for rank, turn in ranked if answer.distinctive or rank.has_something_in_common]
    if not accepted:
        return None
    top = max(rank for rank, _ in accepted)
    equal = [turn for rank, turn in accepted if rank == top]
    chosen = equal[0] if len(equal) == 1 else _among_equals(view, equal, lookup)
    return _Match(turn=chosen, candidates=len(candidates), ambiguous=len(equal) > 1)


def _rank(view: ConversationView, turn: KnownTurn, earlier: Sequence[str], messages: Sequence[str]) -> _Rank:
    agreeing = _agreeing(turn.ancestor_answer_keys, earlier)
    shared = (Counter(turn.message_keys) & Counter(messages)).total()
    return _Rank(
        same_session=view.asserted_session_id is not None and turn.session_id == view.asserted_session_id,
        same_hint=view.hint_key is not None and turn.session_hint == view.hint_key,
        same_trace=view.trace_id is not None and turn.trace_id == view.trace_id,
        agreeing_ancestors=agreeing,
        disagreeing_ancestors=agreeing - len(turn.ancestor_answer_keys),
        shared_messages=shared,
        unshared_messages=shared - len(turn.message_keys),
    )


def _agreeing(ancestors: Sequence[str], earlier: Sequence[str]) -> int:
    """How many ancestors' answers stand in the request in order, nearest first. Clients invent some between."""
    agreeing = 0
    start = 0
    for key in ancestors:
        try:
            start = earlier.index(key, start) + 1
        except ValueError:
            continue
        agreeing += 1
    return agreeing


def _among_equals(view: ConversationView, equal: Sequence[KnownTurn], lookup: TurnLookup) -> KnownTurn:
    """One that this very request followed before (a retry), else one that nothing followed yet, else the newest.

    Two chats that began with the same words so stay two chats.
    """
    request = view.newest_message_keys
    childless: KnownTurn | None = None
    for turn in equal:
        children = lookup.children_of(turn.turn_id)
        if any(child.message_keys == request for child in children):
            return turn
        if not children and childless is None:
            childless = turn
    return childless or equal[0]


def _without_answer(
    view: ConversationView, lookup: TurnLookup, hidden: frozenset[int], side_session: str | None
) -> Found:
    """No answer of ours is left: a first request, its retry, a compaction, or a client that rewrites answers."""
    session_id = view.asserted_session_id
    rule = "none"
    turns: Sequence[KnownTurn] = ()
    if session_id is not None:
        rule = "session_header"
        turns = lookup.by_session(session_id)
    elif view.hint_key is not None:
        turns = _related(view, lookup.by_hint(view.hint_key))
        if turns:
            rule = "session_hint"
            session_id = turns[0].session_id
    if session_id is None and view.summary_key is not None:
        given = lookup.by_answer(view.summary_key)
        # One that was asked for without our answers knows no conversation itself.
        summaries = [turn for turn in given if not turn.is_main and turn.parent_turn_id is not None]
        if summaries:
            rule = "summary"
            session_id = summaries[0].session_id
            turns = lookup.by_session(session_id)
    parent = next((turn for turn in turns if turn.is_main), None) if view.compacted else None
    return Found(
        parent=parent,
        answer=None,
        session_id=session_id or side_session,
        hidden=hidden,
        evidence=ParentEvidence(rule=rule, candidates=len(turns), ambiguous=False),
    )


def _related(view: ConversationView, turns: Sequence[KnownTurn]) -> Sequence[KnownTurn]:
    """A hint alone joins no conversations: applications send one cache key for all their users."""
    if view.compacted:
        return turns
    messages = set(view.message_keys())
    return [turn for turn in turns if messages.intersection(turn.message_keys)]


def _has_user_message_after(view: ConversationView, position: int) -> bool:
    return any(seen.view.role == "user" and seen.view.is_evidence for seen in view.messages_after(position))
