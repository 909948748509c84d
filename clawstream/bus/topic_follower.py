"""Follows a topic of decisions, such as `config`, on a thread of its own."""

import threading
from collections.abc import Callable

from clawstream.bus.fold import LogReader
from clawstream.bus.interface import Bus, Record

_WAIT_SECONDS = 0.5


class TopicFollower:
    """First reads everything that was ever decided, then what comes."""

    def __init__(
        self,
        bus: Bus,
        topic: str,
        apply: Callable[[Record], None],
        *,
        on_failure: Callable[[], None],
        stopped: Callable[[], bool],
    ) -> None:
        """Returns once the topic was read to its end, or when `stopped`, though no broker answers.

        `on_failure` is called when following it became impossible. Raises what `apply` raises, and BusError.
        """
        self._apply = apply
        self._on_failure = on_failure
        self._reader = LogReader(bus, [topic], follows=True)
        self._stop = threading.Event()
        self.failure: Exception | None = None
        """Why following ended; None while it goes on."""
        self._reader.bootstrap(apply, stopped=stopped)
        self._thread = threading.Thread(target=self._run, name=f"follows-{topic}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops following."""
        self._stop.set()
        self._thread.join()
        self._reader.close()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                for record in self._reader.poll(_WAIT_SECONDS):
                    self._apply(record)
        except Exception as error:  # The thread's boundary: the process ends with it.
            self.failure = error
            self._on_failure()
