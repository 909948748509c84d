"""Runs commands in a folder that is all they may change, under limits that hold.

With Linux namespaces (the default) a command sees the machine's programs read-only, its folder as `/work`, an empty
`/tmp`, its own processes and no network at all; it has no capabilities, and everything it started dies with it. Without
namespaces only the limits and the scrubbed environment are left: the command can read and write whatever this user can
and reach the network. That is refused unless it is asked for.
"""

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

import psutil

from clawstream.errors import SandboxError
from examples.environments.terminal.limits import Limits
from examples.environments.terminal.output import BoundedOutput

_CHILD: Final = Path(__file__).with_name("sandbox_child.py")
_PATH: Final = "/usr/local/bin:/usr/bin:/bin"
_NAMESPACES: Final = ("--mount", "--pid", "--net", "--ipc", "--uts", "--kill-child=SIGKILL")
_FIRST_USER_ID: Final = 61184
_USER_IDS: Final = 4336
"""systemd's range for users that exist only for a while: nobody else's files or processes have these ids."""
_CLEAN_UP_SECONDS: Final = 5.0
_MAX_COMMAND_BYTES: Final = 60_000
"""One argument of a program cannot be longer than 128 KiB, and JSON may double it."""


class Isolation(StrEnum):
    """What stands between a command and the machine."""

    NAMESPACES = "namespaces"
    """Own file system, processes and network."""
    LIMITS_ONLY = "limits_only"
    """Resource limits and a scrubbed environment. No protection of files or network."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What came of one command."""

    exit_code: int
    """128 + the number of the signal when a signal ended it; 124 when its time was over."""
    output: str
    """Standard output and error as they came, cut in the middle."""
    output_bytes: int
    """How much it printed in all, as far as it was read."""
    timed_out: bool = False
    """Killed because its time was over."""
    flooded: bool = False
    """Killed because it printed too much."""

    @property
    def report(self) -> str:
        """What the policy is told."""
        notes = {self.timed_out: "It was killed: its time was over.", self.flooded: "It was killed: too much output."}
        lines = [f"exit code {self.exit_code}", *(note for applies, note in notes.items() if applies)]
        return "\n".join([*lines, self.output.rstrip() or "(no output)"])


class Sandbox:
    """One working folder. Commands run one after another; files are what they have in common."""

    def __init__(self, folder: Path, root: Path, isolation: Isolation, limits: Limits, user_id: int | None) -> None:
        """Use `open_sandbox`."""
        self.folder = folder
        """What the command sees as `/work`."""
        self._root = root
        self._isolation = isolation
        self._limits = limits
        self._user_id = user_id

    async def run(self, command: str, *, environment: Mapping[str, str] | None = None) -> CommandResult:
        """Runs `command` with `bash -c` in the folder. Raises SandboxError when it could not even be started."""
        if "\0" in command or len(command.encode(errors="replace")) > _MAX_COMMAND_BYTES:
            return CommandResult(126, f"not run: longer than {_MAX_COMMAND_BYTES} bytes, or with a NUL in it", 0)
        output = BoundedOutput(self._limits.output_bytes)
        ready, process = await self._start(command, environment or {})
        flooded = asyncio.Event()

        async def read() -> None:
            assert process.stdout is not None
            while piece := await process.stdout.read(65536):
                output.add(piece)
                if output.total_bytes > self._limits.flood_bytes:
                    flooded.set()
                    _kill(process)

        reading = asyncio.create_task(read())
        timed_out = False
        try:
            try:
                async with asyncio.timeout(self._limits.timeout_seconds):
                    await process.wait()
            except TimeoutError:
                timed_out = True
        finally:
            # Also after a regular end: what the command left in the background ends here.
            _kill(process)
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLEAN_UP_SECONDS):
                    await process.wait()
                    await reading
            reading.cancel()
            was_ready = _was_ready(ready)
        if not was_ready:
            raise SandboxError(f"the sandbox could not be set up: {output.text().strip()[-500:] or 'no reason given'}")
        code = process.returncode if process.returncode is not None else 128 + signal.SIGKILL
        exit_code = 124 if timed_out else code if code >= 0 else 128 - code
        return CommandResult(exit_code, output.text(), output.total_bytes, timed_out, flooded.is_set())

    def write(self, name: str, content: str, *, executable: bool = False) -> None:
        """Puts a file into the folder, before any command ran. Raises SandboxError for a name that leads out of it."""
        file = self.folder / name
        if not file.resolve().is_relative_to(self.folder.resolve()):
            raise SandboxError(f"{name!r} leads out of the folder")
        for parent in reversed(file.relative_to(self.folder).parents):
            self._make_own(self.folder / parent)
        file.write_text(content, encoding="utf-8")
        file.chmod(0o755 if executable else 0o644)
        if self._user_id is not None:
            os.chown(file, self._user_id, self._user_id)

    def size_bytes(self) -> int:
        """Of all files in the folder. Links are not followed."""
        return sum(_size(Path(where) / name) for where, _, names in os.walk(self.folder) for name in names)

    def is_too_large(self) -> bool:
        """Whether the folder holds more than it may."""
        return self.size_bytes() > self._limits.folder_bytes

    def _make_own(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        if self._user_id is not None:
            os.chown(directory, self._user_id, self._user_id)

    async def _start(self, command: str, environment: Mapping[str, str]) -> tuple[int, asyncio.subprocess.Process]:
        """The read end of the pipe that says whether the command was reached, and the process."""
        isolated = self._isolation is Isolation.NAMESPACES
        limits = asdict(self._limits)
        if not isolated:
            limits["processes"] += _processes_of_this_user()
        home = "/work" if isolated else str(self.folder)
        ready, ready_write = os.pipe()
        os.set_blocking(ready, False)
        configuration = {
            "folder": str(self.folder),
            "root": str(self._root),
            "isolated": isolated,
            "limits": limits,
            "user_id": self._user_id,
            "ready_fd": ready_write,
            "command": command,
            # Nothing of this process's environment gets in: it may hold keys.
            "environment": {"PATH": _PATH, "HOME": home, "LANG": "C.UTF-8", "TERM": "dumb", **environment},
        }
        child = [sys.executable, "-I", "-S", str(_CHILD), json.dumps(configuration, ensure_ascii=True)]
        try:
            process = await asyncio.create_subprocess_exec(
                *(_unshare() if isolated else []),
                *child,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={"PATH": _PATH},
                cwd="/",
                pass_fds=(ready_write,),
                start_new_session=True,
            )
        except OSError as error:
            os.close(ready)
            raise SandboxError(f"the sandbox could not be started: {error}") from error
        finally:
            os.close(ready_write)
        return ready, process


async def choose_isolation(*, allow_unsandboxed: bool) -> tuple[Isolation, str]:
    """The strongest isolation of this machine, and in words what it is.

    Raises SandboxError when namespaces are not to be had and the weaker form was not asked for.
    """
    try:
        with open_sandbox(Isolation.NAMESPACES, Limits()) as sandbox:
            result = await sandbox.run("true")
        if result.exit_code == 0:
            how = "as another user" if os.geteuid() == 0 else "in a user namespace"
            return Isolation.NAMESPACES, f"own file system, processes and no network (Linux namespaces, {how})"
        reason = result.report
    except SandboxError as error:
        reason = str(error)
    if not allow_unsandboxed:
        raise SandboxError(
            f"commands cannot be isolated on this machine ({reason}). Linux 5.12 or newer, util-linux' unshare and "
            "(without root) unprivileged user namespaces are needed. --allow-unsandboxed runs the policy's commands "
            "with this user's rights, files and network instead: only in a machine that may be lost"
        )
    return Isolation.LIMITS_ONLY, f"resource limits only, NO protection of files and network ({reason})"


@contextmanager
def open_sandbox(isolation: Isolation, limits: Limits) -> Iterator[Sandbox]:
    """A fresh folder, removed at the end."""
    base = Path(tempfile.mkdtemp(prefix="clawstream-terminal-"))
    as_other_user = isolation is Isolation.NAMESPACES and os.geteuid() == 0
    # The folder's random name also chooses the user, so that sandboxes side by side do not share a process limit.
    user_id = _FIRST_USER_ID + zlib.crc32(base.name.encode()) % _USER_IDS if as_other_user else None
    try:
        folder, root = base / "work", base / "root"
        folder.mkdir()
        root.mkdir()
        if user_id is not None:
            os.chown(folder, user_id, user_id)
        yield Sandbox(folder, root, isolation, limits, user_id)
    finally:
        shutil.rmtree(base, onerror=_make_writable_and_retry)


def _make_writable_and_retry(function: object, path: str, error: object) -> None:
    """A command may have taken the rights to its own folders away."""
    with suppress(OSError):
        Path(path).parent.chmod(0o700)
        target = Path(path)
        if target.is_dir() and not target.is_symlink():
            target.chmod(0o700)
            shutil.rmtree(target, ignore_errors=True)
        else:
            target.unlink()


def _unshare() -> list[str]:
    program = shutil.which("unshare")
    if program is None:
        raise SandboxError("the program unshare (util-linux) is not installed")
    # Root needs no user namespace, and becomes a user of its own: the kernel does not limit root's processes.
    return [program, *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), *_NAMESPACES]


def _kill(process: asyncio.subprocess.Process) -> None:
    """The whole process group; in a namespace its first process takes all others with it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _processes_of_this_user() -> int:
    users = (process.info["uids"] for process in psutil.process_iter(["uids"]))
    return sum(user is not None and user.real == os.getuid() for user in users)


def _was_ready(ready: int) -> bool:
    """Whether the child got as far as the command."""
    try:
        return bool(os.read(ready, 1))
    except BlockingIOError:
        return False
    finally:
        os.close(ready)


def _size(file: Path) -> int:
    try:
        return file.lstat().st_size
    except OSError:
        return 0
