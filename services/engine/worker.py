"""The thread that computes: it alone touches the scheduler; everyone else hands it functions to call between steps."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from clawstream.engine.interface import PauseMode
from clawstream.log import Logger
from services.engine.answer import Answer
from services.engine.scheduler import Scheduler
from services.engine.weights import ModelWeights

Result = TypeVar("Result")


class EngineWorker:
    """Runs the scheduler's steps on a thread of its own until it is stopped or a step fails."""

    def __init__(self, scheduler: Scheduler, *, log: Logger, on_failure: Callable[[], None]) -> None:
        """`on_failure` is called from the thread when a step raised: the process should exit."""
        self._scheduler = scheduler
        self._log = log
        self._on_failure = on_failure
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._pause_mode: PauseMode | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine-worker", daemon=True)

    def start(self) -> None:
        """Start computing."""
        self._thread.start()

    def stop(self) -> None:
        """End all answers and the thread; returns when it has ended."""
        self._commands.put(self._stop)
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def is_paused(self) -> bool:
        """Whether generation is paused."""
        return self._pause_mode is not None

    @property
    def num_requests(self) -> int:
        """Requests in flight, waiting ones included."""
        return self._scheduler.num_waiting + self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return self._scheduler.num_waiting

    @property
    def weight_version(self) -> str:
        """The weights in service."""
        return self._scheduler.weight_version

    def submit(self, answer: Answer) -> None:
        """Queue a request."""
        self._commands.put(lambda: self._scheduler.add(answer))

    def abort(self, rid: str, message: str) -> None:
        """End a request with what it has."""
        self._commands.put(lambda: self._scheduler.abort(rid, message))

    def abort_all(self, message: str) -> Future[None]:
        """End every request with what it has."""
        return self._between_steps(lambda: self._scheduler.abort_all(message))

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop after the current step. Requests that arrive meanwhile wait."""

        def pause() -> None:
            if mode is PauseMode.ABORT:
                self._scheduler.abort_all("generation was paused with mode abort")
            self._pause_mode = mode

        return self._between_steps(pause)

    def resume(self) -> Future[None]:
        """Undo `pause`."""

        def resume() -> None:
            self._pause_mode = None

        return self._between_steps(resume)

    def forget_prefixes(self) -> Future[None]:
        """Empty the prefix cache."""
        return self._between_steps(self._scheduler.forget_prefixes)

    def swap_weights(self, weights: ModelWeights, weight_version: str) -> Future[int]:
        """Put weights into service between two steps, paused or not; the result is the number of requests in flight.

        Running answers keep their keys and values only while paused with `in_place`.
        """

        def swap() -> int:
            in_place = self._pause_mode is PauseMode.IN_PLACE
            self._scheduler.swap_weights(weights, weight_version, keep_running=in_place)
            return self.num_requests

        return self._between_steps(swap)

    def _between_steps(self, function: Callable[[], Result]) -> Future[Result]:
        future: Future[Result] = Future()
        self._commands.put(lambda: future.set_result(function()))
        return future

    def _stop(self) -> None:
        self._scheduler.abort_all("the engine is shutting down")
        self._stopping = True

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_commands()
                if self._scheduler.has_work and not self.is_paused and not self._stopping:
                    self._scheduler.step()
        except Exception:
            # The boundary of the thread: whatever went wrong, nobody else can go on computing.
            self._log.exception("a step failed; the engine cannot go on")
            self._scheduler.abort_all("the engine failed")
            self._on_failure()

    def _take_commands(self) -> None:
        """Call what was handed over; wait for something when there is nothing to compute."""
        if self.is_paused or not self._scheduler.has_work:
            self._commands.get()()
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()
