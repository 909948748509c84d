"""Processes that end when the one that started them does, also when that one is killed and can tell nobody."""

import shutil
from collections.abc import Sequence


def ending_with_parent(command: Sequence[str]) -> list[str]:
    """`command` so that the kernel sends it SIGTERM when the thread that started it ends.

    Linux with setpriv (util-linux); without effect elsewhere. Setpriv becomes the program, so the pid is its own.
    """
    setpriv = shutil.which("setpriv")
    return list(command) if setpriv is None else [setpriv, "--pdeathsig", "TERM", *command]
