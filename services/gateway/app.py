"""The HTTP surface: routes, and every failure as the error object of the client's API. Wiring only."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp

from clawstream.clock import Clock
from clawstream.errors import ClawstreamError, RequestRefused
from clawstream.ids import IdSource
from clawstream.log import Logger
from clawstream.metrics import Metrics
from clawstream.rendering.interface import ChatRenderer
from services.gateway.answer_routes import AnswerEndpoint, AnswerRoutes
from services.gateway.auth import Authenticator
from services.gateway.chat import ChatService
from services.gateway.errors import error_headers, to_refusal
from services.gateway.feedback import read_feedback
from services.gateway.ports import Conversations, RolloutOutcome
from services.gateway.redaction import presented_secrets, redact, redacted_headers, redacted_refusal
from services.gateway.request_headers import plain_headers
from services.gateway.request_json import parse_json_object
from services.gateway.request_limits import check_headers, read_body
from services.gateway.surfaces.answer_response import AnswerResponse
from services.gateway.surfaces.chat.surface import ChatSurface
from services.gateway.surfaces.messages.surface import MessagesSurface
from services.gateway.surfaces.responses.surface import ResponsesSurface
from services.gateway.surfaces.surface import Surface


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """How much a client may send, and how long it may take."""

    max_body_bytes: int
    max_header_bytes: int = 64 * 1024
    """Path, query and headers together."""
    body_stall_seconds: float = 30.0
    """Between two pieces of a body."""


def create_app(
    *,
    chat: ChatService,
    conversations: Conversations,
    renderer: ChatRenderer,
    authenticator: Authenticator,
    served_model: str,
    limits: RequestLimits,
    keep_alive_seconds: float,
    stream_start_seconds: float,
    is_ready: Callable[[], bool],
    status: Callable[[], Mapping[str, Any]],
    clock: Clock,
    id_source: IdSource,
    metrics: Metrics,
    logger: Logger,
) -> ASGIApp:
    """The gateway's ASGI application. All paths work with and without `/v1`."""
    app = FastAPI(title="clawstream gateway", openapi_url=None, docs_url=None, redoc_url=None)
    chat_surface = ChatSurface(renderer.decode)
    surfaces: dict[str, Surface] = {
        "/chat/completions": chat_surface,
        "/responses": ResponsesSurface(),
        "/messages": MessagesSurface(),
    }

    def surface_of(request: Request) -> Surface:
        path = request.url.path.removeprefix("/v1")
        if "anthropic-version" in request.headers:
            return surfaces["/messages"]
        return next((surface for start, surface in surfaces.items() if path.startswith(start)), chat_surface)

    def told(request: Request, refusal: RequestRefused) -> RequestRefused:
        """Counts a failure, and gives it as it may be told."""
        metrics.increment("gateway_errors_total", code=refusal.code or str(refusal.status))
        return redacted_refusal(refusal, _secrets(request))

    def refuse(request: Request, refusal: RequestRefused) -> Response:
        refusal = told(request, refusal)
        return _json(surface_of(request).error_body(refusal), refusal.status, error_headers(refusal))

    async def body_of(request: Request) -> bytes:
        return await read_body(request, limits.max_body_bytes, limits.body_stall_seconds)

    def check(request: Request) -> str:
        """Raises RequestRefused, or gives the principal."""
        check_headers(request, limits.max_header_bytes)
        return authenticator.principal(request.headers)

    def answer_as(surface: Surface) -> AnswerEndpoint:
        async def answer(request: Request) -> AnswerResponse:
            check_headers(request, limits.max_header_bytes)
            headers = plain_headers(request.scope["headers"])
            principal = authenticator.principal(headers)
            body = await body_of(request)
            secrets = presented_secrets(headers, request.query_params if request.scope["query_string"] else {})
            started = await chat.start(surface, principal, headers, body, secrets=secrets)
            return AnswerResponse(
                started,
                model=served_model,
                created=int(clock.now().timestamp()),
                keep_alive_seconds=keep_alive_seconds,
                stream_start_seconds=stream_start_seconds,
                refused=lambda refusal: told(request, refusal),
            )

        return answer

    async def count_tokens(request: Request) -> Response:
        check(request)
        return _json({"input_tokens": await chat.count_tokens(surfaces["/messages"], await body_of(request))})

    async def models(request: Request) -> Response:
        check(request)
        return _json({"object": "list", "data": chat.model_cards(), "has_more": False})

    async def model(request: Request) -> Response:
        check(request)
        chat.check_model(request.path_params["name"])
        return _json(chat.model_cards()[0])

    async def feedback(request: Request) -> Response:
        principal = check(request)
        headers = redacted_headers(request.headers, _secrets(request))
        said = read_feedback(parse_json_object(await body_of(request)), headers)
        if isinstance(said, RolloutOutcome):
            return _json(await rollout_outcome(principal, said))
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

    async def rollout_outcome(principal: str, outcome: RolloutOutcome) -> dict[str, Any]:
        try:
            recorded = await conversations.rollout_outcome(principal, outcome)
        except LookupError as error:
            raise RequestRefused(
                f"no turn of yours belongs to rollout {outcome.rollout_id!r}: turns carry it in X-Rollout-Id",
                status=404,
                code="rollout_not_found",
                parameter="rollout_id",
            ) from error
        return {"object": "feedback", "id": outcome.feedback_id, "next_state_ids": recorded.next_state_ids}

    async def healthz(request: Request) -> Response:
        return _json({"alive": True})

    async def readyz(request: Request) -> Response:
        ready = is_ready()
        return _json({"ready": ready}, 200 if ready else 503)

    async def status_route(request: Request) -> Response:
        check(request)
        return _json(dict(status()))

    async def metrics_route(request: Request) -> Response:
        check(request)
        return Response(metrics.exposition(), media_type="text/plain; version=0.0.4")

    answers = {prefix + path: answer_as(surface) for prefix in ("/v1", "") for path, surface in surfaces.items()}
    for path, endpoint in answers.items():
        app.add_route(path, endpoint, methods=["POST"])  # for what is no POST
    for prefix in ("/v1", ""):
        app.add_route(f"{prefix}/messages/count_tokens", count_tokens, methods=["POST"])
        app.add_route(f"{prefix}/models", models, methods=["GET"])
        app.add_route(f"{prefix}/models/{{name:path}}", model, methods=["GET"])
        app.add_route(f"{prefix}/feedback", feedback, methods=["POST"])
    app.add_route("/healthz", healthz, methods=["GET"])
    app.add_route("/readyz", readyz, methods=["GET"])
    app.add_route("/status", status_route, methods=["GET"])
    app.add_route("/metrics", metrics_route, methods=["GET"])

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = f"{request.method} {request.url.path[:200]}"
        message = f"{what}: this gateway has no such route" if error.status_code in (404, 405) else str(error.detail)
        return refuse(request, RequestRefused(message, status=error.status_code, code="unknown_route"))

    def failure(request: Request, error: Exception) -> Response:
        if isinstance(error, ClawstreamError):
            return refuse(request, to_refusal(error))
        if isinstance(error, ClientDisconnect):
            return Response(status_code=400)  # Nobody reads this: the connection ended before the body was there.
        logger.error("a request failed", path=redact(request.url.path, _secrets(request)), exc_info=error)
        return refuse(request, to_refusal(ClawstreamError()))

    async def any_error(request: Request, error: Exception) -> Response:
        return failure(request, error)

    app.add_exception_handler(HTTPException, http_error)
    for kind in (ClawstreamError, ClientDisconnect, Exception):
        app.add_exception_handler(kind, any_error)
    return AnswerRoutes(answers, app, failure)


def _secrets(request: Request) -> tuple[str, ...]:
    return presented_secrets(request.headers, request.query_params)


def _json(value: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers=dict(headers or {}), media_type="application/json")
