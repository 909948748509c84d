"""Chat logs on disk, read as a stream: a log may be larger than memory."""

from collections.abc import Callable, Generator, Sequence
from enum import StrEnum
from pathlib import Path

from clawstream.errors import DecodeError, SettingsError
from clawstream.importing.conversations import LoggedConversation
from clawstream.importing.openai_log import parse_openai_line
from clawstream.importing.openclaw_log import parse_openclaw_session


class LogFormat(StrEnum):
    """Which form a chat log has."""

    OPENAI = "openai"
    """JSON Lines: a conversation a line."""
    OPENCLAW = "openclaw"
    """A session file of OpenClaw: a conversation a file; a folder is all `*.jsonl` in it."""


def log_files(paths: Sequence[Path]) -> list[Path]:
    """The files themselves; a folder stands for its `*.jsonl`, in order. Raises SettingsError for what is not there."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(path.glob("*.jsonl"))
        elif path.is_file():
            found.append(path)
        else:
            raise SettingsError(f"{path}: no such file")
    if not found:
        raise SettingsError(f"{', '.join(str(path) for path in paths)}: no *.jsonl in it")
    return found


def read_conversations(
    files: Sequence[Path], log_format: LogFormat, on_bytes: Callable[[int], None] = lambda _: None
) -> Generator[LoggedConversation | DecodeError]:
    """Conversations in order; an error for one that cannot be read. `on_bytes` is told how much was read so far."""
    read = 0
    for file in files:
        if log_format is LogFormat.OPENCLAW:
            lines = file.read_bytes().splitlines()
            read += file.stat().st_size
            on_bytes(read)
            try:
                yield parse_openclaw_session(lines, str(file))
            except DecodeError as error:
                yield error
            continue
        with file.open("rb") as opened:
            for number, line in enumerate(opened, start=1):
                read += len(line)
                on_bytes(read)
                if not line.strip():
                    continue
                try:
                    yield parse_openai_line(line, f"{file}:{number}")
                except DecodeError as error:
                    yield error
