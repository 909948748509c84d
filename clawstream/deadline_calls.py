"""Blocking calls under a deadline of our own, for libraries that may never return (a hung mount, a silent socket)."""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
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
        answers: SimpleQueue[tuple[Result | None, BaseException | None]] = SimpleQueue()
        is_back, is_left_behind = threading.Event(), threading.Event()  # Whichever is first, under the lock.

        def run() -> None:
            try:
                answer: tuple[Result | None, BaseException | None] = (function(), None)
            except BaseException as error:  # Handed to the caller, which raises it.
                answer = (None, error)
            with self._lock:
                is_back.set()
                if is_left_behind.is_set():
                    self._left_behind -= 1
            answers.put(answer)

        threading.Thread(target=run, name=f"deadline {self._what}", daemon=True).start()
        try:
            result, error = answers.get(timeout=self._seconds)
        except Empty:
            with self._lock:
                if not is_back.is_set():
                    is_left_behind.set()
                    self._left_behind += 1
            if is_left_behind.is_set():
                raise TimeoutError(f"{self._what}: no answer within {self._seconds:.0f} seconds") from None
            result, error = answers.get()
        if error is not None:
            raise error
        return result  # pyright: ignore[reportReturnType] - without an error there is a result
