"""A gateway that starts while its disk is full: whatever write is refused, the next try finds nothing in its way."""

import errno
import os
import sqlite3
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clawstream import disk_space
from clawstream.bus.memory import MemoryBus
from clawstream.clock import SystemClock
from clawstream.disk_space import is_out_of_space
from clawstream.errors import TurnIndexUnwritable
from clawstream.log import get_logger
from clawstream.metrics import Metrics
from services.gateway.conversation_wiring import build_conversations
from services.gateway.conversations import GatewayConversations
from services.gateway.turn_index_store import TurnIndexStore
from tests.fixtures.conversations import gateway_settings, running_gateway, user

WRITES = ("mkdir", "open", "write", "pwrite", "fsync", "fdatasync", "link", "ftruncate", "replace", "rename")


class Disk:
    """Counts what is asked of the file system, and refuses one call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        self.calls = 0
        self.refuses: int | None = None
        self.code = errno.ENOSPC
        self._directory = str(directory)
        for name in WRITES:
            monkeypatch.setattr(os, name, self._refusing(getattr(os, name)))
        monkeypatch.setattr(Path, "write_bytes", self._refusing(Path.write_bytes))

    def _refusing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def refusing(place: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(place, int) or str(place).startswith(self._directory):
                self.calls += 1
                if self.calls == self.refuses:
                    raise OSError(self.code, os.strerror(self.code))
            return call(place, *arguments, **options)

        return refusing


def build(bus: MemoryBus, directory: Path) -> GatewayConversations:
    return build_conversations(gateway_settings(directory), bus, SystemClock(), uuid.uuid4, Metrics(), get_logger())


async def test_a_start_that_was_refused_anywhere_succeeds_when_there_is_space(
    bus: MemoryBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals: list[Exception] = []
    for number in range(1, 100):
        directory = tmp_path / str(number)
        with monkeypatch.context() as patched:
            disk = Disk(patched, directory)
            disk.refuses, disk.code = number, (errno.ENOSPC, errno.EDQUOT)[number % 2]
            try:
                conversations = build(bus, directory)
            except (OSError, TurnIndexUnwritable) as error:
                refusals.append(error)
                conversations = build(bus, directory)
            calls = disk.calls
        await conversations.close()
        assert not [path for path in directory.rglob(".*") if path.is_file()], "no part of a file is left"
        if calls < number:
            break
    assert len(refusals) > 20
    assert all(is_out_of_space(error) for error in refusals), "all are waited for"
    async with running_gateway(bus, tmp_path / "1") as gateway:
        await gateway.answer([user("a")], "an answer")


@pytest.mark.parametrize(
    ("code", "told", "waits"),
    [
        (sqlite3.SQLITE_FULL, None, True),
        (sqlite3.SQLITE_IOERR_WRITE, errno.EDQUOT, True),
        (sqlite3.SQLITE_IOERR_SHMSIZE, errno.ENOSPC, True),
        (sqlite3.SQLITE_CANTOPEN, errno.EDQUOT, True),
        (sqlite3.SQLITE_IOERR_WRITE, errno.EIO, False),
    ],
)
async def test_an_index_that_the_disk_refuses_at_start_is_opened_when_there_is_space(
    bus: MemoryBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, told: int | None, waits: bool
) -> None:
    def refuse(*_: Any) -> sqlite3.Connection:
        error = sqlite3.OperationalError("as SQLite words it")
        error.sqlite_errorcode = code
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(TurnIndexStore, "_connect", refuse)
        patched.setattr(disk_space, "_refusal", lambda _: None if told is None else OSError(told, os.strerror(told)))
        with pytest.raises(TurnIndexUnwritable) as refused:
            build(bus, tmp_path)
    assert is_out_of_space(refused.value) is waits
    await build(bus, tmp_path).close()
