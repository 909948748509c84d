"""The stages that turn records of one topic into records of the next, and where each puts what it cannot handle."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from clawstream.topics import JUDGE_DLQ, NEXT_STATES, SAMPLES, SCORES, TEACHER_DLQ, TRAINER_DLQ


@dataclass(frozen=True, slots=True)
class Stage:
    """One of them. Topics are without namespace."""

    name: str
    """`judge`, `teacher` or `trainer`; a worker's consumer group is `<namespace>.<name>`."""
    input_topic: str
    """What it reads."""
    dead_letter_topic: str
    """Inputs that it could not handle."""


JUDGE: Final = Stage("judge", NEXT_STATES, JUDGE_DLQ)
TEACHER: Final = Stage("teacher", SCORES, TEACHER_DLQ)
TRAINER: Final = Stage("trainer", SAMPLES, TRAINER_DLQ)
STAGES: Final[Mapping[str, Stage]] = MappingProxyType({stage.name: stage for stage in (JUDGE, TEACHER, TRAINER)})
WORKER_STAGES: Final = (JUDGE, TEACHER)
"""Stages whose positions are a consumer group's; the trainer's live in its checkpoint."""
