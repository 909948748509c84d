"""A judge of your own: a code reviewer that believes the test run, and says what failed.

    [judge]
    spec = { backend = "examples.own_parts.judge:judge_test_run", hints = "judge" }

It is given the next state: the request that was answered (`request_messages`), the answer (`response_message`) and all
that followed (`following_messages`). It returns 1, 0 or -1, None to abstain, or a `Judgement` when it has hints too,
which the teacher may use. It may be `async`. An exception makes a dead letter of that one input. Its import path is in
the judge spec's hash and its code is not: give it another name when it judges differently.
"""

import re
from typing import Final

from schemas.events import NextStateEvent
from services.judge.backends.interface import Judgement
from services.judge.evidence import message_text

_SUMMARY: Final = re.compile(r"(?:(?P<failed>\d+) failed)?(?:, )?(?:(?P<passed>\d+) passed)? in [\d.]+ ?s")
_FAILURE: Final = re.compile(r"^FAILED (?P<test>\S+)(?: - (?P<why>.+))?$", re.MULTILINE)


def judge_test_run(next_state: NextStateEvent) -> Judgement:
    """+1 when pytest's last summary in the tools' results names no failure, -1 with a hint a failure when it does."""
    results = [message for message in next_state.following_messages if message.get("role") == "tool"]
    text = "\n".join(message_text(message) for message in results)
    summaries = [found for found in _SUMMARY.finditer(text) if found["failed"] or found["passed"]]
    if not summaries:
        return Judgement(verdict=None)
    if not summaries[-1]["failed"]:
        return Judgement(verdict=1)
    hints = tuple(
        f"The test {found['test']} must pass; before, it failed with: {found['why'] or 'no message'}"
        for found in _FAILURE.finditer(text)
    )
    return Judgement(verdict=-1, hints=hints)
