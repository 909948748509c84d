"""How much a command may take. Every number is a bound that the kernel or the runner enforces."""

from dataclasses import dataclass
from typing import Final

MEGABYTE: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one command and everything that it starts."""

    timeout_seconds: float = 20.0
    """Wall-clock time; then everything is killed."""
    cpu_seconds: int = 20
    """Processor time of each process (RLIMIT_CPU)."""
    memory_bytes: int = 512 * MEGABYTE
    """Address space of each process (RLIMIT_AS); together with `processes` it bounds the whole."""
    processes: int = 64
    """Processes and threads at a time (RLIMIT_NPROC)."""
    file_bytes: int = 16 * MEGABYTE
    """The largest file that can be written (RLIMIT_FSIZE)."""
    open_files: int = 128
    """File descriptors of each process (RLIMIT_NOFILE)."""
    temporary_bytes: int = 16 * MEGABYTE
    """All of `/tmp`, which lives in memory and is empty for every command. Only with namespaces."""
    folder_bytes: int = 64 * MEGABYTE
    """The whole working folder, looked at after every command; one that is larger ends the rollout."""
    output_bytes: int = 6000
    """Of what a command prints, so much is shown: the first three tenths and the last seven."""
    flood_bytes: int = 4 * MEGABYTE
    """A command that prints more is killed."""
