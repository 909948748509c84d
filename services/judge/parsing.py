"""Reads the verdict, or the hint, out of a judge model's text."""

import re
from typing import Final

from services.judge.backends.interface import Abstention, HintOpinion, Opinion

_REASONING_END: Final = "</think>"
_REASONING_START: Final = "<think>"
_BOXED: Final = re.compile(r"\\boxed\s*\{([^{}]*)\}")
_HINT: Final = re.compile(r"\[HINT_START\](.*?)\[HINT_END\]", re.DOTALL)
_HINT_MARKER: Final = re.compile(r"\[HINT_(?:START|END)\]")
_SHORTEST_HINT_CHARACTERS: Final = 11
"""A judge's hint of fewer says nothing. Source: OpenClaw-RL keeps hints longer than 10."""
_VERDICTS: Final = {"1": 1, "+1": 1, "0": 0, "-1": -1}
_DASHES: Final = str.maketrans({"\N{MINUS SIGN}": "-", "\N{EN DASH}": "-", "\N{HYPHEN}": "-"})


def boxed_verdict(text: str) -> Opinion:
    r"""The verdict in `\boxed{}` after the reasoning, or the reason why there is none.

    Only what stands after the last end of reasoning counts: a model weighs verdicts there that it does not give.
    Reasoning that never ends holds no verdict. A value outside {1, 0, -1} abstains, and so do two different values:
    to guess which one was meant would let quoted text decide.
    """
    _, _, final = text.rpartition(_REASONING_END)
    if _REASONING_START in final:
        return Opinion(abstention=Abstention.UNPARSABLE)
    found = {match.strip().translate(_DASHES) for match in _BOXED.findall(final)}
    verdicts = {_VERDICTS.get(value) for value in found}
    if len(verdicts) > 1:
        return Opinion(abstention=Abstention.TWO_VERDICTS)
    verdict = verdicts.pop() if verdicts else None
    return Opinion(abstention=Abstention.UNPARSABLE) if verdict is None else Opinion(verdict=verdict)


def boxed_hint(text: str) -> HintOpinion:
    r"""What a hint vote says after its reasoning: `\boxed{1}` with one hint between markers, or `\boxed{-1}`.

    The decision counts by the rules of `boxed_verdict`, and 0 is none. A hint without the decision for it is not one;
    two different hints, or markers that do not pair, abstain: one of them may be quoted.
    """
    decision = boxed_verdict(text)
    if decision.abstention is not None:
        return HintOpinion(abstention=decision.abstention)
    if decision.verdict == -1:
        return HintOpinion(useful=False)
    if decision.verdict != 1:
        return HintOpinion(abstention=Abstention.UNPARSABLE)
    _, _, final = text.rpartition(_REASONING_END)
    hints = {" ".join(found.split()) for found in _HINT.findall(final)}
    if len(hints) > 1 or _HINT_MARKER.search(_HINT.sub("", final)) or any(map(_HINT_MARKER.search, hints)):
        return HintOpinion(abstention=Abstention.TWO_HINTS)
    hint = hints.pop() if hints else ""
    if len(hint) < _SHORTEST_HINT_CHARACTERS:
        return HintOpinion(abstention=Abstention.NO_HINT)
    return HintOpinion(useful=True, hint=hint)
