"""The fold over `weights`."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from clawstream.bus.interface import OutgoingRecord, Record
from services.gateway.gate.weights_view import WeightsView
from tests.fixtures.weights import (
    POLICY,
    make_artefact,
    pointer_record,
    release_record,
    removed_record,
    rollback_record,
    version_record,
)


def as_read(record: OutgoingRecord) -> Record:
    return Record(record.topic, 0, 0, record.key, record.value, record.headers, 0)


def test_a_lower_pointer_of_the_trainer_is_ignored() -> None:
    view = WeightsView(POLICY)
    assert view.pointer_version == 0
    assert view.apply(as_read(pointer_record(5, "test")))
    assert not view.apply(as_read(pointer_record(4, "test")))
    assert view.pointer_version == 5
    assert not view.apply(as_read(pointer_record(5, "test")))


def test_a_rollback_holds_until_it_is_released() -> None:
    view = WeightsView(POLICY)
    view.apply(as_read(pointer_record(5, "test")))
    assert view.apply(as_read(rollback_record(3, "test")))
    assert (view.pointer_version, view.is_rolled_back) == (3, True)
    assert not view.apply(as_read(pointer_record(6, "test"))), "training goes on, and is not served"
    assert view.pointer_version == 3
    assert view.apply(as_read(rollback_record(2, "test"))), "further back"
    assert view.apply(as_read(release_record("test")))
    assert (view.pointer_version, view.is_rolled_back) == (6, False)
    assert not view.apply(as_read(release_record("test")))


@given(st.lists(st.sampled_from(["train", "roll back", "release"]), max_size=30), st.integers(0, 30))
def test_compaction_changes_nothing(steps: list[str], compacted_up_to: int) -> None:
    """A gateway that starts late sees only the newest record of each key; tombstones may be gone too."""
    trained = 0
    records: list[OutgoingRecord] = []
    for number, step in enumerate(steps):
        if step == "train":
            trained += 1
            records.append(pointer_record(trained, "test"))
        else:
            records.append(rollback_record(number, "test") if step == "roll back" else release_record("test"))
    whole, late = WeightsView(POLICY), WeightsView(POLICY)
    for record in records:
        whole.apply(as_read(record))
    old, new = records[:compacted_up_to], records[compacted_up_to:]
    newest = {record.key: record for record in old}
    for record in [each for each in old if newest[each.key] is each and each.value is not None] + new:
        late.apply(as_read(record))
    assert (late.pointer_version, late.is_rolled_back) == (whole.pointer_version, whole.is_rolled_back)


def test_artefacts_come_and_go(tmp_path: Path) -> None:
    view = WeightsView(POLICY)
    for version in range(4):
        view.apply(as_read(version_record(make_artefact(tmp_path, version), "test")))
    view.apply(as_read(removed_record(1, "test")))
    assert view.artefact(1) is None
    assert view.artefact(2) is not None
    assert view.versions_below(3) == [2, 0]


def test_another_policy_is_none_of_our_business(tmp_path: Path) -> None:
    view = WeightsView("other")
    view.apply(as_read(version_record(make_artefact(tmp_path, 2), "test")))
    assert not view.apply(as_read(pointer_record(5, "test")))
    assert (view.artefact(2), view.pointer_version) == (None, 0)
