"""Which of a score's hints may teach, and how a hint enters the prompt. No I/O."""

from collections.abc import Collection, Sequence
from typing import Any, Final, Literal, cast

from clawstream.rendering.quoting import without_special_tokens
from schemas.events import ScoreEvent
from schemas.events.base import Message
from schemas.events.score import Hint
from services.teacher.settings import ScoreSign

HINT_HEADER: Final = "[user's hint / instruction]"
"""Stands above a hint. Source: OpenClaw-RL."""
Form = Literal["last_user_message", "system"]


def sign_of(score: ScoreEvent) -> ScoreSign:
    """The verdict as a word."""
    if score.verdict is None:
        return ScoreSign.FAILED
    return (ScoreSign.NEGATIVE, ScoreSign.NEUTRAL, ScoreSign.POSITIVE)[score.verdict + 1]


def usable_hints(score: ScoreEvent, user_words_after: Collection[ScoreSign]) -> list[Hint]:
    """The hints of `score` that may teach, in order.

    What the user wrote next is about the answer only after some verdicts; explicit feedback is always about it, and a
    judge's hint is one because the judge said so.
    """
    user_counts = score.explicit or sign_of(score) in user_words_after
    return [hint for hint in score.hints if hint.source != "user" or user_counts]


def hinted_messages(messages: Sequence[Message], hint: str, form: Form) -> list[Message]:
    """`messages` with the hint in them; the originals are left alone.

    `last_user_message` appends it there, wherever that message stands: tool results may follow it. `system` adds a
    system message after those that open the conversation, which is also what becomes of a conversation in which no user
    speaks. The hint is other people's text: what a tokenizer would take for special tokens is broken up.
    """
    block = f"{HINT_HEADER}\n{without_special_tokens(hint).strip()}"
    hinted = [dict(message) for message in messages]
    users = [index for index, message in enumerate(hinted) if message.get("role") == "user"]
    if form == "last_user_message" and users:
        message = hinted[users[-1]]
        message["content"] = _appended(message.get("content"), f"\n\n{block}")
        return hinted
    opening = 0
    while opening < len(hinted) and hinted[opening].get("role") in ("system", "developer"):
        opening += 1
    return [*hinted[:opening], {"role": "system", "content": block}, *hinted[opening:]]


def _appended(content: object, text: str) -> Any:
    """A message's content, a string or a list of parts, with `text` at its end."""
    if isinstance(content, list):
        return [*cast("list[Any]", content), {"type": "text", "text": text}]
    return f"{content if isinstance(content, str) else ''}{text}"
