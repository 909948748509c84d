"""Logging: structlog to standard error, key-value pairs, one line per event."""

import logging
import sys

import structlog

from clawstream.settings import LogSettings

Logger = structlog.stdlib.BoundLogger


def configure_logging(settings: LogSettings, *, process: str) -> Logger:
    """Configures the whole process once, at start, and returns its logger.

    Libraries that log through `logging` go the same way at warning level and above.
    """
    level = getattr(logging, settings.level.upper())
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if settings.json_lines
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                renderer,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("clawstream").setLevel(level)
    return get_logger().bind(process=process)


def get_logger() -> Logger:
    """The logger for library code: pass it on or bind values to it."""
    return structlog.stdlib.get_logger("clawstream")
