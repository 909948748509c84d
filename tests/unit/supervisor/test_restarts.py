"""Backoff: doubling, bounded, and given up in the end."""

from hypothesis import given
from hypothesis import strategies as st

from clawstream.supervisor.restarts import RestartHistory
from clawstream.supervisor.settings import RestartSettings

SETTINGS = RestartSettings(
    first_delay_seconds=1.0, largest_delay_seconds=5.0, stable_seconds=60.0, largest_failure_count=6
)


def test_delays_double_up_to_the_largest_then_it_is_given_up() -> None:
    history = RestartHistory(SETTINGS)
    assert [history.delay_after_exit(0.1) for _ in range(6)] == [1.0, 2.0, 4.0, 5.0, 5.0, None]


def test_a_long_run_forgives() -> None:
    history = RestartHistory(SETTINGS)
    for _ in range(4):
        history.delay_after_exit(1.0)
    assert history.delay_after_exit(60.0) == 1.0
    assert history.delay_after_exit(59.9) == 2.0


@given(st.lists(st.floats(min_value=0.0, max_value=59.0), min_size=6, max_size=20))
def test_short_runs_are_always_given_up(runs: list[float]) -> None:
    history = RestartHistory(SETTINGS)
    assert None in [history.delay_after_exit(run) for run in runs]
