"""A gateway process: everything put together, started, and ended in order."""

import asyncio
import os
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn

from clawstream.bus.interface import Bus
from clawstream.clock import SystemClock
from clawstream.crash_points import CrashPoint
from clawstream.disk_patience import DiskPatience
from clawstream.disk_space import is_out_of_space
from clawstream.engine.client import HttpEngineClient
from clawstream.errors import BusError, ClawstreamError, ContractError, SettingsError
from clawstream.log import Logger
from clawstream.metrics import Metrics
from clawstream.operations_server import OperationsServer
from clawstream.rendering.renderer import load_renderer
from clawstream.settings import EXIT_CODE_WRONG_SETTINGS
from clawstream.settling import settle
from services.gateway.app import RequestLimits, create_app
from services.gateway.auth import Authenticator
from services.gateway.chat import ChatLimits, ChatService
from services.gateway.context_limit import ContextLimit
from services.gateway.conversation_wiring import build_conversations
from services.gateway.conversations import GatewayConversations
from services.gateway.gate.gate import build_gate
from services.gateway.http_protocol import BoundedHttpProtocol
from services.gateway.settings import GatewaySettings

_FAILURE_POLL_SECONDS = 1.0
_KEY_CHECK_SECONDS = 3.0
_CLOSE_CONNECTIONS_SECONDS = 5.0
_SWITCH_INTERVAL_SECONDS = 0.0005
"""A thread that wants the interpreter's lock waits so long for a busy one. The drain's thread takes it anew for every
record that the log confirms: at Python's default of 5 ms a batch of 60 records could take 300 ms under load, and the
event loop waited as long for threads that encode."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Server(uvicorn.Server):
    """Leaves signals to us: open answers must end before connections are closed."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def serve(
    settings: GatewaySettings,
    bus: Bus,
    logger: Logger,
    crash: CrashPoint | None = None,
    *,
    check_keys: Callable[[], None] = lambda: None,
) -> int:
    """Serves until SIGTERM, SIGINT or a failure that only a new process can mend. Returns the exit code.

    `check_keys` raises SettingsError when nobody else could read what this process encrypts, and BusError while no
    broker says so: it is asked again until it knows. Whatever else it raises ends the process.

    Raises SettingsError (also for a model directory without a tokenizer that fits) and OSError (a port is taken) at
    start. A full disk is waited for.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_SECONDS)
    stop, ending = asyncio.Event(), threading.Event()
    failures: list[Exception] = []

    def fail(error: Exception) -> None:
        logger.error("the gateway must end", error=str(error), kind=type(error).__name__)
        failures.append(error)
        stop.set()

    clock, metrics = SystemClock(), Metrics()
    try:
        renderer = load_renderer(settings.model_path, settings.renderer)
    except ContractError as error:  # What is on disk stays as it is: another start would not help.
        raise SettingsError(f"gateway.model_path: {error}") from error
    initial_limit = settings.max_context_tokens or renderer.max_position_embeddings
    if initial_limit is None:
        raise SettingsError(f"{settings.model_path} does not say its context length; set gateway.max_context_tokens")
    limit = ContextLimit(initial_limit)
    listener = _bind(settings.host, settings.port)
    _stop_on_signals(stop, ending, logger)
    patience = DiskPatience(ending, logger, waits="the gateway does not serve yet")
    try:
        conversations = await asyncio.to_thread(
            patience.write,
            "secret, outbox and turn index",
            lambda: build_conversations(settings, bus, clock, uuid.uuid4, metrics, logger, crash),
        )
    except (ClawstreamError, OSError) as error:
        listener.close()
        if not (stop.is_set() and is_out_of_space(error)):
            raise
        logger.info("ended before there was space")
        return 0
    timeouts = settings.engine_deadlines.as_timeouts()
    clients = {
        engine.name: HttpEngineClient(
            engine.name,
            engine.url,
            timeouts=timeouts,
            vocabulary_size=renderer.vocabulary_size,
            may_be_silent=lambda name=engine.name: gate.is_updating(name),
        )
        for engine in settings.engines
    }
    gate = build_gate(
        gateway=settings.name,
        policy=settings.policy,
        namespace=settings.kafka.namespace,
        engines=settings.engines,
        settings=settings.gate,
        bus=bus,
        clients=clients,
        clock=clock,
        metrics=metrics,
        logger=logger,
        on_fatal=fail,
    )
    chat = ChatService(
        limits=ChatLimits(
            served_model=settings.served_model,
            model_names=frozenset({settings.served_model, *settings.model_aliases}),
            policy=settings.policy,
            max_context_tokens=limit.tokens,
            default_max_tokens=settings.default_max_tokens,
            default_temperature=settings.default_temperature,
            session_hint_headers=settings.session_hint_headers,
        ),
        conversations=conversations,
        router=gate.router,
        renderer=renderer,
        clock=clock,
        id_source=uuid.uuid4,
        metrics=metrics,
        logger=logger,
    )

    def is_ready() -> bool:
        return not stop.is_set() and conversations.is_ready() and gate.router.is_ready()

    def status() -> dict[str, Any]:
        return {
            "ready": is_ready(),
            "policy": settings.policy,
            "model": settings.served_model,
            "renderer": renderer.name,
            "tokenizer_fingerprint": renderer.tokenizer_fingerprint,
            "max_context_tokens": limit.tokens(),
            "requests_in_flight": chat.requests_in_flight,
            "index_and_outbox_ready": conversations.is_ready(),
            "gate": gate.status(),
        }

    app = create_app(
        chat=chat,
        conversations=conversations,
        renderer=renderer,
        authenticator=Authenticator(settings.api_keys),
        served_model=settings.served_model,
        limits=RequestLimits(
            max_body_bytes=settings.max_body_bytes,
            max_header_bytes=settings.max_header_bytes,
            body_stall_seconds=settings.body_stall_seconds,
        ),
        keep_alive_seconds=settings.keep_alive_seconds,
        stream_start_seconds=settings.stream_start_seconds,
        is_ready=is_ready,
        status=status,
        clock=clock,
        id_source=uuid.uuid4,
        metrics=metrics,
        logger=logger,
    )
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=75,
            http=BoundedHttpProtocol,
            ws="none",
            proxy_headers=False,  # nothing asks where a request came from
            # Above it the parser ends the connection; below it the refusal is ours to word.
            h11_max_incomplete_event_size=2 * settings.max_header_bytes,
        )
    )
    operations = OperationsServer(
        settings.operations_host, settings.operations_port, metrics=metrics, ready=is_ready, status=status
    )
    await conversations.start()
    await gate.start()
    settle()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    serving.add_done_callback(lambda _: stop.set())
    helpers = [
        asyncio.create_task(_watch(conversations)),
        asyncio.create_task(_check_keys(check_keys, logger)),
    ]
    for helper in helpers:
        helper.add_done_callback(partial(_fail_if_broken, fail))
    if settings.max_context_tokens is None:
        helpers.append(asyncio.create_task(limit.ask(list(clients.values()), logger)))
    host, port = listener.getsockname()[:2]
    logger.info("serving", url=f"http://{host}:{port}/v1", model=settings.served_model, operations_port=operations.port)

    await stop.wait()
    logger.info("ending", answers_in_flight=chat.requests_in_flight)
    server.should_exit = True
    for helper in helpers:
        helper.cancel()
    await asyncio.gather(*helpers, return_exceptions=True)
    await chat.finish(settings.drain_seconds)
    await asyncio.wait({serving}, timeout=_CLOSE_CONNECTIONS_SECONDS)
    server.force_exit = True
    await serving
    await gate.close()
    await conversations.close()
    for client in clients.values():
        await client.close()
    operations.close()
    if any(isinstance(failure, SettingsError) for failure in failures):
        return EXIT_CODE_WRONG_SETTINGS
    return 1 if failures else 0


def _bind(host: str, port: int) -> socket.socket:
    """A listening address. Raises OSError that names it when it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named: asyncio switches Nagle's algorithm off only then, and with it every second answer on a
    # connection waits 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def _stop_on_signals(stop: asyncio.Event, ending: threading.Event, logger: Logger) -> None:
    """The first signal ends in order. A second one ends at once: what was acknowledged is on disk already."""

    def received(number: int) -> None:
        if stop.is_set():
            logger.warning("ending at once", signal=signal.Signals(number).name)
            os._exit(128 + number)
        stop.set()
        ending.set()

    for number in _SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, received, number)


async def _check_keys(check: Callable[[], None], logger: Logger) -> None:
    """Raises what `check` raises: the master key is not the one that counts, or cannot be checked, and what cannot be
    checked must not be encrypted. Goes on asking while no broker answers.
    """
    while True:
        try:
            await asyncio.to_thread(check)
        except BusError as error:
            logger.warning("the master key cannot be checked yet; trying again", error=str(error))
            await asyncio.sleep(_KEY_CHECK_SECONDS)
        else:
            return


def _fail_if_broken(fail: Callable[[Exception], None], done: "asyncio.Task[None]") -> None:
    """What such a task raises ends the process: nobody waits for it, and it must not end unheard."""
    error = None if done.cancelled() else done.exception()
    if isinstance(error, Exception):
        fail(error)


async def _watch(conversations: GatewayConversations) -> None:
    """Raises the failure after which nothing reaches the log any more."""
    while True:
        if conversations.failure is not None:
            raise conversations.failure
        await asyncio.sleep(_FAILURE_POLL_SECONDS)
