"""A replay of history against a loop that only decodes, validates and echoes the same records in transactions.

    python -m benchmarks.replay_against_echo [--turns 30000] [--rounds 5] [--judges code,model]

A real broker, one history, and `clawstream replay run` as people start it, in turn with the echo, round by round. The
goal is for a stub judge in code; `model` is the same with three votes of a stub model over HTTP, all paid and put on
the ledger, for comparison. Rates are of the middle of a run, from the 10th to the 90th hundredth of what was written,
by the log's times, so that neither starting nor the report counts. Prints a JSON object a round and one for the whole.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.judge_and_teacher import echo, middle_rate
from benchmarks.judged_system import REPOSITORY, JudgedSystem, conversations
from clawstream import topics
from clawstream.broker import LocalBroker
from clawstream.bus.fold import LogReader
from clawstream.bus.interface import Bus
from clawstream.codec import header
from clawstream.topics import full_name

GOAL_SHARE_OF_ECHO = 0.5
_HISTORY = "bench-history"
_ECHOES = "bench-echoes"
_SPECS = {
    "code": ('backend="benchmarks.stub_judge:judge"',),
    "model": ('backend="openai"', "votes=3"),
}


def written_at(bus: Bus, namespace: str, source: str) -> list[float]:
    """When `source` wrote its scores of a replay, in seconds since 1970, in order."""
    times: list[float] = []
    reader = LogReader(bus, [full_name(namespace, topics.SCORES_REPLAY)])
    reader.bootstrap(
        lambda record: (
            times.append(record.timestamp_milliseconds / 1000)
            if header(record.headers, "ce_source") == source
            else None
        )
    )
    reader.close()
    return sorted(times)


def replay_rate(bus: Bus, config: Path, name: str, spec: Sequence[str], turns: int) -> float:
    """Scores a second of `clawstream replay run`. Raises RuntimeError unless it wrote one for every turn."""
    changes = [argument for field in spec for argument in ("--set", field)]
    command = ["-m", "services.judge.replay", "run", "--config", str(config), "--name", name, *changes, "--json"]
    done = subprocess.run([sys.executable, *command], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    times = written_at(bus, _HISTORY, f"replay/{name}")
    if done.returncode != 0 or len(times) != turns:
        raise RuntimeError(f"replay {name} ended with {done.returncode} and {len(times)} of {turns}:\n{done.stderr}")
    return middle_rate(times)


def _print(benchmark: str, **values: object) -> None:
    sys.stdout.write(json.dumps({"benchmark": benchmark, **values}) + "\n")
    sys.stdout.flush()


def main(
    turns: Annotated[int, typer.Option(help="Turns of the history.", min=5000)] = 30_000,
    rounds: Annotated[int, typer.Option(help="Of every side; the medians count.", min=1)] = 5,
    judges: Annotated[str, typer.Option(help="Of `code` and `model`, with a comma between.")] = "code,model",
) -> None:
    """Exits with 1 when the replay with a judge in code is slower than its goal."""
    names = judges.split(",")
    rates: dict[str, list[float]] = {side: [] for side in ("echo", *names)}
    with tempfile.TemporaryDirectory() as folder, LocalBroker(Path(folder) / "kafka", ends_with_parent=True) as broker:
        system = JudgedSystem(Path(folder), broker)
        bus = system.bus(_HISTORY)
        system.bus(_ECHOES)  # For its topics.
        conversations(bus, _HISTORY, turns).write()
        with system.model(0.0) as url:
            config = Path(folder) / "replay.toml"
            config.write_text(
                f'data_directory = "data"\n[kafka]\nbootstrap_servers = "{broker.bootstrap_servers}"\n'
                f'namespace = "{_HISTORY}"\n[judge]\nspec = {{ backend = "rules" }}\nmodel = {{ urls = ["{url}"] }}\n'
            )
            for number in range(rounds):
                for side in list(rates)[:: 1 if number % 2 == 0 else -1]:
                    if side == "echo":
                        source, target = (
                            full_name(_HISTORY, topics.NEXT_STATES),
                            full_name(_ECHOES, topics.SCORES_REPLAY),
                        )
                        rates[side].append(echo(bus, source, target, turns, group=f"{_ECHOES}.echo-{number}"))
                    else:
                        # Another model's name in every round: what was called before would be free.
                        spec = (*_SPECS[side], f'model="stub-{number}"') if side == "model" else _SPECS[side]
                        rates[side].append(replay_rate(bus, config, f"{side}-{number}", spec, turns))
                    sys.stderr.write(f"round {number}, {side}: {rates[side][-1]:.0f} turns a second\n")
                _print(
                    "replay_against_echo_round",
                    round=number,
                    turns_per_second={side: round(found[-1], 1) for side, found in rates.items()},
                )
    shares = {side: [rate / echoed for rate, echoed in zip(rates[side], rates["echo"], strict=True)] for side in names}
    medians = {side: round(statistics.median(found), 3) for side, found in shares.items()}
    _print(
        "replay_against_echo",
        turns=turns,
        turns_per_second={side: round(statistics.median(found), 1) for side, found in rates.items()},
        share_of_echo=medians,
        spread={side: [round(min(found), 3), round(max(found), 3)] for side, found in shares.items()},
        goal_share_of_echo=GOAL_SHARE_OF_ECHO,
    )
    if "code" in medians and medians["code"] < GOAL_SHARE_OF_ECHO:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
