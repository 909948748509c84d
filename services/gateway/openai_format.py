"""An answer in the form of chat completions: the message that the log keeps, whichever API the client speaks. Pure."""

from clawstream.rendering.interface import ParsedAnswer
from schemas.events.base import Message


def assistant_message(answer: ParsedAnswer) -> Message:
    """The message that the client receives, and that the turn records."""
    message: Message = {"role": "assistant", "content": answer.content}
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = list(answer.tool_calls)
    return message


def finish_reason(engine_reason: str, answer: ParsedAnswer) -> str:
    """`stop`, `length` or `tool_calls`. An answer that was cut is `length` even when a call in it is complete."""
    if engine_reason == "length":
        return "length"
    return "tool_calls" if answer.tool_calls else "stop"
