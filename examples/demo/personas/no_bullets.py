"""A user who hates bullet points and numbered lists."""

import re
from random import Random
from typing import Final

from examples.demo.personas import Persona, Reaction
from examples.demo.questions import Question

THANKS: Final = ("Thanks, that reads well.", "Great, thank you.", "Perfect, exactly like that.")
NO_LISTS: Final = (
    "No lists please, I hate bullet points.",
    "Not a list again. Write it as plain sentences.",
    "No, I do not want bullet points.",
)
NO_ANSWER: Final = ("No, that is not an answer.", "That does not help me.", "No, that is not what I asked.")

_LIST_LINE = re.compile(r"(?m)^\s*(?:[-*•]|\d+[.)])\s+")


def react(question: Question, answer: str, finished: bool, random: Random) -> Reaction:
    """A list is scolded whatever it says; prose must be about the question. Being cut off does not matter."""
    correct = question.is_answered_by(answer)
    if has_list(answer):
        return Reaction(satisfied=False, correct=correct, reply=random.choice(NO_LISTS))
    if not correct:
        return Reaction(satisfied=False, correct=False, reply=random.choice(NO_ANSWER))
    return Reaction(satisfied=True, correct=True, reply=random.choice(THANKS))


def has_list(answer: str) -> bool:
    """Whether a line begins like an item, or items are counted inside a line."""
    return bool(_LIST_LINE.search(answer)) or len(re.findall(r"\b[1-9][.)]\s", answer)) >= 2


NO_BULLETS: Final = Persona(
    name="no-bullets",
    description="wants plain sentences, never a list",
    questions_file="questions_advice.toml",
    max_answer_tokens=96,
    react=react,
)
