"""How far long work is, at which rate, and the time left: a bar on a terminal; elsewhere a line now and then.

with ProgressDisplay(errors, SystemClock(), total=72, unit="answers") as display:
    with display.preparing("starting base"):
        ...
    display.describe("base")
    display.advance()
"""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from clawstream.clock import Clock
from clawstream.durations import duration

LINE_SECONDS = 15.0
"""Between two lines where there is no terminal, as in the log of a job."""


class ProgressDisplay:
    """See the module's docstring. `advance`, `describe` and `detail` may be used from any thread."""

    def __init__(
        self, console: Console, clock: Clock, *, total: float, unit: str, line_seconds: float = LINE_SECONDS
    ) -> None:
        """`total` is the amount of work in `unit`, a plural; parts of one count too."""
        self._console = console
        self._clock = clock
        self._total = total
        self._unit = unit
        self._line_seconds = line_seconds
        self._done = 0.0
        self._doing = unit
        self.detail = ""
        """What else there is to say: it stands at the end."""
        self._began_at_seconds = clock.monotonic_seconds()
        self._preparing_since: float | None = None
        self._prepared_seconds = 0.0
        self._ended = threading.Event()
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._lines: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), _Numbers(self))
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task(self._doing, total=self._total)
            self._bar.start()
        else:
            self._lines = threading.Thread(target=self._print_lines, name="progress", daemon=True)
            self._lines.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._bar is not None:
            self._bar.stop()
        if self._lines is not None:
            self._lines.join()
            self._print_line()

    def advance(self, amount: float = 1.0) -> None:
        """More of the work is done."""
        self._done += amount
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)

    def describe(self, doing: str) -> None:
        """What is done from now on. It is told at once."""
        self._doing = doing
        if self._bar is not None:
            self._bar.update(self._task, description=doing)
        else:
            self._print_line()

    @contextmanager
    def preparing(self, doing: str) -> Generator[None]:
        """Time that is spent inside counts for no rate."""
        since = self._preparing_since = self._clock.monotonic_seconds()
        self.describe(doing)
        try:
            yield
        finally:
            self._preparing_since = None
            self._prepared_seconds += self._clock.monotonic_seconds() - since

    def numbers(self) -> str:
        """For example `18 of 72 answers, 41 s, 26.3 a minute, 123 s left, 4 solved`."""
        now = self._clock.monotonic_seconds()
        words = [f"{int(self._done + 1e-9)} of {self._total:.0f} {self._unit}", duration(now - self._began_at_seconds)]
        since = self._preparing_since
        preparing = 0.0 if since is None else now - since
        seconds = now - self._began_at_seconds - self._prepared_seconds - preparing
        if self._done > 0 and seconds > 0:
            left = max(self._total - self._done, 0.0) * seconds / self._done
            words += [f"{60 * self._done / seconds:.1f} a minute", f"{duration(left)} left"]
        return ", ".join([*words, self.detail] if self.detail else words)

    def _print_line(self) -> None:
        self._console.print(f"{self._doing}: {self.numbers()}", markup=False, highlight=False, soft_wrap=True)

    def _print_lines(self) -> None:
        while not self._ended.wait(self._line_seconds):
            self._print_line()


class _Numbers(ProgressColumn):
    """Rendered again and again, so that its times are true between two advances."""

    def __init__(self, display: ProgressDisplay) -> None:
        super().__init__(table_column=Column(no_wrap=True))
        self._display = display

    def render(self, task: Task) -> Text:
        return Text(self._display.numbers())
