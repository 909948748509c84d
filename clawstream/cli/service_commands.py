"""Commands that live with a service: `replay` and `judge` with the judge, `retrain` with the trainer.

The core imports no service, so each runs as a process of its own, with the same arguments and exit code.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from types import FrameType, MappingProxyType
from typing import Final

import typer

_MODULES: Final = MappingProxyType(
    {
        "replay": ("services.judge.replay", "Judge history again under another spec: run, report, list."),
        "judge": ("services.judge.promotion", "Which judge spec counts: promote, rollback, list."),
        "retrain": ("services.trainer.retrain", "Train archived batches again, from chosen weights: a new lineage."),
    }
)
_NO_NAMES: Final[tuple[str, ...]] = ()
_ANY_ARGUMENTS: Final = MappingProxyType(
    {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": _NO_NAMES}
)


def register(app: typer.Typer) -> None:
    """Adds the commands. Their help is the module's own."""
    for name, (module, description) in _MODULES.items():
        app.command(name=name, help=description, context_settings=dict(_ANY_ARGUMENTS), add_help_option=False)(
            _runner(module)
        )


def _runner(module: str) -> Callable[[typer.Context], None]:
    def run(context: typer.Context) -> None:
        raise typer.Exit(run_module(module, context.args))

    return run


def run_module(module: str, arguments: list[str]) -> int:
    """Runs `python -m MODULE ARGUMENTS`; returns its exit code. Ctrl-C is the command's own to handle."""
    process = subprocess.Popen([sys.executable, "-m", module, *arguments], env=os.environ)
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)  # The terminal sends it to both.

    def end(_number: int, _frame: FrameType | None) -> None:
        process.terminate()

    forwarded = signal.signal(signal.SIGTERM, end)
    try:
        return process.wait()
    finally:
        signal.signal(signal.SIGINT, ignored)
        signal.signal(signal.SIGTERM, forwarded)
