"""The questions that the scripted user asks, and how an answer is checked."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path


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
    """Questions of one persona."""

    training: tuple[Question, ...]
    """Asked during training, again and again."""
    held_out: tuple[Question, ...]
    """Asked only to measure."""


def load_questions(file: Path) -> QuestionSet:
    """Reads a question file. Raises ValueError when a held-out question is also asked in training."""
    document = tomllib.loads(file.read_text(encoding="utf-8"))
    training, held_out = (
        tuple(Question(entry["question"], tuple(entry["facts"])) for entry in document[part])
        for part in ("training", "held_out")
    )
    both = {question.text for question in training} & {question.text for question in held_out}
    if both:
        raise ValueError(f"{file}: asked in training and held out: {sorted(both)}")
    return QuestionSet(training, held_out)
