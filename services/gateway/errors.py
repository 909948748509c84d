"""Every failure as OpenAI's error object."""

import math
from http import HTTPStatus
from typing import Any

from clawstream.errors import (
    ClawstreamError,
    ContractError,
    EngineProtocolError,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
    EngineUnreachable,
    NoEngineReady,
    OutboxError,
    RequestRefused,
)

DEFAULT_RETRY_AFTER_SECONDS = 2.0
_CONTEXT_WORDS = ("context length", "context_length", "too long", "maximum allowed length")


def to_refusal(error: ClawstreamError) -> RequestRefused:
    """What a client is told of `error`.

    An engine's 4xx passes through: trying again cannot help. An engine that is away is 503 with Retry-After, one that
    is silent 504, one that talks nonsense 502.

    What is worth another try begins with the status's own words (RFC 9110): in the middle of a stream there is no
    status any more, and agents tell by the words whether to ask again.
    """
    if isinstance(error, RequestRefused):
        return error
    if isinstance(error, EngineRejected):
        too_long = any(word in error.body.lower() for word in _CONTEXT_WORDS)
        return RequestRefused(
            error.body or str(error),
            status=error.status if 400 <= error.status < 500 else 400,
            error_type="rate_limit_error" if error.status == 429 else "invalid_request_error",
            code="context_length_exceeded" if too_long else "engine_rejected",
            retry_after_seconds=DEFAULT_RETRY_AFTER_SECONDS if error.status == 429 else None,
        )
    if isinstance(error, NoEngineReady):
        return worth_another_try(
            str(error),
            status=HTTPStatus.SERVICE_UNAVAILABLE,
            error_type="service_unavailable_error",
            code="no_engine_ready",
            retry_after_seconds=error.retry_after_seconds,
        )
    if isinstance(error, EngineUnavailable):
        # The words of a broken connection name the engine's address, and agents read numbers in them as a status.
        unreachable = isinstance(error, EngineUnreachable)
        return worth_another_try(
            "the connection to the engine was lost" if unreachable else str(error),
            status=HTTPStatus.SERVICE_UNAVAILABLE,
            error_type="service_unavailable_error",
            code="engine_unavailable",
            retry_after_seconds=DEFAULT_RETRY_AFTER_SECONDS,
        )
    if isinstance(error, EngineTimeout):
        return worth_another_try(
            str(error),
            status=HTTPStatus.GATEWAY_TIMEOUT,
            error_type="timeout_error",
            code="engine_timeout",
            retry_after_seconds=DEFAULT_RETRY_AFTER_SECONDS,
        )
    if isinstance(error, EngineProtocolError):
        return worth_another_try(
            str(error), status=HTTPStatus.BAD_GATEWAY, error_type="server_error", code="engine_protocol_error"
        )
    if isinstance(error, OutboxError):
        return worth_another_try(
            "the gateway cannot write this down now",
            status=HTTPStatus.SERVICE_UNAVAILABLE,
            error_type="server_error",
            code="not_recorded",
            retry_after_seconds=DEFAULT_RETRY_AFTER_SECONDS,
        )
    if isinstance(error, ContractError):
        return RequestRefused(str(error), status=400, code="invalid_messages", parameter="messages")
    return worth_another_try(
        "the gateway failed on this request",
        status=HTTPStatus.INTERNAL_SERVER_ERROR,
        error_type="server_error",
        code="internal",
    )


def worth_another_try(
    message: str, *, status: HTTPStatus, error_type: str, code: str, retry_after_seconds: float | None = None
) -> RequestRefused:
    """A failure that is not the request's fault, in words that agents know for such."""
    return RequestRefused(
        f"{status.phrase.lower()}: {message}",
        status=status.value,
        error_type=error_type,
        code=code,
        retry_after_seconds=retry_after_seconds,
    )


def error_body(refusal: RequestRefused) -> dict[str, Any]:
    """The JSON that OpenAI clients read."""
    return {
        "error": {
            "message": str(refusal),
            "type": refusal.error_type,
            "param": refusal.parameter,
            "code": refusal.code,
        }
    }


def error_headers(refusal: RequestRefused) -> dict[str, str]:
    """Retry-After, in whole seconds, where trying again may help."""
    if refusal.retry_after_seconds is None:
        return {}
    return {"retry-after": str(math.ceil(refusal.retry_after_seconds))}
