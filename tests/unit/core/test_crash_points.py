"""Crash points: only on demand, only in tests, and otherwise not there at all."""

import os
from pathlib import Path
from typing import Any

import pytest

from clawstream.blobs import BlobStore
from clawstream.bus.interface import OutgoingRecord
from clawstream.bus.memory import MemoryBus
from clawstream.crash_points import (
    POINTS,
    CrashPoint,
    crash_point,
    with_blob_crash,
    with_bus_crash,
    with_handler_crash,
    with_sync_crash,
)
from clawstream.errors import SettingsError
from tests.fixtures.buses import create_topic
from tests.fixtures.workers import FunctionHandler

ALLOWED = {"CLAWSTREAM_CRASH_ALLOWED": "yes-this-is-a-test"}


def test_without_the_variable_everything_stays_what_it_was(tmp_path: Path) -> None:
    assert crash_point({}) is None
    bus: Any = object()
    handler = FunctionHandler(lambda record: pytest.fail("not handled"))
    assert with_bus_crash(bus, None) is bus
    assert with_handler_crash(handler, None) is handler
    assert with_sync_crash(os.fdatasync, None) is os.fdatasync
    assert type(with_blob_crash(str(tmp_path), None)) is BlobStore


@pytest.mark.parametrize("environment", [{}, {"CLAWSTREAM_CRASH_ALLOWED": "1"}])
def test_outside_of_tests_it_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match="CLAWSTREAM_CRASH_ALLOWED"):
        crash_point({"CLAWSTREAM_CRASH_AT": "after-begin", **environment})


@pytest.mark.parametrize("wanted", ["", "nowhere", "after-begin:0", "after-begin:x", "after-begin:-1"])
def test_a_wrong_point_is_refused_by_name(wanted: str) -> None:
    with pytest.raises(SettingsError, match="after-begin"):
        crash_point({"CLAWSTREAM_CRASH_AT": wanted, **ALLOWED})


@pytest.mark.parametrize("name", POINTS)
def test_every_point_can_be_chosen(name: str) -> None:
    found = crash_point({"CLAWSTREAM_CRASH_AT": f"{name}:3", **ALLOWED})
    assert found is not None
    assert found.name == name


def test_a_wrong_signal_is_refused() -> None:
    with pytest.raises(SettingsError, match="SIGSTOP"):
        crash_point({"CLAWSTREAM_CRASH_AT": "after-begin", "CLAWSTREAM_CRASH_SIGNAL": "SIGTERM", **ALLOWED})


def test_it_ends_at_the_nth_pass_and_only_at_its_name() -> None:
    ends: list[int] = []
    passed: list[int] = []
    point = CrashPoint("after-begin", 3, end=lambda: ends.append(len(passed)))
    for number in range(1, 6):
        passed.append(number)
        point.reach("after-produce")
        point.reach("after-begin")
    assert ends == [3]


def test_a_producer_passes_its_points_in_order() -> None:

    bus = MemoryBus()
    create_topic(bus, "topic")
    passed: list[str] = []

    class Noting(CrashPoint):
        def reach(self, name: str) -> None:
            passed.append(name)

    producer = with_bus_crash(bus, Noting("none", end=lambda: None)).transactional_producer("id")
    producer.begin()
    producer.produce(OutgoingRecord("topic", b"key", b"value"))
    producer.flush(1.0)
    producer.commit()
    assert passed == ["after-begin", "after-produce", "after-flush", "before-commit", "after-commit"]
