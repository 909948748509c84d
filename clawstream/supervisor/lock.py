"""At most one supervisor per data directory."""

import fcntl
import os
from pathlib import Path
from typing import TextIO

from clawstream.errors import SupervisorError
from clawstream.process_identity import ProcessIdentity, write_pid_file
from clawstream.supervisor.report import PID_NAME, running_supervisor


class SupervisorLock:
    """The kernel releases it however its holder ends."""

    def __init__(self, directory: Path) -> None:
        """Raises SupervisorError naming the holder's pid and the directory."""
        directory.mkdir(parents=True, exist_ok=True)
        self._pid_file = directory / PID_NAME
        self._file: TextIO = (directory / "supervisor.lock").open("w")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            holder = running_supervisor(directory)
            who = f"pid {holder.pid}" if holder else "another process"
            raise SupervisorError(
                f"{directory} is in use by a supervisor ({who}); stop it with `clawstream down`, or use another "
                "data_directory"
            ) from error
        write_pid_file(self._pid_file, ProcessIdentity.of(os.getpid()))

    def release(self) -> None:
        """Gives the directory back."""
        self._pid_file.unlink(missing_ok=True)
        self._file.close()
