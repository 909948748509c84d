"""`POST /v1/feedback`: what an answer, or a whole rollout, was worth: says a person, an environment or a verifier."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from clawstream.errors import RequestRefused
from services.gateway.ports import RolloutOutcome
from services.gateway.request_headers import clean_identifier

_MAX_TEXT_CHARACTERS = 20_000
_MAX_STEPS = 2000


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


def read_feedback(body: Mapping[str, Any], headers: Mapping[str, str]) -> FeedbackRequest | RolloutOutcome:
    """A `response_id` is about one answer, a `rollout_id` about all of a rollout. Raises RequestRefused, status 400."""
    response_id, rollout_id = body.get("response_id"), body.get("rollout_id")
    if response_id is not None and rollout_id is not None:
        raise _refused("response_id and rollout_id cannot both be given", "rollout_id")
    score, text, source = (body.get(name) for name in ("score", "text", "source"))
    if rollout_id is None and (not isinstance(response_id, str) or not response_id):
        raise _refused("response_id must be the id of an answer (or rollout_id the id of a rollout)", "response_id")
    if not _is_score(score):
        raise _refused("score must be a number from -1 to 1", "score")
    if text is not None and (not isinstance(text, str) or len(text) > _MAX_TEXT_CHARACTERS):
        raise _refused(f"text must be a text of at most {_MAX_TEXT_CHARACTERS} characters", "text")
    if source is not None and (not isinstance(source, str) or not source.strip()):
        raise _refused("source must be a name", "source")
    key = body.get("feedback_id") or headers.get("idempotency-key")
    if key is not None and not isinstance(key, str):
        raise _refused("feedback_id must be a text", "feedback_id")
    if rollout_id is None:
        return FeedbackRequest(
            response_id=cast(str, response_id),
            score=float(cast(float, score)),
            text=text or None,
            source=clean_identifier(source) or "user",
            feedback_id=clean_identifier(key),
        )
    if not isinstance(rollout_id, str) or (cleaned := clean_identifier(rollout_id)) is None:
        raise _refused("rollout_id must be the id of a rollout, as it stood in X-Rollout-Id", "rollout_id")
    if source == "user":
        raise _refused("source must name the environment or verifier: people judge answers, by response_id", "source")
    return RolloutOutcome(
        rollout_id=cleaned,
        score=float(cast(float, score)),
        steps=_steps(body.get("steps")),
        step_scores=_step_scores(body.get("step_scores")),
        text=text or None,
        source=clean_identifier(source) or "environment",
        feedback_id=clean_identifier(key) or f"outcome:{cleaned}",
    )


def _is_score(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1 <= value <= 1


def _steps(value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_STEPS:
        raise _refused(f"steps must be the number of the rollout's turns, from 1 to {_MAX_STEPS}", "steps")
    return value


def _step_scores(value: object) -> dict[int, float]:
    """From a list, one score or null per step from 0 on."""
    if value is None:
        return {}
    if not isinstance(value, list) or len(cast(list[object], value)) > _MAX_STEPS:
        raise _refused("step_scores must be a list with one score or null per step", "step_scores")
    scores = cast(list[object], value)
    wrong = [index for index, score in enumerate(scores) if score is not None and not _is_score(score)]
    if wrong:
        raise _refused(f"step_scores[{wrong[0]}] must be a number from -1 to 1, or null", "step_scores")
    return {index: float(cast(float, score)) for index, score in enumerate(scores) if score is not None}


def _refused(message: str, parameter: str) -> RequestRefused:
    return RequestRefused(message, status=400, code="invalid_parameter", parameter=parameter)
