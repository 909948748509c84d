"""The fold over `weights`."""

from pathlib import Path

from clawstream.bus.interface import OutgoingRecord, Record
from services.gateway.gate.weights_view import WeightsView
from tests.fixtures.weights import POLICY, make_artefact, pointer_record, removed_record, version_record


def as_read(record: OutgoingRecord) -> Record:
    return Record(record.topic, 0, 0, record.key, record.value, record.headers, 0)


def test_a_lower_pointer_counts_only_as_a_rollback() -> None:
    view = WeightsView(POLICY)
    assert view.pointer_version == 0
    assert view.apply(as_read(pointer_record(5, "test")))
    assert not view.apply(as_read(pointer_record(4, "test")))
    assert view.pointer_version == 5
    assert view.apply(as_read(pointer_record(3, "test", rollback=True)))
    assert view.pointer_version == 3
    assert view.apply(as_read(pointer_record(6, "test")))
    assert not view.apply(as_read(pointer_record(6, "test")))


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
