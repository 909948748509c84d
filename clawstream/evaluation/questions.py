"""Questions whose answers can be checked without a model, from a TOML file.

`[[training]]` and `[[held_out]]` tables each hold a `question` and a list of `facts`.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clawstream.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Question:
    """A question whose answer can be checked without a model."""

    text: str
    """What the user asks."""
    facts: tuple[str, ...]
    """Regular expressions; a correct answer holds at least one, whatever the case."""

    def is_answered_by(self, answer: str) -> bool:
        """Whether `answer` holds the fact. A coarse check: it does not see what else the answer claims."""
        return any(re.search(fact, answer, re.IGNORECASE) for fact in self.facts)


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """What one file holds."""

    training: tuple[Question, ...]
    """Asked during training, again and again. May be empty."""
    held_out: tuple[Question, ...]
    """Asked only to measure."""


def load_questions(file: Path) -> QuestionSet:
    """Reads a question file. Raises SettingsError naming what is wrong, also a held-out question that is trained."""
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
        training, held_out = (
            tuple(_question(entry) for entry in document.get(part, [])) for part in ("training", "held_out")
        )
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError, re.error) as error:
        raise SettingsError(f"{file}: not a question file: {type(error).__name__}: {error}") from error
    if not held_out:
        raise SettingsError(f"{file}: has no [[held_out]] questions")
    both = {question.text for question in training} & {question.text for question in held_out}
    if both:
        raise SettingsError(f"{file}: asked in training and held out: {sorted(both)}")
    return QuestionSet(training, held_out)


def _question(entry: Mapping[str, Any]) -> Question:
    for fact in entry["facts"]:
        re.compile(fact)
    return Question(str(entry["question"]), tuple(entry["facts"]))
