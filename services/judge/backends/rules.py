"""Judges by rules: patterns on what the user wrote, and the exit codes of tools."""

import re
from collections.abc import Sequence
from typing import Final

from clawstream.errors import SettingsError
from schemas.events import NextStateEvent
from schemas.events.base import Message
from services.judge.backends.interface import Abstention, Opinion
from services.judge.evidence import message_text, user_text

_EXIT_CODE: Final = re.compile(r"(?i)\bexit(?:ed)?(?: with)?(?:[ _-]?(?:code|status))\b\W{0,4}?(-?\d+)")


class RulesBackend:
    """The first rule that matches what the user wrote decides; without one, the exit code of the last tool."""

    def __init__(self, rules: Sequence[tuple[str, int]]) -> None:
        """`rules` are pairs of a regular expression and a verdict. Raises SettingsError, naming every wrong one."""
        problems: list[str] = []
        self._rules: list[tuple[re.Pattern[str], int]] = []
        for pattern, verdict in rules:
            if verdict not in (-1, 0, 1):
                problems.append(f"{pattern!r}: the verdict must be 1, 0 or -1, not {verdict}")
                continue
            try:
                self._rules.append((re.compile(pattern), verdict))
            except re.error as error:
                problems.append(f"{pattern!r}: {error}")
        if problems:
            raise SettingsError("judge rules: " + "; ".join(problems))

    async def judge(self, next_state: NextStateEvent) -> Opinion:
        """Abstains when neither a rule nor an exit code says anything."""
        text = user_text(next_state.following_messages)
        for pattern, verdict in self._rules:
            if text and pattern.search(text):
                return Opinion(verdict=verdict)
        code = last_exit_code(next_state.following_messages)
        if code is not None:
            return Opinion(verdict=1 if code == 0 else -1)
        return Opinion(abstention=Abstention.NO_RULE)

    async def close(self) -> None:
        """Nothing to release."""


def last_exit_code(messages: Sequence[Message]) -> int | None:
    """The exit code that the last tool message with one reports (`exit code 1`, `exited with status: 0`)."""
    for message in reversed(messages):
        if message.get("role") != "tool":
            continue
        codes = _EXIT_CODE.findall(message_text(message))
        if codes:
            return int(codes[-1])
    return None
