"""A terse user: one short sentence, and it has to be an answer."""

from random import Random
from typing import Final

from clawstream.evaluation.preferences import TERSE_MAX_WORDS, is_one_short_sentence
from clawstream.evaluation.questions import Question
from examples.demo.personas import Persona, Reaction

THANKS: Final = ("Thanks, exactly.", "Perfect, thank you.", "Great, just what I wanted.", "Yes, thanks.")
TOO_LONG: Final = (
    "Too long, one short sentence please.",
    "That is far too long. Be brief.",
    "No, too many words. Keep it short.",
    "Way too long, just one sentence.",
)
NO_ANSWER: Final = ("No, that is not an answer.", "That is wrong.", "No, that does not answer my question.")


def react(question: Question, answer: str, finished: bool, random: Random) -> Reaction:
    """Long answers are scolded first; a short one must also hold the fact."""
    correct = question.is_answered_by(answer)
    if not finished or not is_one_short_sentence(answer):
        return Reaction(satisfied=False, correct=correct, reply=random.choice(TOO_LONG))
    if not correct:
        return Reaction(satisfied=False, correct=False, reply=random.choice(NO_ANSWER))
    return Reaction(satisfied=True, correct=True, reply=random.choice(THANKS))


TERSE: Final = Persona(
    name="terse",
    description=f"wants one sentence of at most {TERSE_MAX_WORDS} words that answers the question",
    questions_file="questions_facts.toml",
    max_answer_tokens=64,
    react=react,
)
