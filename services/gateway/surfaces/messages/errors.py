"""Failures as Anthropic's error object. Pure."""

from typing import Any

from clawstream.errors import RequestRefused

_TYPE_BY_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def error_body(refusal: RequestRefused) -> dict[str, Any]:
    """The JSON that Anthropic's clients read. Agents compact when they read that the prompt is too long."""
    kind = _TYPE_BY_STATUS.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    message = str(refusal)
    if refusal.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}
