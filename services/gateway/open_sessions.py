"""Sessions that this gateway serves: which turns nothing followed yet, and since when they are idle. Pure."""

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.gateway.known_turn import KnownTurn


@dataclass(slots=True)
class _OpenSession:
    last_activity_seconds: float
    waiting: dict[str, KnownTurn] = field(default_factory=dict[str, KnownTurn])
    """Main turns without any next state, by id."""


class OpenSessions:
    """Ordered by activity, so that looking for idle ones costs nothing for the others."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, _OpenSession] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def touch(self, session_id: str, now_seconds: float) -> None:
        """Something happened in a session."""
        self._touch(session_id, now_seconds)

    def add(self, turn: KnownTurn, now_seconds: float) -> None:
        """A main turn was finished: it waits for a next state."""
        self._touch(turn.session_id, now_seconds).waiting[turn.turn_id] = turn

    def followed(self, session_id: str, turn_id: str) -> KnownTurn | None:
        """A turn got a next state. Returns it if it waited for one."""
        session = self._sessions.get(session_id)
        return session.waiting.pop(turn_id, None) if session is not None else None

    def close(self, session_id: str) -> list[KnownTurn]:
        """Forgets a session and returns the turns that nothing followed."""
        session = self._sessions.pop(session_id, None)
        return list(session.waiting.values()) if session is not None else []

    def close_idle(self, before_seconds: float) -> list[KnownTurn]:
        """Forgets the sessions without activity since `before_seconds`; returns the turns that nothing followed."""
        ended: list[KnownTurn] = []
        while self._sessions:
            session_id, session = next(iter(self._sessions.items()))
            if session.last_activity_seconds >= before_seconds:
                break
            ended += self.close(session_id)
        return ended

    def reopen_idle(self, turns: Iterable[KnownTurn]) -> None:
        """Undoes `close_idle` for these turns: their sessions are the first to be found idle again."""
        for turn in turns:
            session = self._sessions.get(turn.session_id)
            if session is None:
                session = self._sessions[turn.session_id] = _OpenSession(-math.inf)
                self._sessions.move_to_end(turn.session_id, last=False)
            session.waiting[turn.turn_id] = turn

    def _touch(self, session_id: str, now_seconds: float) -> _OpenSession:
        session = self._sessions.setdefault(session_id, _OpenSession(now_seconds))
        session.last_activity_seconds = now_seconds
        self._sessions.move_to_end(session_id)
        return session
