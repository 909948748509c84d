"""`POST /v1/feedback`: a person, an environment or a verifier says what an answer was worth."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clawstream.errors import RequestRefused
from services.gateway.request_headers import clean_identifier

_MAX_TEXT_CHARACTERS = 20_000


@dataclass(frozen=True, slots=True)
class FeedbackRequest:
    """What was said about one answer."""

    response_id: str
    """The id that the answer had (`chatcmpl-...`)."""
    score: float
    """From -1 (bad) over 0 to +1 (good)."""
    text: str | None
    """In words: a source of hints."""
    source: str
    """`user` is feedback; any other (`environment`, a verifier's name) is an outcome."""
    feedback_id: str | None
    """The client's idempotency key: the same one again changes nothing."""


def read_feedback(body: Mapping[str, Any], headers: Mapping[str, str]) -> FeedbackRequest:
    """Raises RequestRefused, status 400, naming the field."""
    response_id, score, text, source = (body.get(name) for name in ("response_id", "score", "text", "source"))
    if not isinstance(response_id, str) or not response_id:
        raise _refused("response_id must be the id of an answer", "response_id")
    if isinstance(score, bool) or not isinstance(score, (int, float)) or not -1 <= score <= 1:
        raise _refused("score must be a number from -1 to 1", "score")
    if text is not None and (not isinstance(text, str) or len(text) > _MAX_TEXT_CHARACTERS):
        raise _refused(f"text must be a text of at most {_MAX_TEXT_CHARACTERS} characters", "text")
    if source is not None and (not isinstance(source, str) or not source.strip()):
        raise _refused("source must be a name", "source")
    key = body.get("feedback_id") or headers.get("idempotency-key")
    if key is not None and not isinstance(key, str):
        raise _refused("feedback_id must be a text", "feedback_id")
    return FeedbackRequest(
        response_id=response_id,
        score=float(score),
        text=text or None,
        source=clean_identifier(source) or "user",
        feedback_id=clean_identifier(key),
    )


def _refused(message: str, parameter: str) -> RequestRefused:
    return RequestRefused(message, status=400, code="invalid_parameter", parameter=parameter)
