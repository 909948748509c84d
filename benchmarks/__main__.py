"""`make bench`: every benchmark, one after another, each in a process of its own."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def main(
    model_directory: Annotated[Path, typer.Option(help="A Hugging Face directory.")] = Path("models/smollm2"),
) -> None:
    """Runs all benchmarks. Their figures are ratios within one run; quote medians, and only from a quiet machine."""
    console = Console()
    commands = {
        "CPU engine against Hugging Face generate": [
            "benchmarks.engine_against_transformers",
            "--model-path",
            str(model_directory),
        ],
        "judge and teacher": ["benchmarks.judge_and_teacher"],
        "20,000 turns through judge and teacher: memory and cost": ["benchmarks.judge_and_teacher_memory"],
        "replay against an echo in transactions": ["benchmarks.replay_against_echo"],
        "training step against bare Megatron": ["benchmarks.trainer_step_against_bare_megatron", str(model_directory)],
        "gateway against the engine": ["benchmarks.gateway_against_engine", str(model_directory)],
        "processor time of a request at the gateway": ["benchmarks.gateway_request_cpu", str(model_directory)],
        "turn to log": ["benchmarks.turn_to_log", str(model_directory)],
        "20,000 sessions through a gateway": ["benchmarks.gateway_memory", str(model_directory)],
        "weight update under load, and batch closed to version in service": [
            "benchmarks.weight_update_under_load",
            str(model_directory),
        ],
    }
    failed = False
    for title, command in commands.items():
        console.rule(title)
        failed |= subprocess.run([sys.executable, "-m", *command], check=False).returncode != 0
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
