"""What the settings of one process need of another's: two may each be right, and together nothing is learned."""

from dataclasses import dataclass
from enum import StrEnum


class Provision(StrEnum):
    """What a process makes, as far as others must be set to match it."""

    REWARD = "reward"
    """Samples with rewards."""
    TEACHER = "teacher"
    """Samples with a teacher's log-probs, or with what the trainer's own teacher needs."""
    TEACHER_TOP = "teacher_top"
    """And with the teacher's likeliest ids."""
    STUDENT_TOP = "student_top"
    """And with the student's likeliest ids."""
    OWN_TEACHER = "own_teacher"
    """A teacher in the trainer's memory, or a loss that asks for none."""


@dataclass(frozen=True, slots=True)
class Dependence:
    """Something that at least one process of a service has to make, where the system runs any."""

    service: str
    """Who makes it."""
    provision: Provision
    problem: str
    """What to say when nobody does: `field: what, and what to do`."""
