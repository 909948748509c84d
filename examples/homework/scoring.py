"""What an answer is worth: correctness against ground truth, style by rules that a reader can check. Pure."""

import re
from dataclasses import dataclass
from typing import Final

from examples.homework.problems import Problem, last_number, numbers

MAX_HOMEWORK_WORDS: Final = 80
_MARKUP: Final = re.compile(r"\*\*|__|^#{1,6} |\\\(|\\\[|\\boxed|```|^\s*(?:[-*•]|\d+[.)])\s", re.MULTILINE)
_ROBOT: Final = re.compile(
    r"\b(?:certainly|as an ai|here(?:'s| is) (?:the|a|your)|let's break|step[- ]by[- ]step|to solve this|therefore|"
    r"in conclusion|thus|hence|we can (?:see|calculate)|i hope this helps|let me know)\b",
    re.IGNORECASE,
)
_FIRST_PERSON: Final = re.compile(r"\b(?:i|i'm|i've|i'd|my|me)\b", re.IGNORECASE)
_FRIENDLY: Final = re.compile(
    r"\b(?:great|good|nice|well done|excellent|super|wonderful|keep (?:it up|going)|almost|proud|thank you|"
    r"you (?:did|set|used|were|are|have|started) (?:\w+ ){0,3}(?:well|right|correctly|on track)|you can)\b",
    re.IGNORECASE,
)
_HARSH: Final = re.compile(
    r"\b(?:terrible|stupid|lazy|bad work|awful|careless|failed|fail|disappointing)\b", re.IGNORECASE
)
_SAYS_WRONG: Final = re.compile(
    r"\b(?:incorrect|wrong|not (?:quite |entirely )?(?:right|correct)|isn't (?:quite )?(?:right|correct)|mistake|error|"
    r"should (?:be|have been)|small slip)\b",
    re.IGNORECASE,
)
_SAYS_RIGHT: Final = re.compile(r"\b(?:correct|right|perfect|spot on|well done)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Score:
    """Of one answer."""

    correct: bool
    """Against ground truth."""
    style_faults: tuple[str, ...]
    """What is not as it was asked for, as the user says it; empty when all is well."""

    @property
    def in_style(self) -> bool:
        """Whether the form is as wanted."""
        return not self.style_faults


def score_homework(problem: Problem, answer: str, finished: bool) -> Score:
    """Right: its last number is the answer. In the student's voice: short, first person, no markup, no set phrases."""
    faults = (
        (not finished or len(answer.split()) > MAX_HOMEWORK_WORDS, "That is too long, I would never write that much."),
        (bool(_MARKUP.search(answer)), "No lists, bold words or formulas please, I write plain sentences."),
        (bool(_ROBOT.search(answer)), "That sounds like a robot. It has to sound like me."),
        (not _FIRST_PERSON.search(answer), "Write it as me: say what I did."),
    )
    return Score(last_number(answer) == problem.answer, tuple(fault for applies, fault in faults if applies))


def score_grading(problem: Problem, is_flawed: bool, comment: str, finished: bool) -> Score:
    """Right: it says of the work what is true. In style: it names a number of the work that matters, and is friendly.

    In flawed work the number that matters is the wrong one or what should stand there; in right work any number of it.
    """
    says_wrong = bool(_SAYS_WRONG.search(comment))
    says_right = bool(_SAYS_RIGHT.search(comment)) and not says_wrong
    mentioned = numbers(comment)
    if is_flawed:
        telling = (numbers(problem.flawed_step) | (numbers(problem.solution) | {problem.answer})) - numbers(
            problem.question
        )
    else:
        telling = numbers(problem.solution) | {problem.answer}
    faults = (
        (not finished, "That is too long for a comment in the margin."),
        (not mentioned & telling, "Be specific: name the step that you mean."),
        (not _FRIENDLY.search(comment), "Be friendlier, say something encouraging."),
        (bool(_HARSH.search(comment)), "Do not be harsh with a child."),
    )
    return Score(says_wrong if is_flawed else says_right, tuple(fault for applies, fault in faults if applies))
