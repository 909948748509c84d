"""Word problems with their answers: JSON lines with the fields of GSM8K (`question`, `answer` ending in `#### 42`).

`flawed_solution` and `flawed_step` are ours: a pupil's wrong work and the wrong number in it. A public file has
neither: then the pupil's work is the right one with a wrong last number.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clawstream.errors import SettingsError

SHIPPED_FILE: Final = Path(__file__).with_name("problems.jsonl")
_NUMBER: Final = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_CALCULATION: Final = re.compile(r"<<[^>]*>>")
"""GSM8K's calculator annotations."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem."""

    question: str
    solution: str
    """Right steps, without the last line."""
    answer: float
    """The right number."""
    flawed_solution: str
    """What a pupil handed in, with a mistake."""
    flawed_answer: float
    """What the pupil came to."""
    flawed_step: str
    """The number in the pupil's work that is wrong."""


def load_problems(file: Path = SHIPPED_FILE, limit: int | None = None) -> list[Problem]:
    """The first `limit` problems. Raises SettingsError naming the line."""
    problems: list[Problem] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if limit is not None and len(problems) == limit:
            break
        if not line.strip():
            continue
        try:
            problems.append(_problem(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise SettingsError(f"{file}:{number}: {type(error).__name__}: {error}") from error
    if not problems:
        raise SettingsError(f"{file}: no problems")
    return problems


def last_number(text: str) -> float | None:
    """The last number in a text; thousands may be separated by commas. None when there is none."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def numbers(text: str) -> set[float]:
    """All numbers in a text."""
    return {float(one.replace(",", "")) for one in _NUMBER.findall(text)}


def _problem(entry: dict[str, str]) -> Problem:
    solution, answer = _parts(entry["answer"])
    if "flawed_solution" in entry:
        flawed, flawed_answer = _parts(entry["flawed_solution"])
        step = entry["flawed_step"]
    else:
        flawed_answer = answer + 1
        step = f"{flawed_answer:g}"
        flawed = f"{solution}\nSo the answer is {step}."
    return Problem(entry["question"], solution, answer, flawed, flawed_answer, step)


def _parts(text: str) -> tuple[str, float]:
    steps, separator, last = text.rpartition("####")
    number = last_number(last)
    if not separator or number is None:
        raise ValueError("the answer has no line '#### NUMBER'")
    return _CALCULATION.sub("", steps).strip(), number
