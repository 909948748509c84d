"""What a user wants of an answer's form, as a check without a model. One's own: `--preference package.module:name`."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Final

from clawstream.errors import SettingsError
from clawstream.evaluation.questions import Question

TERSE_MAX_WORDS: Final = 20
"""What the terse user calls short."""

_LIST_LINE: Final = re.compile(r"(?m)^\s*(?:[-*•]|\d+[.)])\s+")


@dataclass(frozen=True, slots=True)
class Preference:
    """A wish."""

    name: str
    """How the command line knows it."""
    description: str
    """One sentence, for reports."""
    is_satisfied: Callable[[Question, str, bool], bool]
    """(question, answer, finished); `finished` is False when the token cap ended the answer."""


def is_one_short_sentence(answer: str) -> bool:
    """At most TERSE_MAX_WORDS words and one sentence. An empty answer is short, but no sentence."""
    words = answer.split()
    sentences = [part for part in re.split(r"[.!?]+(?:\s+|$)", answer.strip()) if part]
    return 0 < len(words) <= TERSE_MAX_WORDS and len(sentences) == 1


def has_list(answer: str) -> bool:
    """Whether a line begins like an item, or items are counted inside a line."""
    return bool(_LIST_LINE.search(answer)) or len(re.findall(r"\b[1-9][.)]\s", answer)) >= 2


TERSE: Final = Preference(
    name="terse",
    description=f"one sentence of at most {TERSE_MAX_WORDS} words",
    is_satisfied=lambda question, answer, finished: finished and is_one_short_sentence(answer),
)
NO_BULLETS: Final = Preference(
    name="no-bullets",
    description="plain sentences, never a list",
    is_satisfied=lambda question, answer, finished: bool(answer.strip()) and not has_list(answer),
)
SHIPPED: Final = {preference.name: preference for preference in (TERSE, NO_BULLETS)}


def load_preference(name: str) -> Preference:
    """One that is shipped, or one's own by `package.module:name`. Raises SettingsError."""
    if name in SHIPPED:
        return SHIPPED[name]
    module, separator, attribute = name.partition(":")
    if not separator:
        raise SettingsError(f"no preference {name!r}; there are {', '.join(SHIPPED)}, or package.module:name")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(f"preference {name!r}: {error}") from error
    if not isinstance(found, Preference):
        raise SettingsError(f"preference {name!r} is no {Preference.__module__}.Preference")
    return found
