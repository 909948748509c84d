"""A terse user: one short sentence, and it has to be an answer."""

import re
from random import Random
from typing import Final

from examples.demo.personas import Persona, Reaction
from examples.demo.questions import Question

MAX_WORDS: Final = 20
"""What this user calls short."""

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


def is_one_short_sentence(answer: str) -> bool:
    """At most MAX_WORDS words and one sentence. An empty answer is short, but no sentence."""
    words = answer.split()
    sentences = [part for part in re.split(r"[.!?]+(?:\s+|$)", answer.strip()) if part]
    return 0 < len(words) <= MAX_WORDS and len(sentences) == 1


TERSE: Final = Persona(
    name="terse",
    description=f"wants one sentence of at most {MAX_WORDS} words that answers the question",
    questions_file="questions_facts.toml",
    max_answer_tokens=64,
    react=react,
)
