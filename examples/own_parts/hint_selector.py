"""A hint selector of your own: the hint that has most to do with the request, and none that gives the answer away.

    [teacher.hint]
    selection = "examples.own_parts.hint_selector:closest_to_the_request"

It is given the hints that may be used and fit into the teacher's context, at least one, and the turn. It returns one of
them, a `Hint` of its own, or None when no hint is good enough: then the sample has no teacher's signal. It may be
`async`.
"""

import re
from collections.abc import Sequence
from typing import Final

from schemas.events import TurnEvent
from schemas.events.score import Hint

_WORD: Final = re.compile(r"\w{3,}")


def closest_to_the_request(hints: Sequence[Hint], turn: TurnEvent) -> Hint | None:
    """The hint with most words of the last request; of equal ones the shortest. Never one that quotes the answer."""
    request = next((m for m in reversed(turn.request_messages) if m.get("role") == "user"), {})
    asked = set(_WORD.findall(str(request.get("content")).lower()))
    answer = str(turn.response_message.get("content") or "").strip().lower()
    honest = [hint for hint in hints if not answer or answer not in hint.text.lower()]
    return max(
        honest,
        key=lambda hint: (len(asked & set(_WORD.findall(hint.text.lower()))), -len(hint.text)),
        default=None,
    )
