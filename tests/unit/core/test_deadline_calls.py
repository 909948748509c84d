"""A call that never returns costs its caller a deadline, and the process a bounded number of threads."""

import contextlib
import gc
import threading
import weakref

import pytest

from clawstream.deadline_calls import DeadlineCalls, DeadlineThread


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


def test_a_thread_makes_one_call_after_another_and_hands_through_what_they_give() -> None:
    calls = DeadlineThread("calls")
    threads = {calls.call(threading.get_ident, what="who", seconds=30.0) for _ in range(3)}
    assert len(threads) == 1
    assert threads != {threading.get_ident()}
    with pytest.raises(ZeroDivisionError):
        calls.call(lambda: 1 // 0, what="dividing", seconds=30.0)
    with pytest.raises(TimeoutError, match="of the call itself"):
        calls.call(raise_timeout, what="waiting", seconds=30.0)
    assert calls.call(lambda: 7, what="counting", seconds=30.0) == 7
    calls.close()


def raise_timeout() -> None:
    raise TimeoutError("of the call itself")


def test_a_thread_whose_call_hangs_is_lost_and_its_late_answer_with_it() -> None:
    calls, release = DeadlineThread("calls"), threading.Event()
    with pytest.raises(TimeoutError, match="committing: no answer within"):
        calls.call(release.wait, what="committing", seconds=0.01)
    release.set()
    with pytest.raises(TimeoutError, match="beginning: an earlier call has not come back"):
        calls.call(lambda: 7, what="beginning", seconds=30.0)
    calls.close()


def test_a_thread_holds_nothing_of_a_call_that_is_over_and_ends_with_its_owner() -> None:
    class Client:
        def use(self) -> threading.Thread:
            return threading.current_thread()

    calls, client = DeadlineThread("calls"), Client()
    thread = calls.call(client.use, what="using", seconds=30.0)
    calls.call(lambda: None, what="something else", seconds=30.0)  # It has let go of the first by now.
    gone = weakref.ref(client)
    del client
    gc.collect()
    assert gone() is None
    del calls
    gc.collect()
    thread.join(30.0)
    assert not thread.is_alive()


def test_a_thread_holds_nothing_of_a_call_that_failed_and_waits_for_no_collector() -> None:
    class Client:
        def use(self) -> None:
            raise ZeroDivisionError

    def failed_call() -> "weakref.ref[Client]":
        client = Client()
        with contextlib.suppress(ZeroDivisionError):
            calls.call(client.use, what="using", seconds=30.0)
        return weakref.ref(client)

    calls = DeadlineThread("calls")
    gc.disable()
    try:
        gone = failed_call()
        calls.call(lambda: None, what="something else", seconds=30.0)  # It has let go of the first by now.
        assert gone() is None
    finally:
        gc.enable()
    calls.close()
