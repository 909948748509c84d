"""The judge's rows of the design: turns scored in a second, next state to sample, and what more judges bring.

    python -m benchmarks.judge_and_teacher [--parts throughput,latency,scaling]

A real broker, a stub model over HTTP, m = 3 votes, the ledger, and every process started as in production. Prints one
JSON object a part. Rates are of the middle of a backlog, from the 10th to the 90th hundredth of the scores, so that
neither starting nor running dry counts. Beside the judge's rate stands that of a loop that only decodes, validates and
echoes the same records in transactions of the same clients: what the machine could do if judging cost nothing.
"""

import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import psutil
import typer

from benchmarks.judged_system import JudgedSystem, conversations, wait_until
from clawstream import topics
from clawstream.broker import LocalBroker
from clawstream.bus.fold import LogReader
from clawstream.bus.interface import Bus, OutgoingRecord, RebalanceCallbacks, Record
from clawstream.codec import decode_as, encode
from clawstream.topics import full_name
from schemas.events import NextStateEvent

GOAL_TURNS_PER_SECOND = 1000
GOAL_P50_SECONDS = 0.050
GOAL_P99_SECONDS = 0.200
GOAL_LINEAR_SHARE = 0.9
SLOW_MODEL_SECONDS = 0.3
_ECHO_BATCH = 500


def judge_section(url: str) -> str:
    """The judge's settings."""
    return f'[judge]\nspec = {{ backend = "openai", model = "stub", votes = 3 }}\nmodel = {{ urls = ["{url}"] }}\n'


def score_times(bus: Bus, namespace: str) -> list[float]:
    """When the scores were written, in seconds since 1970, in order."""
    times: list[float] = []
    reader = LogReader(bus, [full_name(namespace, topics.SCORES)])
    reader.bootstrap(lambda record: times.append(record.timestamp_milliseconds / 1000))
    reader.close()
    return sorted(times)


def middle_rate(times: Sequence[float]) -> float:
    """Scores a second between the 10th and the 90th hundredth."""
    first, last = len(times) // 10, len(times) * 9 // 10
    return (last - first) / (times[last] - times[first])


class Counter:
    """How many records a topic holds, without reading them again."""

    def __init__(self, bus: Bus, topic: str) -> None:
        self._reader = LogReader(bus, [topic])
        self.count = 0

    def reaches(self, wanted: int) -> bool:
        """Reads what has come since."""
        while records := self._reader.poll(0.1, max_records=5000):
            self.count += len(records)
        return self.count >= wanted

    def close(self) -> None:
        self._reader.close()


def judged(system: JudgedSystem, namespace: str, *, turns: int, judges: int, delay_seconds: float) -> dict[str, float]:
    """Scores `turns` turns with so many judges."""
    bus = system.bus(namespace)
    waiting = conversations(bus, namespace, turns)
    with (
        system.model(delay_seconds) as url,
        system.processes(namespace, ["judge"] * judges, judge_section(url)) as processes,
    ):
        cpu_before = sum(_cpu_seconds(process) for process in processes)
        scores = Counter(bus, full_name(namespace, topics.SCORES))
        waiting.write()
        wait_until(lambda: scores.reaches(turns), processes)
        scores.close()
        cpu = sum(_cpu_seconds(process) for process in processes) - cpu_before
        return {
            "turns_per_second": round(middle_rate(score_times(bus, namespace)), 1),
            "cpu_milliseconds_per_turn": round(1000 * cpu / turns, 3),
        }


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def echo_rate(system: JudgedSystem, namespace: str, turns: int) -> float:
    """Next states a second that one thread decodes, validates, encodes and echoes in transactions."""
    bus = system.bus(namespace)
    conversations(bus, namespace, turns).write()
    source, target = full_name(namespace, topics.NEXT_STATES), full_name(namespace, topics.SCORES)
    return round(echo(bus, source, target, turns, group=f"{namespace}.echo"), 1)


def echo(bus: Bus, source: str, target: str, turns: int, *, group: str) -> float:
    """The same from one topic to another, by full name."""
    callbacks = RebalanceCallbacks(lambda _: None, lambda _: None, lambda _: None)
    consumer = bus.group_consumer([source], group=group, instance="echo", callbacks=callbacks)
    producer = bus.transactional_producer(group)
    times: list[float] = []
    while len(times) < turns:
        records = consumer.consume(_ECHO_BATCH, 0.1)
        if not records:
            continue
        producer.begin()
        for record in records:
            producer.produce(_echo(record, target))
        producer.send_offsets(
            {record.topic_partition: record.offset + 1 for record in records}, consumer.group_metadata()
        )
        producer.commit()
        times += [time.monotonic()] * len(records)
    producer.close()
    consumer.close()
    return middle_rate(times)


def _echo(record: Record, target: str) -> OutgoingRecord:
    event = decode_as(record, NextStateEvent)
    return encode(event, topic=target, key=event.session_id, event_id=event.next_state_id, source="echo")


def latency(system: JudgedSystem, namespace: str, *, turns: int, per_second: float) -> dict[str, float]:
    """Seconds from a next state's acknowledgement to its sample's arrival at a reader of committed records."""
    bus = system.bus(namespace)
    waiting = conversations(bus, namespace, turns)
    acknowledged: dict[str, float] = {}
    arrived: dict[str, float] = {}
    stop = threading.Event()

    def follow() -> None:
        reader = LogReader(bus, [full_name(namespace, topics.SAMPLES)])
        while not stop.is_set():
            for record in reader.poll(0.05):
                now = time.monotonic()
                arrived[(record.key or b"").decode()] = now
        reader.close()

    with (
        system.model(0.0) as url,
        system.processes(namespace, ["judge", "teacher"], judge_section(url)) as processes,
    ):
        follower = threading.Thread(target=follow)
        follower.start()
        try:
            producer = bus.producer()
            for number, record in enumerate(waiting.next_states):
                due = time.monotonic() + 1 / per_second
                producer.produce(
                    record, lambda _, number=number: acknowledged.update({f"turn-{number}": time.monotonic()})
                )
                while (left := due - time.monotonic()) > 0:
                    producer.poll(left)
            producer.flush(60)
            producer.close()
            wait_until(lambda: len(arrived) == turns, processes)
        finally:
            stop.set()
            follower.join()
    # The first ones open connections and compile what is compiled at first use.
    seconds = sorted(arrived[name] - acknowledged[name] for name in list(acknowledged)[turns // 10 :])
    return {
        "p50_seconds": round(statistics.median(seconds), 4),
        "p99_seconds": round(seconds[int(len(seconds) * 0.99)], 4),
        "longest_seconds": round(seconds[-1], 4),
        "turns_per_second": per_second,
    }


def _print(part: str, **values: object) -> None:
    sys.stdout.write(json.dumps({"benchmark": f"judge_{part}", **values}) + "\n")
    sys.stdout.flush()


def main(
    parts: Annotated[str, typer.Option(help="Which, with commas between.")] = "throughput,latency,scaling",
    turns: Annotated[int, typer.Option(help="Turns of the throughput part.")] = 8000,
    rounds: Annotated[int, typer.Option(help="Rounds of the throughput part; the median counts.")] = 3,
    seconds: Annotated[float, typer.Option(help="About how long each part of the others takes.")] = 20.0,
) -> None:
    """Measures the parts and prints one JSON object for each."""
    names = (f"bench-{number}" for number in itertools.count())
    with tempfile.TemporaryDirectory() as folder, LocalBroker(Path(folder) / "kafka", ends_with_parent=True) as broker:
        system = JudgedSystem(Path(folder), broker)
        if "throughput" in parts:
            found = [judged(system, next(names), turns=turns, judges=1, delay_seconds=0.0) for _ in range(rounds)]
            best = sorted(found, key=lambda each: each["turns_per_second"])[rounds // 2]
            echoed = echo_rate(system, next(names), turns)
            _print(
                "throughput",
                **best,
                goal_turns_per_second=GOAL_TURNS_PER_SECOND,
                echo_turns_per_second=echoed,
                share_of_echo=round(best["turns_per_second"] / echoed, 3),
            )
        if "latency" in parts:
            per_second = 20.0
            measured = latency(system, next(names), turns=int(seconds * per_second), per_second=per_second)
            _print("to_sample", **measured, goal_p50_seconds=GOAL_P50_SECONDS, goal_p99_seconds=GOAL_P99_SECONDS)
        if "scaling" in parts:
            # 64 answers at once of 0.3 seconds, three for a turn: about 70 turns a second for each judge.
            rates: dict[int, float] = {}
            for judges in (1, 2, 3):
                count = int(71 * judges * seconds)
                result = judged(system, next(names), turns=count, judges=judges, delay_seconds=SLOW_MODEL_SECONDS)
                rates[judges] = result["turns_per_second"]
            shares = {judges: round(rate / (judges * rates[1]), 3) for judges, rate in rates.items()}
            _print("scaling", turns_per_second=rates, share_of_linear=shares, goal_share=GOAL_LINEAR_SHARE)


if __name__ == "__main__":
    typer.run(main)
