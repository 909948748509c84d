"""The outbox: what was acknowledged survives everything."""

import errno
import os
import shutil
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawstream.errors import OutboxError, OutboxFull
from services.gateway.outbox import Outbox
from services.gateway.outbox_segments import frame, read_frames

GIVE_UP_SECONDS = 120.0


def open_outbox(directory: Path, **settings: object) -> Outbox:
    values: dict[str, object] = {"max_bytes": 1 << 20, "segment_bytes": 200, "new_id": lambda: "disk-1", **settings}
    return Outbox(directory, **values)  # pyright: ignore[reportArgumentType]


def append(outbox: Outbox, *payloads: bytes) -> int:
    return outbox.submit(payloads).result(GIVE_UP_SECONDS)


def contents(outbox: Outbox) -> list[tuple[int, bytes]]:
    return [(entry.sequence, entry.payload) for entry in outbox.replay()]


def test_entries_are_numbered_and_read_in_order_over_several_files(tmp_path: Path) -> None:
    outbox = open_outbox(tmp_path)
    payloads = [bytes([65 + number]) * (10 + 7 * number) for number in range(20)]
    assert [append(outbox, payload) for payload in payloads] == list(range(20))
    assert len(list(tmp_path.glob("*.segment"))) > 3
    assert contents(outbox) == list(enumerate(payloads))
    outbox.close()
    again = open_outbox(tmp_path)
    assert contents(again) == list(enumerate(payloads))
    assert append(again, b"next") == 20
    again.close()


@given(
    st.lists(st.binary(max_size=60), min_size=1, max_size=30),
    st.integers(0, 40),
    st.integers(1, 12),
    st.integers(0, 200),
)
@settings(max_examples=40, deadline=None)
def test_reading_respects_its_limits_and_releasing_keeps_the_rest(
    tmp_path_factory: pytest.TempPathFactory, payloads: list[bytes], released: int, max_entries: int, max_bytes: int
) -> None:
    outbox = open_outbox(tmp_path_factory.mktemp("outbox"), sync=lambda _descriptor: None)
    append(outbox, *payloads)
    released = min(released, len(payloads))
    outbox.release(released)
    found: list[bytes] = []
    sequence = released
    while batch := outbox.read(sequence, max_entries=max_entries, max_bytes=max_bytes):
        assert [entry.sequence for entry in batch] == list(range(sequence, sequence + len(batch)))
        assert len(batch) <= max_entries
        assert len(batch) == 1 or sum(len(frame(entry.payload)) for entry in batch) <= max_bytes
        found += [entry.payload for entry in batch]
        sequence += len(batch)
    assert found == payloads[released:]
    assert outbox.undrained_entries == len(payloads) - released
    assert outbox.undrained_bytes == sum(len(frame(payload)) for payload in payloads[released:])
    outbox.close()


def test_a_crash_at_every_byte_keeps_every_whole_entry(tmp_path: Path) -> None:
    original = tmp_path / "original"
    outbox = open_outbox(original, segment_bytes=1 << 20)
    payloads = [b"first", b"", b"third " * 5, b"4"]
    append(outbox, *payloads)
    outbox.close()
    (segment,) = original.glob("*.segment")
    content = segment.read_bytes()
    ends = [16]
    for payload in payloads:
        ends.append(ends[-1] + len(frame(payload)))
    assert ends[-1] == len(content)
    for length in range(len(content) + 1):
        crashed = tmp_path / f"crashed-{length}"
        shutil.copytree(original, crashed)
        (crashed / segment.name).write_bytes(content[:length])
        recovered = open_outbox(crashed, segment_bytes=1 << 20)
        whole = sum(length >= end for end in ends[1:])
        assert contents(recovered) == list(enumerate(payloads[:whole])), length
        assert recovered.torn_bytes == (length - ends[whole] if length >= 16 else length)
        assert append(recovered, b"after the crash") == whole
        recovered.close()
        reopened = open_outbox(crashed, segment_bytes=1 << 20)
        assert contents(reopened)[-1] == (whole, b"after the crash")
        reopened.close()
        shutil.rmtree(crashed)


@given(st.integers(0, 10**6), st.integers(1, 255))
@settings(max_examples=60, deadline=None)
def test_a_flipped_bit_never_yields_a_wrong_entry(position: int, difference: int) -> None:
    payloads = [b"first", b"second" * 3, b"third"]
    content = bytearray(b"".join(frame(payload) for payload in payloads))
    content[position % len(content)] ^= difference
    found = [payload for payload, _ in read_frames(bytes(content), 0)]
    assert found == payloads[: len(found)]
    assert len(found) < len(payloads)


def test_zeros_after_the_end_are_no_entries(tmp_path: Path) -> None:
    outbox = open_outbox(tmp_path)
    append(outbox, b"one")
    outbox.close()
    (segment,) = tmp_path.glob("*.segment")
    segment.write_bytes(segment.read_bytes() + bytes(100))
    recovered = open_outbox(tmp_path)
    assert contents(recovered) == [(0, b"one")]
    recovered.close()


def test_damage_before_acknowledged_entries_is_an_error(tmp_path: Path) -> None:
    outbox = open_outbox(tmp_path)
    for number in range(20):
        append(outbox, bytes([number]) * 30)
    outbox.close()
    first = min(tmp_path.glob("*.segment"))
    content = bytearray(first.read_bytes())
    content[40] ^= 1
    first.write_bytes(content)
    with pytest.raises(OutboxError, match="damaged at byte"):
        open_outbox(tmp_path)


def test_concurrent_appends_share_a_sync(tmp_path: Path) -> None:
    first_sync_entered, go_on, syncs = threading.Event(), threading.Event(), []

    def sync(descriptor: int) -> None:
        syncs.append(descriptor)
        if len(syncs) == 2:  # The first was the header of the new file.
            first_sync_entered.set()
            assert go_on.wait(GIVE_UP_SECONDS)
        os.fdatasync(descriptor)

    outbox = open_outbox(tmp_path, segment_bytes=1 << 20, sync=sync)
    futures: list[Future[int]] = [outbox.submit([b"0"])]
    assert first_sync_entered.wait(GIVE_UP_SECONDS)
    futures += [outbox.submit([str(number).encode()]) for number in range(1, 100)]
    assert not any(future.done() for future in futures)
    assert outbox.next_sequence == 0
    go_on.set()
    assert [future.result(GIVE_UP_SECONDS) for future in futures] == list(range(100))
    assert len(syncs) == 3
    outbox.close()


def test_a_full_outbox_refuses_and_takes_again_when_drained(tmp_path: Path) -> None:
    outbox = open_outbox(tmp_path, max_bytes=100, segment_bytes=50)
    append(outbox, b"x" * 40)
    with pytest.raises(OutboxFull, match="48 of 100 bytes"):
        outbox.submit([b"y" * 60])
    append(outbox, b"z" * 40)
    outbox.release(1)
    assert append(outbox, b"y" * 40) == 2
    assert contents(outbox)[-1] == (2, b"y" * 40)
    outbox.close()


def test_a_disk_that_refuses_leaves_nothing_of_the_group_behind(tmp_path: Path) -> None:
    refusing = threading.Event()

    def sync(descriptor: int) -> None:
        if refusing.is_set():
            refusing.clear()
            raise OSError(errno.ENOSPC, "No space left on device")
        os.fdatasync(descriptor)

    outbox = open_outbox(tmp_path, segment_bytes=1 << 20, sync=sync)
    append(outbox, b"kept")
    refusing.set()
    with pytest.raises(OutboxError, match="No space left"):
        append(outbox, b"lost")
    assert append(outbox, b"later") == 1
    outbox.close()
    recovered = open_outbox(tmp_path)
    assert contents(recovered) == [(0, b"kept"), (1, b"later")]
    recovered.close()


def test_a_disk_that_refuses_even_the_undo_is_a_failure(tmp_path: Path) -> None:
    refusing = threading.Event()

    def sync(descriptor: int) -> None:
        if refusing.is_set():
            raise OSError(errno.EIO, "Input/output error")
        os.fdatasync(descriptor)

    outbox = open_outbox(tmp_path, sync=sync)
    append(outbox, b"kept")
    assert outbox.failure is None
    refusing.set()
    with pytest.raises(OutboxError, match="Input/output"):
        append(outbox, b"lost")
    assert "then to undo it" in str(outbox.failure)
    with pytest.raises(OutboxError, match="Input/output"):
        outbox.submit([b"refused at once"])
    outbox.close()


def test_a_writer_that_breaks_in_any_way_is_a_failure_and_nobody_waits_for_ever(tmp_path: Path) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def sync(_descriptor: int) -> None:
        entered.set()
        go_on.wait(GIVE_UP_SECONDS)
        raise ZeroDivisionError("a bug")

    outbox = open_outbox(tmp_path)
    outbox._sync = sync  # pyright: ignore[reportPrivateUsage] - opening syncs too
    writing = outbox.submit([b"being written"])
    assert entered.wait(GIVE_UP_SECONDS)
    waiting = outbox.submit([b"waits"])
    go_on.set()
    for future in (writing, waiting):
        with pytest.raises(OutboxError, match="ZeroDivisionError: a bug"):
            future.result(GIVE_UP_SECONDS)
    assert "ZeroDivisionError: a bug" in str(outbox.failure)
    with pytest.raises(OutboxError, match="ZeroDivisionError"):
        outbox.submit([b"late"])
    outbox.close()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    outbox = open_outbox(tmp_path)
    with pytest.raises(OutboxError, match="used by another process"):
        open_outbox(tmp_path)
    outbox.close()
    open_outbox(tmp_path).close()
    with pytest.raises(OutboxError, match="closed"):
        outbox.submit([b"late"])


def test_close_makes_durable_what_was_submitted(tmp_path: Path) -> None:
    outbox = open_outbox(tmp_path)
    futures = [outbox.submit([bytes([number])]) for number in range(50)]
    outbox.close()
    assert [future.result(0) for future in futures] == list(range(50))
    reopened = open_outbox(tmp_path, new_id=lambda: "disk-2")
    assert len(contents(reopened)) == 50
    assert reopened.outbox_id == "disk-1"
    reopened.close()
