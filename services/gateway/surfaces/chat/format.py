"""Answers as chat completions: the whole body, and the chunks of a stream. Pure."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from clawstream.engine.interface import TopLogprobs
from clawstream.errors import RequestRefused
from clawstream.rendering.interface import AnswerDelta, ContentPart, ReasoningPart, ToolCallPart, joined_parts
from services.gateway.errors import error_body
from services.gateway.generation_events import Finished, Piece, Usage
from services.gateway.openai_format import assistant_message
from services.gateway.surfaces.server_sent_events import recorded_comment, sse_event
from services.gateway.surfaces.surface import AnswerContext

DONE_EVENT = b"data: [DONE]\n\n"
_LOGPROB_OF_NULL = -9999.0
"""What OpenAI reports for a log-prob too small to be stated; here: for one that the engine did not give."""


class ChatFormat:
    """Implements `services.gateway.surfaces.surface.AnswerFormat`."""

    def __init__(
        self,
        context: AnswerContext,
        *,
        include_usage: bool,
        decode: Callable[[Sequence[int]], str] | None,
    ) -> None:
        """`decode` gives the text of single tokens, for clients that want log-probs; None for the others."""
        self._common: dict[str, Any] = {
            "id": context.response_id,
            "created": context.created,
            "model": context.model,
        }
        self._include_usage = include_usage
        self._decode = decode
        self._tool_calls_sent = 0

    def body(self, finished: Finished) -> dict[str, Any]:
        choice = {
            "index": 0,
            "message": assistant_message(finished.answer),
            "finish_reason": finished.reason,
            "logprobs": self._logprobs(finished.token_ids, finished.logprobs, finished.top_logprobs),
        }
        return {
            **self._common,
            "object": "chat.completion",
            "choices": [choice],
            "usage": usage_object(finished.usage),
        }

    def first_chunks(self) -> list[bytes]:
        return [self._chunk({"role": "assistant", "content": ""})]

    def keep_alive(self) -> list[bytes]:
        return [self._chunk({})]

    def piece_chunks(self, piece: Piece) -> list[bytes]:
        """A chunk for each part, each tool call whole. Log-probs ride on the first of them.

        With log-probs there is a chunk even when the tokens added no text: none of them may be lost.
        """
        logprobs = self._logprobs(piece.token_ids, piece.logprobs, piece.top_logprobs)
        deltas = self._deltas(piece.delta)
        if not deltas and logprobs and logprobs["content"]:
            deltas.append({"content": ""})
        return [self._chunk(delta, logprobs=logprobs if index == 0 else None) for index, delta in enumerate(deltas)]

    def last_chunks(self, finished: Finished) -> list[bytes]:
        chunks = [self._chunk({}, reason=finished.reason)]
        if self._include_usage:
            usage = usage_object(finished.usage)
            chunks.append(sse_event({**self._common, "object": "chat.completion.chunk", "choices": [], "usage": usage}))
        return [*chunks, recorded_comment(finished.recorded), DONE_EVENT]

    def failure_chunks(self, refusal: RequestRefused) -> list[bytes]:
        return [sse_event(error_body(refusal))]

    def _deltas(self, delta: AnswerDelta) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for part in joined_parts(delta.parts):
            match part:
                case ReasoningPart():
                    deltas.append({"reasoning_content": part.text})
                case ContentPart():
                    deltas.append({"content": part.text})
                case ToolCallPart():
                    deltas.append({"tool_calls": [{"index": self._tool_calls_sent, **part.call}]})
                    self._tool_calls_sent += 1
        return deltas

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[float | None], top_logprobs: Sequence[TopLogprobs]
    ) -> dict[str, Any] | None:
        return None if self._decode is None else logprob_entries(token_ids, logprobs, top_logprobs, self._decode)

    def _chunk(
        self, delta: Mapping[str, Any], *, reason: str | None = None, logprobs: Mapping[str, Any] | None = None
    ) -> bytes:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        chunk: dict[str, Any] = {**self._common, "object": "chat.completion.chunk", "choices": [choice]}
        if self._include_usage:
            chunk["usage"] = None
        return sse_event(chunk)


def usage_object(usage: Usage) -> dict[str, Any]:
    """The `usage` object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def logprob_entries(
    token_ids: Sequence[int],
    logprobs: Sequence[float | None],
    top_logprobs: Sequence[TopLogprobs],
    decode: Callable[[Sequence[int]], str],
) -> dict[str, Any]:
    """The `logprobs` object for these tokens. Where the engine gave too few, what is there is matched from the left."""
    padded = [*logprobs[: len(token_ids)], *([None] * (len(token_ids) - len(logprobs)))]
    padded_top = [*top_logprobs[: len(token_ids)], *([()] * (len(token_ids) - len(top_logprobs)))]
    content = [
        {
            **_logprob_entry(token_id, logprob, decode),
            "top_logprobs": [_logprob_entry(likely_id, value, decode) for likely_id, value in top],
        }
        for token_id, logprob, top in zip(token_ids, padded, padded_top, strict=True)
    ]
    return {"content": content, "refusal": None}


def _logprob_entry(token_id: int, logprob: float | None, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    token = decode([token_id])
    return {
        "token": token,
        "logprob": _LOGPROB_OF_NULL if logprob is None else logprob,
        "bytes": list(token.encode()),
    }
