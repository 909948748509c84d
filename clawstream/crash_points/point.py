"""Which point, and how often it is passed before the process ends."""

import os
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Final

from clawstream.errors import SettingsError

CRASH_AT: Final = "CLAWSTREAM_CRASH_AT"
ALLOWED: Final = "CLAWSTREAM_CRASH_ALLOWED"
SIGNAL: Final = "CLAWSTREAM_CRASH_SIGNAL"
_YES: Final = "yes-this-is-a-test"

AFTER_CONSUME: Final = "after-consume"
AFTER_ANSWER: Final = "after-answer"
AFTER_BEGIN: Final = "after-begin"
AFTER_PRODUCE: Final = "after-produce"
AFTER_FLUSH: Final = "after-flush"
AFTER_SEND_OFFSETS: Final = "after-send-offsets"
BEFORE_COMMIT: Final = "before-commit"
AFTER_COMMIT: Final = "after-commit"
IN_REVOKE: Final = "in-revoke"
AFTER_REVOKE: Final = "after-revoke"
BEFORE_BLOB_WRITE: Final = "before-blob-write"
AFTER_BLOB_WRITE: Final = "after-blob-write"
BEFORE_OUTBOX_SYNC: Final = "before-outbox-sync"
AFTER_OUTBOX_SYNC: Final = "after-outbox-sync"
BEFORE_CHECKPOINT: Final = "before-checkpoint"
AFTER_TURN_LEDGER: Final = "after-turn-ledger"
AFTER_CHECKPOINT: Final = "after-checkpoint"
BEFORE_WEIGHTS_EVENT: Final = "before-weights-event"
AFTER_WEIGHTS_EVENT: Final = "after-weights-event"

POINTS: Final = (
    AFTER_CONSUME,
    AFTER_ANSWER,
    AFTER_BEGIN,
    AFTER_PRODUCE,
    AFTER_FLUSH,
    AFTER_SEND_OFFSETS,
    BEFORE_COMMIT,
    AFTER_COMMIT,
    IN_REVOKE,
    AFTER_REVOKE,
    BEFORE_BLOB_WRITE,
    AFTER_BLOB_WRITE,
    BEFORE_OUTBOX_SYNC,
    AFTER_OUTBOX_SYNC,
    BEFORE_CHECKPOINT,
    AFTER_TURN_LEDGER,
    AFTER_CHECKPOINT,
    BEFORE_WEIGHTS_EVENT,
    AFTER_WEIGHTS_EVENT,
)
"""Every name there is."""


def _signal_ourselves(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


class CrashPoint:
    """The one point at which this process ends. Thread-safe."""

    def __init__(self, name: str, passes: int = 1, *, end: Callable[[], None]) -> None:
        """Ends when `name` is reached for the `passes`-th time, by `end`."""
        self.name = name
        self._left = passes
        self._end = end
        self._lock = threading.Lock()

    def reach(self, name: str) -> None:
        """The process passes the point `name`."""
        if name != self.name:
            return
        with self._lock:
            self._left -= 1
            if self._left != 0:
                return
        os.write(2, f"crash point {name} reached\n".encode())
        self._end()


def crash_point(environment: Mapping[str, str]) -> CrashPoint | None:
    """The point that `CLAWSTREAM_CRASH_AT` names; None when it is not set.

    The process is killed as a power cut would, or with `CLAWSTREAM_CRASH_SIGNAL=SIGSTOP` becomes a zombie that may be
    continued later. Raises SettingsError for an unknown name, and unless `CLAWSTREAM_CRASH_ALLOWED` says that this is
    a test.
    """
    wanted = environment.get(CRASH_AT)
    if wanted is None:
        return None
    if environment.get(ALLOWED) != _YES:
        raise SettingsError(f"{CRASH_AT} kills this process; unset it, or in a test set {ALLOWED}={_YES}")
    name, _, passes = wanted.partition(":")
    if name not in POINTS or (passes and (not passes.isdecimal() or int(passes) < 1)):
        raise SettingsError(
            f"{CRASH_AT}={wanted}: expected NAME or NAME:N with N from 1, and NAME of {', '.join(POINTS)}"
        )
    number = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}.get(environment.get(SIGNAL, "SIGKILL"))
    if number is None:
        raise SettingsError(f"{SIGNAL}={environment[SIGNAL]}: expected SIGKILL or SIGSTOP")
    return CrashPoint(name, int(passes or 1), end=lambda: _signal_ourselves(number))
