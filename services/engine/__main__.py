"""Wiring: `python -m services.engine --config clawstream.toml`, or with flags: `--model-path DIR --port N`."""

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import torch
import typer
import uvicorn

from clawstream.clock import SystemClock
from clawstream.errors import ClawstreamError, SettingsError, WeightsError
from clawstream.log import configure_logging
from clawstream.settings import EXIT_CODE_WRONG_SETTINGS, load_settings
from services.engine.app import create_app
from services.engine.engine import Engine
from services.engine.settings import EngineSettings

DRAIN_SECONDS = 5
"""How long running answers may go on after SIGTERM."""


def main(
    config: Annotated[Path | None, typer.Option(help="The TOML file.")] = None,
    section: Annotated[str, typer.Option(help="Its section for this engine.")] = "engine",
    process: Annotated[str | None, typer.Option(help="Its name among the file's processes.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of this process.")] = None,
    model_path: Annotated[Path | None, typer.Option(help="A Hugging Face directory.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Id in /v1/models.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 picks one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads for arithmetic.")] = None,
    max_slots: Annotated[int | None, typer.Option(help="Requests answered at the same time.")] = None,
    max_context_tokens: Annotated[int | None, typer.Option(help="Longest prompt and answer together.")] = None,
    max_queued_requests: Annotated[int | None, typer.Option(help="Requests that may wait.")] = None,
    max_prefill_tokens_per_step: Annotated[int | None, typer.Option(help="Prompt tokens between two steps.")] = None,
    incremental_streaming_output: Annotated[bool | None, typer.Option(help="Chunks carry only what is new.")] = None,
    weight_version: Annotated[str | None, typer.Option(help="What the first weights are called.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of requests without a seed.")] = None,
) -> None:
    """Serve a model over SGLang's HTTP API on a CPU."""
    overrides: dict[str, Any] = {
        key: value
        for key, value in locals().items()
        if key not in ("config", "section", "process") and value is not None
    }
    try:
        settings = load_settings(
            EngineSettings,
            section=section,
            file=config,
            process=process,
            environment=os.environ,
            overrides=overrides,
        )
        serve(settings)
    except SettingsError as error:
        sys.stderr.write(f"engine: {error}\n")
        sys.exit(EXIT_CODE_WRONG_SETTINGS)
    except ClawstreamError as error:
        sys.exit(f"engine: {error}")


def ignore_signal(_number: int, _frame: FrameType | None) -> None:
    """A signal handler that does nothing."""


def serve(settings: EngineSettings) -> None:
    """Serve until SIGTERM or SIGINT. Exits with 1 when computing failed.

    Raises SettingsError when the model cannot be served.
    """
    log = configure_logging(settings.log, process=settings.name)
    torch.set_num_threads(settings.threads)
    failed = False

    def stop_server() -> None:
        nonlocal failed
        failed = True
        server.should_exit = True

    try:
        engine = Engine(settings, log=log, on_failure=stop_server)
    except WeightsError as error:  # What is on disk stays as it is: another start would not help.
        raise SettingsError(f"engine.model_path: {error}") from error
    config = uvicorn.Config(
        create_app(engine, settings, SystemClock()),
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )
    server = uvicorn.Server(config)
    listener = config.bind_socket()
    listener.listen(config.backlog)  # whoever reads the line below may connect at once
    engine.worker.start()
    log.info(
        "serving",
        url=f"http://{settings.host}:{listener.getsockname()[1]}",
        model=str(settings.model_path),
        dtype=settings.dtype,
        threads=settings.threads,
        slots=settings.max_slots,
        context_tokens=engine.context_tokens,
        weight_version=settings.weight_version,
    )
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn drains on a signal and then raises it again for the handler from before: exit by returning instead.
        signal.signal(signal_number, ignore_signal)
    try:
        server.run(sockets=[listener])
    finally:
        engine.worker.stop()
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
