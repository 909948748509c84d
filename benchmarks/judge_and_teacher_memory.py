"""Many turns through a judge (rules) and a teacher: memory stays bounded, and an event goes on costing the same.

    python -m benchmarks.judge_and_teacher_memory [--turns 20000]   1,000,000: about an hour, 2 cores, some GB of disk

The next turns, 5,000 at most, are written when the samples of the last ones are there: memory that grows is then kept
for what is done, not for what waits, here as in the processes. The teacher's cache of turns, 64 MiB by default, is set
to 4 MiB, so that it is full before memory counts. After every twentieth of the turns one line says what each process
holds and what an event since the last line cost. The first fifth is warm-up. Exits with 1 when a process grew by more
than the goal between there and the end, or when an event of the last third costs more than the goal times what one of
the first third after it did. Costs are compared as multiples of what writing the same turns cost this program: on a
busy machine all of them rise. Ends with an error when the disk is nearly full, or when samples stay away for minutes.
"""

import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import psutil
import typer

from benchmarks.judge_and_teacher import Counter
from benchmarks.judged_system import JudgedSystem, conversations, wait_until
from clawstream import topics
from clawstream.broker import LocalBroker
from clawstream.topics import full_name

GOAL_GROWN_MEGABYTES = 50.0
GOAL_COST_RATIO = 1.3
SERVICES = ("judge", "teacher")
WRITER = "writer"
_CHUNKS = 20
_TURNS_AT_ONCE = 5000
"""Written, and waited for: however many turns a chunk has, patience is for so many and memory of this program too."""
_LEAST_FREE_BYTES = 2_000_000_000
_WARM_UP_SHARE = 0.2
_TURNS_OF_SESSION = 5
_NAMESPACE = "bench-memory"
_SECTIONS = """\
[judge]
spec = { backend = "rules", rules = [["thanks", 1], ["no", -1]] }
[teacher]
turn_cache_bytes = 4194304
"""


@dataclass(frozen=True, slots=True)
class Mark:
    """After one chunk."""

    turns: int
    """So far."""
    turns_per_second: float
    """Of this chunk, with writing it."""
    resident_megabytes: dict[str, float]
    """By process."""
    cpu_milliseconds_per_event: dict[str, float]
    """By process, of this chunk; of `writer`, which is this program, for making and writing its turn."""
    free_disk_megabytes: float = 0.0
    """Where the log is."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one process."""

    grown_megabytes: float
    """Resident set at the end, less that after the warm-up."""
    cost_ratio: float
    """CPU time of an event, as a multiple of the writer's: in the last third to the first third after the warm-up;
    medians."""

    @property
    def holds(self) -> bool:
        """Whether both are within their goals."""
        return self.grown_megabytes <= GOAL_GROWN_MEGABYTES and self.cost_ratio <= GOAL_COST_RATIO


def verdict(marks: Sequence[Mark], process: str) -> Verdict:
    """What the marks of a run, at least four, say of a process."""
    settled = marks[int(len(marks) * _WARM_UP_SHARE) :]
    third = max(1, len(settled) // 3)
    costs = [mark.cpu_milliseconds_per_event[process] / mark.cpu_milliseconds_per_event[WRITER] for mark in settled]
    memory = [mark.resident_megabytes[process] for mark in settled]
    return Verdict(
        grown_megabytes=round(memory[-1] - memory[0], 1),
        cost_ratio=round(statistics.median(costs[-third:]) / statistics.median(costs[:third]), 3),
    )


def measure(system: JudgedSystem, broker: LocalBroker, turns: int) -> list[Mark]:
    """Runs all of it; prints every mark when it is there."""
    bus = system.bus(_NAMESPACE)
    chunk = max(1, turns // _CHUNKS)
    marks: list[Mark] = []
    with system.processes(_NAMESPACE, SERVICES, _SECTIONS) as started:
        processes = dict(zip(SERVICES, started, strict=True))
        node = broker.running()
        assert node is not None
        watched = {**processes, "broker": psutil.Process(node.pid), WRITER: psutil.Process()}
        samples = Counter(bus, full_name(_NAMESPACE, topics.SAMPLES))
        cpu = {name: _cpu_seconds(process) for name, process in watched.items()}
        since = time.perf_counter()
        for first in range(0, turns, chunk):
            done = first + chunk
            for start in range(first, done, _TURNS_AT_ONCE):
                end = min(start + _TURNS_AT_ONCE, done)
                _free_disk_bytes(broker)
                sessions = max(1, turns // _TURNS_OF_SESSION)
                conversations(bus, _NAMESPACE, end - start, sessions=sessions, first=start).write()
                wait_until(lambda end=end: samples.reaches(end), started)
            before, cpu = cpu, {name: _cpu_seconds(process) for name, process in watched.items()}
            now = time.perf_counter()
            mark = Mark(
                turns=done,
                turns_per_second=round(chunk / (now - since), 1),
                resident_megabytes={name: round(each.memory_info().rss / 1e6, 1) for name, each in watched.items()},
                cpu_milliseconds_per_event={name: round(1000 * (cpu[name] - before[name]) / chunk, 3) for name in cpu},
                free_disk_megabytes=round(_free_disk_bytes(broker) / 1e6),
            )
            since = now
            marks.append(mark)
            _print("judge_and_teacher_memory_mark", **asdict(mark))
        samples.close()
    return marks


def _free_disk_bytes(broker: LocalBroker) -> int:
    """Raises RuntimeError when it is too little to go on: others may need the disk too."""
    free = shutil.disk_usage(broker.directory).free
    if free < _LEAST_FREE_BYTES:
        raise RuntimeError(f"{broker.directory}: {free / 1e6:.0f} MB are left on its disk; make room, or fewer --turns")
    return free


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _print(benchmark: str, **values: object) -> None:
    sys.stdout.write(json.dumps({"benchmark": benchmark, **values}) + "\n")
    sys.stdout.flush()


def main(turns: Annotated[int, typer.Option(help="How many.", min=_CHUNKS)] = 20_000) -> None:
    """Prints one JSON object for each chunk and one for the whole."""
    with tempfile.TemporaryDirectory() as folder, LocalBroker(Path(folder) / "kafka", ends_with_parent=True) as broker:
        marks = measure(JudgedSystem(Path(folder), broker), broker, turns)
    verdicts = {name: verdict(marks, name) for name in SERVICES}
    _print(
        "judge_and_teacher_memory",
        turns=turns,
        goal_grown_megabytes=GOAL_GROWN_MEGABYTES,
        goal_cost_ratio=GOAL_COST_RATIO,
        **{name: asdict(each) for name, each in verdicts.items()},
    )
    if not all(each.holds for each in verdicts.values()):
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
