"""Where a score's hints come from: the user's own words, hint votes, and judges in code. No I/O."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from schemas.events import NextStateEvent
from schemas.events.score import Hint, HintVote
from services.judge.backends.interface import HintOpinion, Opinion
from services.judge.evidence import user_text


@dataclass(frozen=True, slots=True)
class HintSources:
    """What one look for hints gave."""

    hints: tuple[Hint, ...]
    """None, one, or (from code) several."""
    vote: HintVote | None
    """The vote; None for a judge in code, which has none of its own for hints."""

    @classmethod
    def of_vote(cls, number: int, opinion: HintOpinion, call_id: str | None) -> "HintSources":
        """A model's hint vote."""
        hints = (Hint(text=opinion.hint, source="judge", call_id=call_id),) if opinion.useful else ()
        vote = HintVote(vote=number, useful=opinion.useful, abstention=opinion.abstention, call_id=call_id)
        return cls(hints, vote)

    @classmethod
    def of_code(cls, opinion: Opinion) -> "HintSources":
        """What a judge in code said beside its verdict."""
        stripped = (text.strip() for text in opinion.hints)
        return cls(tuple(Hint(text=text, source="judge") for text in stripped if text), None)


def user_hints(next_state: NextStateEvent) -> list[Hint]:
    """What the user wrote next, verbatim."""
    text = user_text(next_state.following_messages).strip()
    return [Hint(text=text, source="user")] if text else []


def distinct_hints(hints: Sequence[Hint]) -> list[Hint]:
    """`hints` in order, each text once: letter case, white space and forms of one character make no other text."""
    if len(hints) < 2:
        return list(hints)
    first: dict[str, Hint] = {}
    for hint in hints:
        first.setdefault(" ".join(unicodedata.normalize("NFKC", hint.text).casefold().split()), hint)
    return list(first.values())
