"""Which dead letters are meant. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from clawstream.dead_letters.letter import Letter
from clawstream.errors import SettingsError

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


@dataclass(frozen=True, slots=True)
class Selection:
    """Everything that is given must hold; an empty part holds for all."""

    names: Sequence[str] = ()
    """Letters by name, such as `judge/3@17`."""
    reasons: Sequence[str] = ()
    """Reasons."""
    since: datetime | None = None
    """Buried then or later."""
    until: datetime | None = None
    """Buried before."""

    @property
    def is_empty(self) -> bool:
        """Whether it means every letter."""
        return not self.names and not self.reasons and self.since is None and self.until is None

    def of(self, letters: Sequence[Letter]) -> list[Letter]:
        """Those that are meant, in their order."""
        return [letter for letter in letters if self._means(letter)]

    def _means(self, letter: Letter) -> bool:
        return (
            (not self.names or letter.name in self.names)
            and (not self.reasons or letter.reason in self.reasons)
            and (self.since is None or letter.buried_at >= self.since)
            and (self.until is None or letter.buried_at < self.until)
        )


def moment(text: str, now: datetime) -> datetime:
    """A time as people say it: `2h` (ago; also s, m, d) or ISO 8601, in UTC unless it says otherwise.

    Raises SettingsError.
    """
    ago = re.fullmatch(r"(\d+)([smhd])", text.strip())
    if ago is not None:
        return now - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
    try:
        time = datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise SettingsError(f"{text!r} is no time: write 30m, 2h or 7d for so long ago, or 2026-03-01T09:15") from error
    return time if time.tzinfo is not None else time.replace(tzinfo=now.tzinfo)
