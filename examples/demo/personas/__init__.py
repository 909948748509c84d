"""People to talk to: one file each. A persona says what it likes and how it says so; it knows nothing of training."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from clawstream.evaluation.questions import Question


@dataclass(frozen=True, slots=True)
class Reaction:
    """What a person makes of an answer."""

    satisfied: bool
    """Whether the answer is as this person wants it. Only the report reads it, never the system."""
    correct: bool
    """Whether the answer holds the fact."""
    reply: str
    """What the person says: the only thing the system sees."""


@dataclass(frozen=True, slots=True)
class Persona:
    """A scripted user."""

    name: str
    """How the command line knows it."""
    description: str
    """One sentence for the report."""
    questions_file: str
    """Name of the question file beside this package."""
    max_answer_tokens: int
    """The user's client asks for at most so many tokens."""
    react: Callable[[Question, str, bool, Random], Reaction]
    """(question, answer, finished, random) -> reaction; `finished` is False when the token cap ended the answer."""


def personas() -> dict[str, Persona]:
    """All personas by name."""
    from examples.demo.personas.no_bullets import NO_BULLETS
    from examples.demo.personas.terse import TERSE

    return {persona.name: persona for persona in (TERSE, NO_BULLETS)}
