"""Counts over all fault tests, printed at the end: what was survived and what was checked."""

import pytest

from tests.faults.chaos import COUNTS, Chaos, ChaosCounts
from tests.fixtures.buses import kafka_bus
from tests.fixtures.judged_log import JudgedLog


def pytest_configure(config: pytest.Config) -> None:
    config.stash[COUNTS] = ChaosCounts()


@pytest.fixture
def chaos(request: pytest.FixtureRequest) -> Chaos:
    return Chaos(request.config.stash[COUNTS])


@pytest.fixture
def log(broker: str, namespace: str) -> JudgedLog:
    made = JudgedLog(kafka_bus(broker, "tests"), namespace)
    made.create_topics()
    return made


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts = config.stash.get(COUNTS, None)
    if counts is not None and (counts.crashes_survived or counts.faults_survived):
        terminalreporter.write_sep("-", "chaos")
        terminalreporter.write_line(
            f"crashes survived {counts.crashes_survived}, other faults survived {counts.faults_survived}, "
            f"records checked {counts.records_checked}, violations {counts.violations}"
        )
