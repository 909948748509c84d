# pyright: basic
# Reason: starts torch and Megatron, which are untyped.
"""`clawstream retrain`, which is `python -m services.trainer.retrain`."""

import os
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote, urlsplit

import orjson
import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from clawstream.cli.options import ConfigOption
from clawstream.cli.terminal import errors, output, required_config
from clawstream.clock import SystemClock
from clawstream.durable_files import replace_file, sha256_of_file
from clawstream.encryption.bus import open_bus
from clawstream.errors import ClawstreamError, LineageError, SettingsError
from clawstream.settings import load_settings
from clawstream.tracing.history import TrainingHistory, read_training_history
from clawstream.weights.manifest import verify
from services.trainer.engine import cpu_platform
from services.trainer.engine.parallel import ParallelLayout
from services.trainer.publish import WeightStore
from services.trainer.retrain.plan import choose_batches, lineage_of, step_range
from services.trainer.retrain.training import RetrainedStep, StartingWeights, retrain
from services.trainer.settings import TrainerSettings
from services.trainer.wiring import new_policy

app = typer.Typer(name="clawstream retrain", add_completion=False, pretty_exceptions_enable=False)


@app.command()
def run(
    directory: Annotated[Path, typer.Option("--directory", "-d", help="Where the new lineage goes; must not exist.")],
    config: ConfigOption = None,
    process: Annotated[str | None, typer.Option(help="The trainer's name among the file's processes.")] = None,
    lineage: Annotated[str | None, typer.Option(help="Whose batches (default: the only one).")] = None,
    steps: Annotated[str, typer.Option(help="Which of its steps: 3-7, 3- or 5.")] = "1-",
    start: Annotated[
        str, typer.Option(help="base, a version's number, or the folder of weights or of a checkpoint.")
    ] = "base",
    change: Annotated[
        list[str] | None, typer.Option("--set", "-s", help="trainer.KEY=VALUE over the TOML file, TOML syntax.")
    ] = None,
    every_step: Annotated[bool, typer.Option("--every-step", help="Write a version after each step.")] = False,
    with_guards: Annotated[
        bool, typer.Option("--guards/--no-guards", help="Do again what guards did: coefficients, drops, holds.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Trains archived batches again, from chosen weights under chosen settings, into a lineage of its own.

    On a CPU two runs give the same bits; with the settings of the original run, from where it began, its weights.
    """
    settings = load_settings(
        TrainerSettings,
        section="trainer",
        file=required_config(config),
        process=process,
        environment=os.environ,
        overrides=_overrides(change or ()),
    )
    if settings.tensor_parallel_size > 1:
        raise SettingsError("retraining runs in one process: set trainer.tensor_parallel_size=1 (--set)")
    if directory.exists():
        raise SettingsError(f"{directory} is there already: a lineage is never written over another")
    bus = open_bus(settings.kafka, client_id="retrain")
    history = read_training_history(bus, settings.kafka.namespace)
    batches = choose_batches(
        history.steps.values(), settings.policy, lineage, step_range(steps), with_guards=with_guards
    )
    weights = _starting_weights(start, settings, history)
    new_lineage = lineage_of(weights.identity(), batches, settings)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    layout = ParallelLayout.start(tensor_parallel_size=1, seed=settings.seed)
    cpu_platform.enable_fast_exact_matmul()
    columns = (TextColumn("retraining"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=errors, transient=True) as progress:
            line = progress.add_task("steps", total=len(batches))
            # What a teacher said is in the archive.
            policy = new_policy(settings.model_copy(update={"teacher": None}), layout)
            weights.open(policy)
            done = retrain(
                policy,
                batches,
                settings.learning_rate.schedule(),
                WeightStore(directory, settings.policy),
                settings.model,
                lineage=new_lineage,
                every_step=every_step,
                now=SystemClock().now,
                progress=lambda _: progress.advance(line),
            )
    finally:
        ParallelLayout.stop()
    said = _said(new_lineage, batches[0].lineage, start, done, WeightStore(directory, settings.policy))
    replace_file(directory / "retraining.json", orjson.dumps(said, option=orjson.OPT_INDENT_2))
    if as_json:
        output.print(orjson.dumps(said, option=orjson.OPT_INDENT_2).decode())
        return
    for each in done:
        made = f"version {each.weight_version}" if each.weight_version is not None else each.unchanged_reason
        output.print(f"step {each.step} (was {each.repeats}): loss {each.loss}, {made}")
    output.print(f"lineage {new_lineage}\n{said['directory']}\n{said['weights_sha256']}")


def _said(lineage: str, repeats: str, start: str, done: list[RetrainedStep], store: WeightStore) -> dict[str, Any]:
    final = store.directory_of(done[-1].step)
    return {
        "lineage": lineage,
        "repeats_lineage": repeats,
        "start": start,
        "directory": str(final),
        "weights_sha256": {file.name: sha256_of_file(file) for file in sorted(final.glob("*.safetensors"))},
        "steps": [
            {
                "step": each.step,
                "repeats": each.repeats,
                "changed": each.changed,
                "unchanged_reason": each.unchanged_reason,
                "weight_version": each.weight_version,
                "loss": each.loss,
                "guarded": each.guarded,
                "old_weight_version": each.old_weight_version,
            }
            for each in done
        ],
    }


def _starting_weights(start: str, settings: TrainerSettings, history: TrainingHistory) -> StartingWeights:
    """Raises LineageError when a version is not on the log or its files are gone, WeightsError when they are torn."""
    if start == "base":
        return StartingWeights(settings.model)
    if re.fullmatch(r"\d+", start):
        event = history.versions.get((settings.policy, int(start)))
        if event is None:
            raise LineageError(f"policy {settings.policy!r} has no version {start} on the log, or it was removed")
        place = Path(unquote(urlsplit(event.artefact_uri).path))
        if not place.is_dir():
            raise LineageError(f"version {start} is no longer at {place}")
        verify(place, event.manifest_sha256)
        return StartingWeights(settings.model, weights=place)
    folder = Path(start)
    if not folder.is_dir():
        raise SettingsError(f"--start {start!r}: neither base, nor a version's number, nor a folder")
    if (folder / "state.json").exists():
        return StartingWeights(settings.model, checkpoint=folder)
    return StartingWeights(settings.model, weights=folder)


def _overrides(changes: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for change in changes:
        name, separator, text = change.partition("=")
        if not separator:
            raise SettingsError(f"{change!r} is no change: write trainer.KEY=VALUE")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        *path, last = name.removeprefix("trainer.").split(".")
        target = values
        for part in path:
            target = target.setdefault(part, {})
        target[last] = value
    return values


def main() -> None:
    """Runs the command. What went wrong on purpose is told without a stack."""
    try:
        app(prog_name="clawstream retrain")
    except ClawstreamError as error:
        errors.print(str(error), style="red")
        sys.exit(2 if isinstance(error, SettingsError) else 1)


if __name__ == "__main__":
    main()
