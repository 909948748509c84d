"""The verdict of the memory benchmark: it must see growth and rising cost, and not take warming up for either."""

from collections.abc import Sequence

from benchmarks.judge_and_teacher_memory import GOAL_COST_RATIO, GOAL_GROWN_MEGABYTES, WRITER, Mark, verdict


def marks(memory: Sequence[float], cost: Sequence[float], load: float = 0.0) -> list[Mark]:
    """`load`: by how much everything costs more after each chunk."""
    return [
        Mark(
            1000 * (number + 1),
            100.0,
            {"judge": megabytes},
            {"judge": milliseconds * (1 + load * number), WRITER: 1 + load * number},
        )
        for number, (megabytes, milliseconds) in enumerate(zip(memory, cost, strict=True))
    ]


def test_a_process_that_warms_up_and_stays_holds() -> None:
    found = verdict(marks([100, 150, 190, 200, *[200 + each % 3 for each in range(16)]], [9, 3, *[1.0] * 18]), "judge")
    assert found.holds
    assert found.grown_megabytes < 5
    assert found.cost_ratio == 1.0


def test_growth_is_seen() -> None:
    step = 1.2 * GOAL_GROWN_MEGABYTES / 15
    assert not verdict(marks([100 + step * each for each in range(20)], [1.0] * 20), "judge").holds


def test_rising_cost_is_seen() -> None:
    cost = [1.0 + 1.2 * (GOAL_COST_RATIO - 1) * each / 8 for each in range(20)]
    assert not verdict(marks([100.0] * 20, cost), "judge").holds


def test_a_machine_that_gets_busy_is_no_rising_cost() -> None:
    assert verdict(marks([100.0] * 20, [1.0] * 20, load=0.1), "judge").holds


def test_one_slow_chunk_is_no_rising_cost() -> None:
    assert verdict(marks([100.0] * 20, [*[1.0] * 18, 5.0, 1.0]), "judge").holds
