"""Which judge spec counts: promote, roll back, list. `clawstream judge` runs `python -m services.judge.promotion`."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.progress import Progress
from rich.table import Table

from clawstream.bus.interface import Bus
from clawstream.cli.options import ConfigOption
from clawstream.cli.terminal import errors, optional_config, output
from clawstream.clock import SystemClock
from clawstream.encryption.bus import open_bus
from clawstream.errors import ClawstreamError, ReplayError, SettingsError
from clawstream.log import configure_logging
from clawstream.metrics import Metrics
from clawstream.settings import LogSettings, load_settings
from clawstream.tracing.history import read_training_history
from clawstream.worker_process import stop_on_signals
from schemas.judge_spec import JudgeSpec
from services.judge.chosen_spec import chosen_spec
from services.judge.promotion.copying import copy_scores, replay_scores, turns_of
from services.judge.promotion.decisions import Decisions, decide, decision_rows, read_decisions
from services.judge.replay.bounded_run import is_complete
from services.judge.replay.plan import ReplayDirectory, ReplayPlan
from services.judge.settings import JudgeSettings
from services.judge.specs import completed
from services.judge.wiring import backend_factory

app = typer.Typer(
    name="clawstream judge",
    help="Which judge spec counts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
JsonOption = Annotated[bool, typer.Option("--json", help="For programs.")]
ReasonOption = Annotated[str, typer.Option(help="For people who read the log.")]
_SHOWN = 20


@app.command("list")
def list_decisions(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Lists every spec that has counted, and the one that does."""
    settings = _settings(config)
    decisions = read_decisions(_bus(settings), settings.kafka.namespace, completed(settings.spec))
    _show_decisions(decisions, as_json)


@app.command()
def promote(
    config: ConfigOption = None,
    spec: Annotated[Path | None, typer.Option(help="A TOML file with the fields of a judge spec.")] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", "-s", help="FIELD=VALUE over the file, or over the spec that counts.")
    ] = None,
    replay: Annotated[str | None, typer.Option(help="The spec of this replay, and its scores with it.")] = None,
    reason: ReasonOption = "promoted",
    as_json: JsonOption = False,
) -> None:
    """Lets another judge spec count from now on. The same one again changes nothing.

    With --replay, history counts as the replay judged it: its scores become new revisions of samples. What was trained
    before stays trained and is listed.
    """
    if (replay is None) == (spec is None and not change):
        raise SettingsError("say what to promote: --spec FILE, --set FIELD=VALUE, or --replay NAME")
    settings = _settings(config)
    bus = _bus(settings)
    plan = None if replay is None else _complete_plan(settings, bus, replay)

    def choose(decisions: Decisions) -> JudgeSpec:
        wanted = completed(plan.spec) if plan is not None else chosen_spec(decisions.spec, spec, change or ())
        # A judge that cannot put a promoted spec to work must end: better to hear of it here.
        backend_factory(settings, os.environ).make(wanted)
        return wanted

    decisions, is_new = decide(
        bus,
        settings.kafka.namespace,
        completed(settings.spec),
        choose,
        reason=reason,
        now=SystemClock().now(),
        source="cli/judge",
    )
    said: dict[str, Any] = {
        "spec_hash": decisions.spec.spec_hash,
        "promotion_epoch": decisions.epoch,
        "changed": is_new,
    }
    if plan is not None:
        if decisions.epoch <= plan.baseline_epoch:
            raise ReplayError(
                f"replay {plan.name!r} was made with the spec that counts (epoch {decisions.epoch}): its scores would "
                "be those that are there"
            )
        said |= _promote_scores(bus, plan, decisions.epoch)
    _say(said, as_json)


@app.command()
def rollback(
    config: ConfigOption = None,
    to: Annotated[int | None, typer.Option(help="An epoch of `list` (default: the newest with another spec).")] = None,
    reason: ReasonOption = "",
    as_json: JsonOption = False,
) -> None:
    """Lets an earlier judge spec count again, under a new epoch."""
    settings = _settings(config)
    said: dict[str, int] = {}

    def choose(decisions: Decisions) -> JudgeSpec:
        said["rolled_back_to"] = decisions.before() if to is None else to
        wanted = completed(decisions.spec_of(said["rolled_back_to"]))
        backend_factory(settings, os.environ).make(wanted)
        return wanted

    decisions, is_new = decide(
        _bus(settings),
        settings.kafka.namespace,
        completed(settings.spec),
        choose,
        reason=reason or "rollback",
        now=SystemClock().now(),
        source="cli/judge",
    )
    _say(
        {
            "spec_hash": decisions.spec.spec_hash,
            "promotion_epoch": decisions.epoch,
            "changed": is_new,
            **said,
        },
        as_json,
    )


def _promote_scores(bus: Bus, plan: ReplayPlan, promotion_epoch: int) -> dict[str, Any]:
    ranges = replay_scores(bus, plan)
    logger = configure_logging(LogSettings(level="warning"), process="promote")
    with Progress(console=errors, transient=True) as progress:
        line = progress.add_task("promoting scores", total=None)

        async def copy() -> bool:
            async with stop_on_signals() as stop:
                return await copy_scores(
                    bus,
                    plan,
                    ranges,
                    promotion_epoch,
                    stop=stop,
                    clock=SystemClock(),
                    metrics=Metrics(),
                    logger=logger,
                    progress=lambda done, of: progress.update(line, completed=done, total=of),
                )

        if not asyncio.run(copy()):
            raise ReplayError("stopped before every score was promoted; the same command goes on")
    turns = turns_of(bus, plan, ranges)
    history = read_training_history(bus, plan.namespace)
    trained = [
        {
            "turn_id": turn_id,
            "policy": each.step.policy,
            "lineage": each.step.lineage,
            "step": each.step.step,
            "weight_version": each.step.weight_version,
            "revision": each.sample.revision.model_dump(mode="json"),
        }
        for turn_id in turns
        for each in history.trained.get(turn_id, ())
    ]
    return {
        "promoted_scores": sum(turns.values()),
        "turns": len(turns),
        "already_trained": sorted(trained, key=lambda each: (str(each["lineage"]), each["step"], each["turn_id"])),
    }


def _complete_plan(settings: JudgeSettings, bus: Bus, name: str) -> ReplayPlan:
    plan = ReplayDirectory(settings.data_directory / "replays", name).load()
    if plan is None:
        raise ReplayError(f"there is no replay {name!r}; `clawstream replay list` shows them")
    if not is_complete(bus, plan.group, plan.ranges):
        raise ReplayError(f"replay {name!r} is not complete: `clawstream replay run --name {name}` continues it")
    return plan


def _say(said: dict[str, Any], as_json: bool) -> None:
    if as_json:
        output.print(orjson.dumps(said, option=orjson.OPT_INDENT_2).decode())
        return
    verb = "counts from now on" if said["changed"] else "counts already"
    output.print(f"judge spec {said['spec_hash']} {verb} (promotion epoch {said['promotion_epoch']})")
    if "promoted_scores" not in said:
        return
    trained = said["already_trained"]
    output.print(f"{said['promoted_scores']} scores of {said['turns']} turns count under it")
    output.print(f"{len(trained)} of them are trained already, and stay so")
    for each in trained[:_SHOWN]:
        output.print(
            f"  turn {each['turn_id']}: step {each['step']} of {each['lineage']}, version {each['weight_version']}"
        )
    if len(trained) > _SHOWN:
        output.print(f"  and {len(trained) - _SHOWN} more: --json")


def _show_decisions(decisions: Decisions, as_json: bool) -> None:
    rows = decision_rows(decisions)
    if as_json:
        output.print(orjson.dumps(rows, option=orjson.OPT_INDENT_2).decode())
        return
    table = Table("", "epoch", "spec", "backend", "model", "votes", "prompt", "since", "reason", box=None)
    for row in rows:
        spec = decisions.spec_of(int(str(row["promotion_epoch"])))
        mark = "counts" if row["counts"] else ""
        table.add_row(
            mark,
            str(row["promotion_epoch"]),
            str(row["spec_hash"]),
            spec.backend,
            spec.model,
            str(spec.votes),
            spec.prompt,
            str(row["activated_at"] or ""),
            str(row["reason"]),
        )
    output.print(table)


def _settings(config: Path | None) -> JudgeSettings:
    return load_settings(JudgeSettings, section="judge", file=optional_config(config), environment=os.environ)


def _bus(settings: JudgeSettings) -> Bus:
    return open_bus(settings.kafka, client_id="judge-promotion")


def main() -> None:
    """Runs a command. What went wrong on purpose is told without a stack."""
    try:
        app(prog_name="clawstream judge")
    except ClawstreamError as error:
        errors.print(str(error), style="red")
        sys.exit(2 if isinstance(error, SettingsError) else 1)


if __name__ == "__main__":
    main()
