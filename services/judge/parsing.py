"""Reads the verdict out of a judge model's text."""

import re
from typing import Final

from services.judge.backends.interface import Abstention, Opinion

_REASONING_END: Final = "</think>"
_REASONING_START: Final = "<think>"
_BOXED: Final = re.compile(r"\\boxed\s*\{([^{}]*)\}")
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
