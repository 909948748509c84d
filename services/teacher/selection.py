"""Which hint the teacher is given: by its text, by overlap with the student, or by a function of your own.

    def select(hints: Sequence[Hint], turn: TurnEvent) -> Hint | None: ...

It is given the hints that fit into the teacher's context, at least one; None means that none is good enough. It may be
`async`; a synchronous one runs on a thread. `examples/own_parts/hint_selector.py` is one.

Overlap (OpenClaw-RL upstream, "top-K select"): with S_t the student's k likeliest tokens at position t and T_{h,t} the
teacher's under hint h, O[h, t] is how many tokens S_t and T_{h,t} share. `sequence_optimal` takes the hint with the
largest sum over t, `token_optimal` the best hint at every t. A hint that the student could not follow from where it
stands overlaps little.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from clawstream.errors import SettingsError
from clawstream.import_path import import_callable
from schemas.events import TurnEvent
from schemas.events.score import Hint

Ids = npt.NDArray[np.int32]
HintSelector = Callable[[Sequence[Hint], TurnEvent], Awaitable[Hint | None]]


class OptimalSelection(StrEnum):
    """Selections that look at what teacher and student would say."""

    TOKEN = "token_optimal"
    SEQUENCE = "sequence_optimal"


def longest(hints: Sequence[Hint]) -> Hint:
    """The hint with the most characters; of equal ones the first. Source: OpenClaw-RL."""
    return max(hints, key=lambda hint: len(hint.text))


def shortest(hints: Sequence[Hint]) -> Hint:
    """The hint with the fewest characters; of equal ones the first."""
    return min(hints, key=lambda hint: len(hint.text))


def shortest_first(hint: Hint) -> int:
    """Orders candidates of the optimal selections. Equal ones keep their order."""
    return len(hint.text)


def text_selector(selection: str) -> HintSelector:
    """The selection `longest`, `shortest` or the one at an import path. Raises SettingsError for another."""
    by_length = {"longest": longest, "shortest": shortest}.get(selection)
    if by_length is not None:

        async def select_by_length(hints: Sequence[Hint], turn: TurnEvent) -> Hint | None:
            return by_length(hints)

        return select_by_length
    if ":" not in selection:
        known = ", ".join(["longest", "shortest", *OptimalSelection])
        raise SettingsError(f"hint selection {selection!r} is none of {known}, nor an import path package.module:name")
    function = import_callable(selection, "hint selection")

    async def select(hints: Sequence[Hint], turn: TurnEvent) -> Hint | None:
        found: Any
        if inspect.iscoroutinefunction(function):
            found = await function(hints, turn)
        else:
            found = await asyncio.to_thread(function, hints, turn)
        if found is not None and not isinstance(found, Hint):
            raise ValueError(f"{selection} returned {found!r}; a hint selector returns a Hint or None")
        return found

    return select


def overlap(student_top: Ids, teacher_top: Ids) -> npt.NDArray[np.int64]:
    """O[h, t] of the module's formula.

    `student_top` [tokens, k], `teacher_top` [hints, tokens, k]; the result is [hints, tokens].
    """
    same = np.equal(teacher_top[:, :, :, None], student_top[None, :, None, :])  # [hints, tokens, k, k]
    return np.asarray(np.count_nonzero(np.any(same, axis=-1), axis=-1), dtype=np.int64)


def hint_of_token(counts: npt.NDArray[np.int64], selection: OptimalSelection) -> Ids:
    """[tokens]: index of the hint for each token. `counts` is [hints, tokens]; of equal hints the first wins."""
    if selection is OptimalSelection.TOKEN:
        return cast("Ids", counts.argmax(axis=0).astype(np.int32))
    best = int(counts.sum(axis=1).argmax())
    return cast("Ids", np.full(counts.shape[1], best, dtype=np.int32))
