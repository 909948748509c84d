"""What long work says of itself, on a terminal and in a log."""

import io
import threading

import pytest
from rich.console import Console

from clawstream.clock import ManualClock
from clawstream.durations import duration
from clawstream.progress_display import ProgressDisplay


class Log(io.StringIO):
    """A file that tells of its second line."""

    def __init__(self) -> None:
        super().__init__()
        self.has_two_lines = threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.getvalue().count("\n") >= 2:
            self.has_two_lines.set()
        return written


def in_a_log(clock: ManualClock, log: io.StringIO, line_seconds: float = 1000.0) -> ProgressDisplay:
    return ProgressDisplay(Console(file=log), clock, total=8, unit="answers", line_seconds=line_seconds)


def test_rate_and_time_left_follow_from_the_work_that_is_done() -> None:
    clock = ManualClock()
    with in_a_log(clock, io.StringIO()) as display:
        clock.advance(30)
        assert display.numbers() == "0 of 8 answers, 30 s"
        display.advance()
        display.advance(0.5)
        display.advance(0.5)
        assert display.numbers() == "2 of 8 answers, 30 s, 4.0 a minute, 90 s left"
        clock.advance(30)
        display.detail = "1 solved"
        assert display.numbers() == "2 of 8 answers, 60 s, 2.0 a minute, 3 min left, 1 solved"
        display.advance(6)
        assert "0 s left" in display.numbers()


def test_preparing_counts_for_no_rate() -> None:
    clock = ManualClock()
    log = io.StringIO()
    with in_a_log(clock, log) as display:
        with display.preparing("starting one"):
            clock.advance(60)
            assert display.numbers() == "0 of 8 answers, 60 s"
        display.describe("one")
        clock.advance(60)
        display.advance(4)
        with display.preparing("starting two"):
            clock.advance(600)
            assert display.numbers() == "4 of 8 answers, 12 min, 4.0 a minute, 60 s left"
    assert log.getvalue().splitlines() == [
        "starting one: 0 of 8 answers, 0 s",
        "one: 0 of 8 answers, 60 s",
        "starting two: 4 of 8 answers, 2 min, 4.0 a minute, 60 s left",
        "starting two: 4 of 8 answers, 12 min, 4.0 a minute, 60 s left",
    ]


def test_a_log_hears_of_work_that_does_not_advance() -> None:
    log = Log()
    with in_a_log(ManualClock(), log, line_seconds=0.001):
        assert log.has_two_lines.wait(60)


def test_a_terminal_shows_the_same_numbers() -> None:
    screen = io.StringIO()
    clock = ManualClock()
    console = Console(file=screen, force_terminal=True, width=120)
    with ProgressDisplay(console, clock, total=4, unit="answers") as display:
        display.describe("base [v3]")
        clock.advance(6)
        display.advance(3)
    assert "base [v3]" in screen.getvalue()
    assert "3 of 4 answers, 6 s, 30.0 a minute, 2 s left" in screen.getvalue()


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2.0 h"), (172800, "2.0 d")]
)
def test_lengths_of_time_are_told_in_a_unit_that_fits(seconds: float, words: str) -> None:
    assert duration(seconds) == words
