"""The HTTP surface: routes, and every failure as OpenAI's error object. Wiring only."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from clawstream.clock import Clock
from clawstream.errors import ClawstreamError, RequestRefused
from clawstream.ids import IdSource
from clawstream.log import Logger
from clawstream.metrics import Metrics
from clawstream.rendering.interface import ChatRenderer
from services.gateway.auth import Authenticator
from services.gateway.chat import ChatService
from services.gateway.chat_response import ChatResponse
from services.gateway.errors import error_body, error_headers, to_refusal
from services.gateway.feedback import read_feedback
from services.gateway.ports import Conversations
from services.gateway.request_json import parse_json_object


def create_app(
    *,
    chat: ChatService,
    conversations: Conversations,
    renderer: ChatRenderer,
    authenticator: Authenticator,
    served_model: str,
    max_body_bytes: int,
    keep_alive_seconds: float,
    is_ready: Callable[[], bool],
    status: Callable[[], Mapping[str, Any]],
    clock: Clock,
    id_source: IdSource,
    metrics: Metrics,
    logger: Logger,
) -> FastAPI:
    """The gateway's ASGI application. All paths work with and without `/v1`."""
    app = FastAPI(title="clawstream gateway", openapi_url=None, docs_url=None, redoc_url=None)

    def count(refusal: RequestRefused) -> None:
        metrics.increment("gateway_errors_total", code=refusal.code or str(refusal.status))

    def refuse(refusal: RequestRefused) -> Response:
        count(refusal)
        return _json(error_body(refusal), refusal.status, error_headers(refusal))

    async def chat_completions(request: Request) -> Response:
        principal = authenticator.principal(request.headers)
        body = await _read_body(request, max_body_bytes)
        started = await chat.start(principal, request.headers, body)
        return ChatResponse(
            started,
            model=served_model,
            created=int(clock.now().timestamp()),
            keep_alive_seconds=keep_alive_seconds,
            decode=renderer.decode,
            refused=count,
        )

    async def models(request: Request) -> Response:
        authenticator.principal(request.headers)
        return _json({"object": "list", "data": chat.model_cards()})

    async def model(request: Request) -> Response:
        authenticator.principal(request.headers)
        chat.check_model(request.path_params["name"])
        return _json(chat.model_cards()[0])

    async def feedback(request: Request) -> Response:
        principal = authenticator.principal(request.headers)
        said = read_feedback(parse_json_object(await _read_body(request, max_body_bytes)), request.headers)
        feedback_id = said.feedback_id or str(id_source())
        try:
            next_state_id = await conversations.feedback(
                principal,
                said.response_id,
                feedback_id=feedback_id,
                score=said.score,
                text=said.text,
                source=said.source,
            )
        except LookupError as error:
            raise RequestRefused(
                f"no answer {said.response_id[:100]!r} is known", status=404, code="response_not_found"
            ) from error
        return _json({"object": "feedback", "id": feedback_id, "next_state_id": next_state_id})

    async def healthz(request: Request) -> Response:
        return _json({"alive": True})

    async def readyz(request: Request) -> Response:
        ready = is_ready()
        return _json({"ready": ready}, 200 if ready else 503)

    async def status_route(request: Request) -> Response:
        authenticator.principal(request.headers)
        return _json(dict(status()))

    async def metrics_route(request: Request) -> Response:
        authenticator.principal(request.headers)
        return Response(metrics.exposition(), media_type="text/plain; version=0.0.4")

    for prefix in ("/v1", ""):
        app.add_route(f"{prefix}/chat/completions", chat_completions, methods=["POST"])
        app.add_route(f"{prefix}/models", models, methods=["GET"])
        app.add_route(f"{prefix}/models/{{name:path}}", model, methods=["GET"])
        app.add_route(f"{prefix}/feedback", feedback, methods=["POST"])
    app.add_route("/healthz", healthz, methods=["GET"])
    app.add_route("/readyz", readyz, methods=["GET"])
    app.add_route("/status", status_route, methods=["GET"])
    app.add_route("/metrics", metrics_route, methods=["GET"])

    async def clawstream_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ClawstreamError)
        return refuse(to_refusal(error))

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = f"{request.method} {request.url.path}"
        message = f"{what}: this gateway has no such route" if error.status_code in (404, 405) else str(error.detail)
        return refuse(RequestRefused(message, status=error.status_code, code="unknown_route"))

    async def unexpected_error(request: Request, error: Exception) -> Response:
        logger.error("a request failed", path=request.url.path, exc_info=error)
        return refuse(to_refusal(ClawstreamError()))

    handlers: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
        ClawstreamError: clawstream_error,
        HTTPException: http_error,
        Exception: unexpected_error,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
    return app


async def _read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises RequestRefused, status 413, as soon as it is known to be too large."""
    too_large = RequestRefused(
        f"the request body is larger than {max_bytes} bytes", status=413, code="request_too_large"
    )
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise too_large
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)


def _json(value: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers=dict(headers or {}), media_type="application/json")
