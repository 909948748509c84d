"""A call that never returns costs its caller a deadline, and the process a bounded number of threads."""

import threading

import pytest

from clawstream.deadline_calls import DeadlineCalls


def test_what_a_call_returns_and_raises_comes_through() -> None:
    calls = DeadlineCalls("store", seconds=30.0)
    assert calls.call(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        calls.call(lambda: 1 // 0)


def test_calls_that_hang_are_left_behind_up_to_a_number_and_forgiven_when_they_come_back() -> None:
    calls = DeadlineCalls("store", seconds=0.01, most_left_behind=2)
    release, came_back = threading.Event(), threading.Semaphore(0)

    def hang() -> None:
        release.wait()
        came_back.release()

    for _ in range(2):
        with pytest.raises(TimeoutError, match="store: no answer within"):
            calls.call(hang)
    with pytest.raises(TimeoutError, match="2 earlier calls have not come back"):
        calls.call(lambda: 7)
    release.set()
    for _ in range(2):
        came_back.acquire()
    patient = threading.Event()
    while True:  # The counts go down a moment after the calls return.
        try:
            assert calls.call(lambda: 7) == 7
        except TimeoutError:
            patient.wait(0.001)
        else:
            break
