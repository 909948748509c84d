"""The command line: one file per group of commands. Errors become one message and an exit code here."""

import sys

import typer

from clawstream.cli import (
    archives,
    audit,
    broker,
    dlq,
    doctor,
    evaluate,
    forget,
    importing,
    keys,
    models,
    report,
    service_commands,
    status,
    supervision,
    topics,
    trace,
    weights,
)
from clawstream.cli.terminal import errors
from clawstream.errors import ClawstreamError, SettingsError
from clawstream.settings import EXIT_CODE_WRONG_SETTINGS

EXIT_CODE_ERROR = 1

app = typer.Typer(
    name="clawstream",
    help="Online reinforcement learning for language-model agents from their own conversations.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(broker.app, name="broker")
app.add_typer(topics.app, name="topics")
app.add_typer(models.app, name="models")
app.add_typer(dlq.app, name="dlq")
app.add_typer(weights.app, name="weights")
app.add_typer(keys.app, name="keys")
app.add_typer(report.app, name="report")
supervision.register(app)
status.register(app)
doctor.register(app)
evaluate.register(app)
archives.register(app)
forget.register(app)
importing.register(app)
trace.register(app)
service_commands.register(app)
audit.register(app)


def main() -> None:
    """Runs a command. What went wrong on purpose is told without a stack; anything else is a defect and keeps its."""
    try:
        app()
    except SettingsError as error:
        errors.print(str(error), style="red")
        sys.exit(EXIT_CODE_WRONG_SETTINGS)
    except ClawstreamError as error:
        errors.print(str(error), style="red")
        sys.exit(EXIT_CODE_ERROR)
