"""`clawstream forget`: a session or a principal is not used any more, and what can be removed is removed."""

import os
from typing import Annotated, Any

import orjson
import typer
from rich.table import Table

from clawstream.bus.kafka import KafkaBus
from clawstream.cli.keys import TRANSACTION_TIMEOUT_SECONDS
from clawstream.cli.options import ConfigOption
from clawstream.cli.terminal import errors, optional_config, output
from clawstream.clock import SystemClock
from clawstream.errors import SettingsError
from clawstream.forgetting.batches import BatchRewriter, BatchTreatment
from clawstream.forgetting.forget import ForgetReport, Forgetting
from clawstream.forgetting.survey import Subject
from clawstream.import_path import import_callable
from clawstream.supervisor.settings import load_system_settings
from schemas.events.forgotten import ForgottenKind

_REWRITER = "services.trainer.batch_archive:rewrite_without"
"""The trainer alone knows the form of its archive; it is loaded only where a batch is to be rewritten."""


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(forget)


def forget(
    config: ConfigOption = None,
    session: Annotated[str | None, typer.Option(help="Id of a session.")] = None,
    user: Annotated[str | None, typer.Option(help="Name of a principal: everything that is on the log now.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do it. Without, it is only shown.")] = False,
    batches: Annotated[BatchTreatment, typer.Option(help="Archived batches that hold samples of it.")] = (
        BatchTreatment.KEEP
    ),
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Forgets a session or a principal: shows what would be removed; with --yes, removes it.

    Judges, teachers and trainers refuse what is left. Samples, index entries and paid judge calls get tombstones, blobs
    that nobody else names are removed. Turns, next states and scores stay until their topic's retention: readable,
    unless they are encrypted (kafka.encryption), for then the keys are deleted first of all. Weights that learned from
    it are listed, and stay.
    """
    if (session is None) == (user is None):
        raise SettingsError("say what to forget: --session ID or --user PRINCIPAL")
    subject = (
        Subject(ForgottenKind.SESSION, session) if session is not None else Subject(ForgottenKind.PRINCIPAL, user or "")
    )
    kafka = load_system_settings(optional_config(config), os.environ).kafka
    rewriter: BatchRewriter | None = (
        import_callable(_REWRITER, "--batches rewrite") if batches is BatchTreatment.REWRITE else None
    )
    with errors.status(f"forgetting {subject}") as status:
        forgetting = Forgetting(
            KafkaBus(kafka, client_id="forget", transaction_timeout_seconds=TRANSACTION_TIMEOUT_SECONDS),
            kafka.namespace,
            SystemClock(),
            rewrite_batch=rewriter,
            progress=lambda what: status.update(f"forgetting {subject}: {what}"),
        )
        report = forgetting.run(subject, batches) if yes else forgetting.look(subject)
    if as_json:
        output.print(orjson.dumps(as_document(subject, report, dry_run=not yes), option=orjson.OPT_INDENT_2).decode())
        return
    _print(subject, report, dry_run=not yes)


def as_document(subject: Subject, report: ForgetReport, *, dry_run: bool) -> dict[str, Any]:
    """The report for programs."""
    found = report.found
    return {
        "kind": subject.kind.value,
        "subject": subject.name,
        "dry_run": dry_run,
        "changed": report.changed,
        "turns": len(found.turn_ids),
        "live_keys": {topic: len(keys) for topic, keys in found.live.items()},
        "session_keys": len(found.session_keys),
        "session_keys_deleted": report.session_keys_deleted,
        "tombstones_written": report.tombstones,
        "blobs": len(found.blobs),
        "blobs_shared": len(found.shared_blobs),
        "blobs_removed": report.blobs_removed,
        "stays_readable": {
            topic: {
                "records": kept.records,
                "value_bytes": kept.value_bytes,
                "encrypted_records": kept.encrypted_records,
                "gone_after": None if kept.gone_after is None else kept.gone_after.isoformat(),
            }
            for topic, kept in found.retained.items()
        },
        "train_steps": [
            {
                "lineage": step.lineage,
                "step": step.step,
                "weight_version": step.weight_version,
                "samples": len(step.sample_ids),
                "batch_uri": step.batch_uri,
            }
            for step in found.steps
        ],
        "weight_versions": found.weight_versions,
        "request": None if report.request is None else report.request.model_dump(mode="json"),
    }


def _print(subject: Subject, report: ForgetReport, *, dry_run: bool) -> None:
    found, request = report.found, report.request
    table = Table("what", "how much", "what becomes of it", box=None)
    done = "would be removed" if dry_run else "removed"
    if found.session_keys or report.session_keys_deleted:
        count = report.session_keys_deleted or len(found.session_keys)
        table.add_row("keys", str(count), f"{done} first: what they encrypted is unreadable")
    for topic, keys in found.live.items():
        table.add_row(topic, f"{len(keys)} keys", f"{done} by tombstones" if keys else "nothing to remove")
    table.add_row("blobs", str(len(found.blobs)), done if found.blobs else "nothing to remove")
    if found.shared_blobs:
        table.add_row("blobs of others too", str(len(found.shared_blobs)), "stay: other turns name them")
    for topic, kept in found.retained.items():
        until = "for ever" if kept.gone_after is None else f"until about {kept.gone_after:%Y-%m-%d}"
        plain = kept.records - kept.encrypted_records
        if kept.encrypted_records:
            table.add_row(
                topic, f"{kept.encrypted_records} encrypted records", f"stay {until}, unreadable with the keys"
            )
        if plain:
            table.add_row(topic, f"{plain} records", f"stay readable {until} (retention); refused by every stage")
    for step in found.steps:
        made = "no version" if step.weight_version is None else f"version {step.weight_version}"
        table.add_row(f"step {step.step}", f"{len(step.sample_ids)} samples", f"trained; made {made}")
    for batch in request.batches if request is not None else ():
        table.add_row(f"batch of step {batch.step}", batch.fate.value, batch.uri)
    output.print(table)
    if found.weight_versions:
        versions = ", ".join(str(version) for version in found.weight_versions)
        output.print(f"weight versions that learned from it, or descend from one that did: {versions}")
    if dry_run:
        output.print(f"{subject}: nothing was changed; --yes forgets it")
    elif report.changed:
        output.print(f"{subject} is forgotten")
    else:
        output.print(f"{subject} was forgotten before: nothing was left to do")
