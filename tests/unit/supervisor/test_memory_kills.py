"""What a SIGKILL that nobody here sent is put down to."""

from pathlib import Path

from clawstream.supervisor.memory_kills import kill_hint, memory_kills


def test_the_kernels_count(tmp_path: Path) -> None:
    counters = tmp_path / "vmstat"
    assert memory_kills(counters) is None
    counters.write_text("nr_free_pages 1\noom_kill 3\n")
    assert memory_kills(counters) == 3
    counters.write_text("nr_free_pages 1\n")
    assert memory_kills(counters) is None


def test_a_count_that_rose_is_a_cause_and_else_memory_is_a_guess() -> None:
    assert kill_hint(1, 2).startswith("the kernel has ended a process for want of memory")
    for before, after in ((1, 1), (None, 2), (1, None)):
        assert "if nobody did, memory ran out" in kill_hint(before, after)
