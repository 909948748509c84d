"""A user who hates bullet points and numbered lists."""

from random import Random
from typing import Final

from clawstream.evaluation.preferences import has_list
from clawstream.evaluation.questions import Question
from examples.demo.personas import Persona, Reaction

THANKS: Final = ("Thanks, that reads well.", "Great, thank you.", "Perfect, exactly like that.")
NO_LISTS: Final = (
    "No lists please, I hate bullet points.",
    "Not a list again. Write it as plain sentences.",
    "No, I do not want bullet points.",
)
NO_ANSWER: Final = ("No, that is not an answer.", "That does not help me.", "No, that is not what I asked.")


def react(question: Question, answer: str, finished: bool, random: Random) -> Reaction:
    """A list is scolded whatever it says; prose must be about the question. Being cut off does not matter."""
    correct = question.is_answered_by(answer)
    if has_list(answer):
        return Reaction(satisfied=False, correct=correct, reply=random.choice(NO_LISTS))
    if not correct:
        return Reaction(satisfied=False, correct=False, reply=random.choice(NO_ANSWER))
    return Reaction(satisfied=True, correct=True, reply=random.choice(THANKS))


NO_BULLETS: Final = Persona(
    name="no-bullets",
    description="wants plain sentences, never a list",
    questions_file="questions_advice.toml",
    max_answer_tokens=96,
    react=react,
)
