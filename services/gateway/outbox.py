"""The bounded outbox on disk that stands between a reply and the log.

An entry that was appended survives the process and the machine. Appends are committed in groups: one thread writes
whatever waits and syncs once for all of it, so that a hundred concurrent answers cost one sync. Entries are numbered
without gaps. They leave when the drain releases them.
"""

import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from clawstream.durable_files import sync_directory
from clawstream.errors import OutboxError, OutboxFull
from services.gateway.outbox_files import (
    Sync,
    lock_directory,
    new_segment,
    outbox_identity,
    recover_segments,
    write_at,
)
from services.gateway.outbox_segments import frame, read_frames


@dataclass(frozen=True, slots=True)
class OutboxEntry:
    """One durable entry."""

    sequence: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class _Waiting:
    frames: list[bytes]
    future: "Future[int]"

    @property
    def size_bytes(self) -> int:
        return sum(len(one) for one in self.frames)


class Outbox:
    """Append and read are thread-safe. One process at a time owns the directory."""

    def __init__(
        self,
        directory: Path,
        *,
        max_bytes: int,
        segment_bytes: int,
        new_id: Callable[[], str],
        sync: Sync = os.fdatasync,
    ) -> None:
        """Opens the outbox, or makes one, and recovers what it holds.

        `max_bytes` bounds what waits for the log, `segment_bytes` is when a new file is begun, `sync` makes a file
        descriptor's content durable. Raises OutboxError when another process has it open or a file is damaged,
        OSError when the disk refuses: then it is not open.
        """
        self._directory = directory
        self._max_bytes = max_bytes
        self._segment_bytes = segment_bytes
        self._sync = sync
        directory.mkdir(parents=True, exist_ok=True)
        self._lock_descriptor = lock_directory(directory)
        self._state = threading.Condition()
        self._waiting: list[_Waiting] = []
        self._waiting_bytes = 0
        self._waiting_entries = 0
        self._closing = False
        self._interrupted = False
        self._broken: str | None = None
        self.outbox_id = ""
        """Identity of this outbox: a new disk has a new one."""
        self.torn_bytes = 0
        """What a crash had left of an unfinished append; cut off."""
        try:
            self.outbox_id = outbox_identity(directory, new_id)
            self._segments, self.torn_bytes = recover_segments(directory, sync)
            self._descriptor = os.open(self._segments[-1].path, os.O_WRONLY)
        except BaseException:
            os.close(self._lock_descriptor)
            raise
        self._released = self._segments[0].first_sequence
        self._thread = threading.Thread(target=self._write_loop, name="outbox-writer", daemon=True)
        self._thread.start()

    # ---- appending

    @property
    def failure(self) -> OutboxError | None:
        """Why nothing is accepted any more: the disk refused a write and its undo. A new process may recover."""
        return None if self._broken is None else OutboxError(f"outbox {self._directory}: {self._broken}")

    def submit(self, payloads: Sequence[bytes]) -> "Future[int]":
        """Queues entries, in order and with no others between. Once they are durable, the result is the first's number.

        Raises OutboxFull when they would exceed the bound, and OutboxError after `close` or when the disk failed. The
        future raises OutboxError when the disk refuses them; then none of them is in the outbox.
        """
        if not payloads:
            raise ValueError("there must be an entry to append")
        waiting = _Waiting(frames=[frame(payload) for payload in payloads], future=Future())
        waiting.future.set_running_or_notify_cancel()  # A waiter that gives up must not disturb the writer.
        with self._state:
            if self._closing or self._broken is not None:
                raise OutboxError(f"outbox {self._directory}: {self._broken or 'closed'}")
            held = self._undrained_bytes() + self._waiting_bytes
            if held + waiting.size_bytes > self._max_bytes:
                raise OutboxFull(
                    f"outbox {self._directory} holds {held} of {self._max_bytes} bytes; it empties when the log is back"
                )
            self._waiting.append(waiting)
            self._waiting_bytes += waiting.size_bytes
            self._waiting_entries += len(waiting.frames)
            self._state.notify_all()
        return waiting.future

    def close(self) -> None:
        """Makes durable what was submitted, then ends. May be called twice."""
        with self._state:
            if self._closing:
                return
            self._closing = True
            self._state.notify_all()
        self._thread.join()
        os.close(self._descriptor)
        os.close(self._lock_descriptor)

    # ---- draining

    @property
    def first_sequence(self) -> int:
        """The oldest entry that is still held (or would be, for an empty outbox)."""
        with self._state:
            return max(self._released, self._segments[0].first_sequence)

    @property
    def next_sequence(self) -> int:
        """The number that the next durable entry will get."""
        with self._state:
            return self._segments[-1].next_sequence

    @property
    def accepted_sequence(self) -> int:
        """The number after the last entry that was submitted, durable or not yet."""
        with self._state:
            return self._segments[-1].next_sequence + self._waiting_entries

    @property
    def undrained_entries(self) -> int:
        """Durable entries that were not released."""
        with self._state:
            return self._segments[-1].next_sequence - self._released

    @property
    def undrained_bytes(self) -> int:
        """Bytes of those entries."""
        with self._state:
            return self._undrained_bytes()

    def wait_for(self, sequence: int, timeout_seconds: float) -> bool:
        """Whether entry `sequence` is durable, waiting for it if need be."""
        with self._state:
            return self._state.wait_for(
                lambda: self._interrupted or self._segments[-1].next_sequence > sequence, timeout_seconds
            ) and (self._segments[-1].next_sequence > sequence)

    def interrupt(self) -> None:
        """`wait_for` returns at once from now on: its caller is to stop."""
        with self._state:
            self._interrupted = True
            self._state.notify_all()

    def read(self, sequence: int, *, max_entries: int, max_bytes: int) -> list[OutboxEntry]:
        """Durable entries from `sequence` on: at least one if there is one, else within both limits.

        Raises OutboxError when `sequence` was released, or when the file changed under us.
        """
        entries: list[OutboxEntry] = []
        size = 0
        while len(entries) < max_entries:
            location = self._locate(sequence, max_entries - len(entries), max(0, max_bytes - size), first=not entries)
            if location is None:
                break
            path, start, end, count = location
            payloads = self._read_payloads(path, start, end)
            if len(payloads) != count:
                raise OutboxError(
                    f"{path}: entry {sequence + len(payloads)} is damaged; restore the file or move it away"
                )
            for payload in payloads:
                entries.append(OutboxEntry(sequence=sequence, payload=payload))
                sequence += 1
            size += end - start
        return entries

    def replay(self) -> Iterator[OutboxEntry]:
        """All durable entries that are still on disk, drained or not."""
        sequence = self.first_sequence
        while batch := self.read(sequence, max_entries=64, max_bytes=4 * 1024 * 1024):
            yield from batch
            sequence = batch[-1].sequence + 1

    def release(self, below_sequence: int) -> None:
        """Entries before `below_sequence` are on the log: files that hold nothing else are removed."""
        removed: list[Path] = []
        with self._state:
            self._released = max(self._released, below_sequence)
            while len(self._segments) > 1 and self._segments[1].first_sequence <= self._released:
                removed.append(self._segments.pop(0).path)
        for path in removed:
            path.unlink(missing_ok=True)
        if removed:
            sync_directory(self._directory)

    def _locate(
        self, sequence: int, max_entries: int, max_bytes: int, *, first: bool
    ) -> tuple[Path, int, int, int] | None:
        """File, byte range and number of the entries from `sequence` on that lie in one segment."""
        with self._state:
            if sequence < self._segments[0].first_sequence:
                raise OutboxError(f"outbox {self._directory}: entry {sequence} was released")
            at = bisect_right(self._segments, sequence, key=lambda segment: segment.first_sequence) - 1
            segment = self._segments[at]
            index = sequence - segment.first_sequence
            if index >= len(segment.offsets):
                return None
            start = segment.offsets[index]
            last = index + 1 if first else index
            while last < min(index + max_entries, len(segment.offsets)) and segment.end_of(last) - start <= max_bytes:
                last += 1
            if last == index:
                return None
            return segment.path, start, segment.end_of(last - 1), last - index

    @staticmethod
    def _read_payloads(path: Path, start: int, end: int) -> list[bytes]:
        with path.open("rb") as file:
            file.seek(start)
            content = file.read(end - start)
        return [payload for payload, _ in read_frames(content, 0)]

    def _undrained_bytes(self) -> int:
        return sum(segment.bytes_from(self._released) for segment in self._segments)

    # ---- the writer thread

    def _write_loop(self) -> None:
        group: list[_Waiting] = []
        try:
            while group := self._next_group():
                try:
                    self._write_group(group)
                except OSError as error:
                    self._undo(group, error)
        except Exception as error:  # The thread's boundary: who waits is told, and `failure` ends the process.
            self._break(group, f"writing failed: {type(error).__name__}: {error}")

    def _next_group(self) -> list[_Waiting]:
        """Everything that waits; nothing when the outbox is closed."""
        with self._state:
            self._state.wait_for(lambda: self._waiting or self._closing)
            group, self._waiting = self._waiting, []
        return group

    def _break(self, group: Sequence[_Waiting], reason: str) -> None:
        """Nothing is accepted any more. What is half on the disk is told by its checksum at the next start."""
        with self._state:
            self._broken = reason
            left, self._waiting = self._waiting, []
            self._waiting_bytes = self._waiting_entries = 0
            self._state.notify_all()
        for waiting in (*group, *left):
            if not waiting.future.done():
                waiting.future.set_exception(OutboxError(f"outbox {self._directory}: {reason}"))

    def _write_group(self, group: Sequence[_Waiting]) -> None:
        segment = self._segments[-1]
        if segment.size_bytes >= self._segment_bytes and segment.offsets:
            segment = new_segment(self._directory, segment.next_sequence, self._sync)
            descriptor = os.open(segment.path, os.O_WRONLY)
            os.close(self._descriptor)
            self._descriptor = descriptor
            with self._state:
                self._segments.append(segment)
        frames = [one for waiting in group for one in waiting.frames]
        write_at(self._descriptor, b"".join(frames), segment.size_bytes)
        self._sync(self._descriptor)
        firsts: list[int] = []
        with self._state:
            for waiting in group:
                firsts.append(segment.next_sequence)
                for one in waiting.frames:
                    segment.offsets.append(segment.size_bytes)
                    segment.size_bytes += len(one)
                self._waiting_bytes -= waiting.size_bytes
                self._waiting_entries -= len(waiting.frames)
            self._state.notify_all()
        for waiting, first in zip(group, firsts, strict=True):
            waiting.future.set_result(first)

    def _undo(self, group: Sequence[_Waiting], error: OSError) -> None:
        """The disk refused: nothing of the group stays behind, or no append is accepted any more."""
        reason = f"the disk refused a write: {error}"
        try:
            os.ftruncate(self._descriptor, self._segments[-1].size_bytes)
            self._sync(self._descriptor)
        except OSError as second:
            reason = f"{reason}, and then to undo it: {second}"
            with self._state:
                self._broken = reason
        with self._state:
            self._waiting_bytes -= sum(waiting.size_bytes for waiting in group)
            self._waiting_entries -= sum(len(waiting.frames) for waiting in group)
            self._state.notify_all()
        for waiting in group:
            waiting.future.set_exception(OutboxError(f"outbox {self._directory}: {reason}"))
