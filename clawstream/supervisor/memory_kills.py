"""Whether the kernel ended processes because memory ran out."""

from pathlib import Path

KERNEL_COUNTERS = Path("/proc/vmstat")


def memory_kills(counters: Path = KERNEL_COUNTERS) -> int | None:
    """Processes that the kernel's OOM killer has ended since the machine started; None where it does not say."""
    try:
        lines = counters.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    found = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
    return int(found[0]) if found and found[0].isdigit() else None


def kill_hint(before: int | None, after: int | None) -> str:
    """What to make of a SIGKILL that nobody here sent, from the kernel's count at the process's start and end."""
    if before is not None and after is not None and after > before:
        return (
            "the kernel has ended a process for want of memory since its start; `clawstream doctor` estimates the need"
        )
    return "not sent by the supervisor; if nobody did, memory ran out: see `dmesg` and `clawstream doctor`"
