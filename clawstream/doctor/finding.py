"""The result of one check."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What a check found."""

    OK = "ok"
    """All is well."""
    NOTE = "note"
    """Works, but somebody should know."""
    MISSING = "missing"
    """Something that the system needs is not there."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor."""

    subject: str
    """What was looked at."""
    verdict: Verdict
    """What was found."""
    detail: str
    """The facts."""
    remedy: str = ""
    """What to do; empty when all is well."""
