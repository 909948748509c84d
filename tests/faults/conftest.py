"""Counts over all fault tests, printed at the end: what was survived and what was checked."""

import pytest

from tests.faults.chaos import COUNTS, Chaos, ChaosCounts


def pytest_configure(config: pytest.Config) -> None:
    config.stash[COUNTS] = ChaosCounts()


@pytest.fixture
def chaos(request: pytest.FixtureRequest) -> Chaos:
    return Chaos(request.config.stash[COUNTS])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts = config.stash.get(COUNTS, None)
    if counts is not None and (counts.crashes_survived or counts.faults_survived):
        terminalreporter.write_sep("-", "chaos")
        terminalreporter.write_line(
            f"crashes survived {counts.crashes_survived}, other faults survived {counts.faults_survived}, "
            f"records checked {counts.records_checked}, violations {counts.violations}"
        )
