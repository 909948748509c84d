"""Chat completions as a `Surface`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from clawstream.errors import RequestRefused
from services.gateway.errors import error_body
from services.gateway.surfaces.chat.format import ChatFormat
from services.gateway.surfaces.chat.request import read_chat_request
from services.gateway.surfaces.surface import AnswerContext, SurfaceRequest


class ChatSurface:
    """Implements `services.gateway.surfaces.surface.Surface`."""

    response_id_prefix = "chatcmpl-"

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """`decode` gives the text of single tokens, for clients that want log-probs."""
        self._decode = decode

    def read(self, body: Mapping[str, Any]) -> SurfaceRequest:
        request = read_chat_request(body)
        decode = self._decode if request.logprobs else None

        def open_format(context: AnswerContext) -> ChatFormat:
            return ChatFormat(context, include_usage=request.include_usage, decode=decode)

        return SurfaceRequest(request.answer, open_format)

    def error_body(self, refusal: RequestRefused) -> dict[str, Any]:
        return error_body(refusal)
