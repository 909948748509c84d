"""What judges that write text have in common: the prompt and the reading of the answer."""

from pydantic import JsonValue

from schemas.events import NextStateEvent
from schemas.events.base import Message
from services.judge.backends.interface import Abstention, Opinion
from services.judge.evidence import gather
from services.judge.parsing import boxed_verdict
from services.judge.prompts import filled


def verdict_messages(template: str, next_state: NextStateEvent, max_characters: int) -> list[Message]:
    """The conversation with the judge model: one user message, since not every template knows a system role."""
    return [{"role": "user", "content": filled(template, gather(next_state, max_characters=max_characters))}]


def interpret_generation(response: JsonValue) -> Opinion:
    """The verdict in `{"text": ..., "finish_reason": ...}`. A text that was cut off has none, whatever it says."""
    if not isinstance(response, dict) or not isinstance(text := response.get("text"), str):
        return Opinion(abstention=Abstention.ERROR)
    if response.get("finish_reason") == "length":
        return Opinion(abstention=Abstention.TRUNCATED)
    return boxed_verdict(text)
