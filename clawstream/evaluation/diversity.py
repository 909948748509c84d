"""How much the answers to one question differ from each other. Pure.

Words are runs of letters and digits, in lower case. Both measures are 1 and 0 at best: a policy that says the same
whatever the seed has a distinct-n near 1/answers and a self-overlap of 1.
"""

import re
from collections.abc import Sequence
from itertools import combinations
from typing import Final

_WORD: Final = re.compile(r"\w+")


def words_of(text: str) -> list[str]:
    """Its words."""
    return _WORD.findall(text.lower())


def ngrams(text: str, n: int) -> list[tuple[str, ...]]:
    """All runs of `n` words, in order, repeated ones too."""
    words = words_of(text)
    return [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]


def distinct_n(texts: Sequence[str], n: int) -> float | None:
    """Number of different n-grams of all texts together over the number of all of them (Li et al. 2016, distinct-n).

    None when no text has an n-gram.
    """
    found = [gram for text in texts for gram in ngrams(text, n)]
    return len(set(found)) / len(found) if found else None


def self_overlap(texts: Sequence[str], n: int) -> float | None:
    """Mean over all pairs of texts of the Jaccard index of their sets of n-grams.

    A pair in which neither text has an n-gram counts 1 when the texts have the same words, else 0. None for fewer than
    two texts.
    """
    if len(texts) < 2:
        return None
    sets = [(set(ngrams(text, n)), words_of(text)) for text in texts]
    overlaps = [
        len(a & b) / len(a | b) if a or b else float(words_a == words_b)
        for (a, words_a), (b, words_b) in combinations(sets, 2)
    ]
    return sum(overlaps) / len(overlaps)
