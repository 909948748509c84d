"""Blocking calls under a deadline of our own, for libraries that may never return (a hung mount, a silent socket)."""

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


class DeadlineCalls:
    """Calls that end in time, or are left behind on threads of their own. Thread-safe.

    A thread cannot be ended from outside. So that calls which hang do not pile up, none is begun while
    `most_left_behind` of them have not come back.
    """

    def __init__(self, what: str, *, seconds: float, most_left_behind: int = 4) -> None:
        """`what` is called, for messages."""
        self._what = what
        self._seconds = seconds
        self._most_left_behind = most_left_behind
        self._left_behind = 0
        self._lock = threading.Lock()

    def call(self, function: Callable[[], Result]) -> Result:
        """What `function` returns or raises. Raises TimeoutError when it does neither within the time."""
        with self._lock:
            if self._left_behind >= self._most_left_behind:
                raise TimeoutError(f"{self._what}: {self._left_behind} earlier calls have not come back")
        answer: Future[Result] = Future()

        def run() -> None:
            try:
                answer.set_result(function())
            except BaseException as error:  # Handed to the caller, which raises it.
                answer.set_exception(error)

        threading.Thread(target=run, name=f"deadline {self._what}", daemon=True).start()
        try:
            return answer.result(timeout=self._seconds)
        except TimeoutError:
            if answer.done():  # The function's own, or what came at the last moment.
                return answer.result()
            with self._lock:
                self._left_behind += 1
            answer.add_done_callback(self._came_back)
            raise TimeoutError(f"{self._what}: no answer within {self._seconds:.0f} seconds") from None

    def _came_back(self, _answer: object) -> None:
        with self._lock:
            self._left_behind -= 1


class DeadlineThread:
    """The same for many calls, one after another, without a new thread for each. Not thread-safe.

    A call that does not end in time takes the thread with it: every later one raises TimeoutError at once.
    """

    def __init__(self, name: str) -> None:
        """Starts the thread, which ends with `close`, or when nobody holds this object any more."""
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_lost = False
        self.close: Callable[[], object] = weakref.finalize(self, self._calls.put, None)
        """Ends the thread, after the call that it may be making. May be called twice."""
        threading.Thread(target=_make_calls, args=(self._calls,), name=name, daemon=True).start()

    def call(self, function: Callable[[], Result], *, what: str, seconds: float) -> Result:
        """What `function` returns or raises. Raises TimeoutError, which names `what`, when it does neither in time."""
        if self._is_lost:
            raise TimeoutError(f"{what}: an earlier call has not come back")
        # One for each call: what comes too late finds nobody.
        answers: queue.SimpleQueue[tuple[Result, None] | tuple[None, BaseException]] = queue.SimpleQueue()

        def run() -> None:
            try:
                answers.put((function(), None))
            except BaseException as error:  # Handed to the caller, which raises it.
                answers.put((None, error))

        self._calls.put(run)
        try:
            answer = answers.get(timeout=seconds)
        except queue.Empty:
            self._is_lost = True
            raise TimeoutError(f"{what}: no answer within {seconds:.0f} seconds") from None
        try:
            if answer[1] is not None:
                raise answer[1]
            return answer[0]
        finally:
            # The error knows this frame, and must not be known to it: else both live, and with them what was called, a
            # Kafka client with its threads, until Python's collector comes by.
            del answer


def _make_calls(calls: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    """The thread. Knows the queue alone, and holds no call longer than it takes: what it refers to may be closed."""
    call = calls.get()
    while call is not None:
        call()
        del call
        call = calls.get()
