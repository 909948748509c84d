"""Which batches are trained again, and what the lineage is called."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from clawstream.errors import LineageError, SettingsError
from schemas.events import TrainStepEvent
from services.trainer.retrain.plan import StepRange, choose_batches, lineage_of, step_range
from services.trainer.settings import TrainerSettings

NOW = datetime(2026, 3, 1, tzinfo=UTC)


def step(number: int, lineage: str = "a", *, batch: bool = True) -> TrainStepEvent:
    return TrainStepEvent(
        train_step_id=f"{lineage}-{number}",
        lineage=lineage,
        policy="default",
        step=number,
        base_version=0,
        weight_version=number if batch else None,
        closed_by="count",
        samples=[],
        drops=[],
        batch_uri=f"file:///batches/a%20b/{number}" if batch else "",
        batch_sha256=f"{number:064x}" if batch else "",
        started_at=NOW,
        finished_at=NOW,
    )


@pytest.mark.parametrize(
    ("text", "expected"), [("3-7", StepRange(3, 7)), ("3-", StepRange(3, None)), (" 5 ", StepRange(5, 5))]
)
def test_ranges_as_people_write_them(text: str, expected: StepRange) -> None:
    assert step_range(text) == expected


@pytest.mark.parametrize("text", ["", "0", "7-3", "a-b", "-3", "1-2-3"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="no range of steps"):
        step_range(text)


def test_batches_come_in_order_and_steps_without_one_are_passed() -> None:
    steps = [step(3), step(1), step(2, batch=False), step(1, "b")]
    chosen = choose_batches(steps, "default", "a", StepRange(1, None))
    assert [(each.step, each.archived.path) for each in chosen] == [
        (1, Path("/batches/a b/1")),
        (3, Path("/batches/a b/3")),
    ]


@pytest.mark.parametrize(
    ("lineage", "wanted", "message"),
    [
        (None, StepRange(1, None), "has 2 lineages"),
        ("c", StepRange(1, None), "no step of lineage 'c'"),
        ("a", StepRange(1, 5), "first step 4"),
        ("a", StepRange(2, 2), "have no batch"),
    ],
)
def test_what_is_not_there_is_named(lineage: str | None, wanted: StepRange, message: str) -> None:
    steps = [step(1), step(2, batch=False), step(3), step(1, "b")]
    with pytest.raises(LineageError, match=message):
        choose_batches(steps, "default", lineage, wanted)


def test_the_lineage_follows_from_all_that_decides_its_weights() -> None:
    settings = TrainerSettings(name="trainer", model=Path("model"))
    batches = choose_batches([step(1), step(2)], "default", None, StepRange(1, None))
    same = lineage_of("w", batches, settings)
    assert same == lineage_of("w", batches, settings.model_copy(update={"name": "other", "batch_size": 3}))
    others = [
        lineage_of("v", batches, settings),
        lineage_of("w", batches[:1], settings),
        lineage_of("w", batches[::-1], settings),
        lineage_of("w", batches, settings.model_copy(update={"seed": 1})),
    ]
    assert len({same, *others}) == 5
