"""Anthropic's messages as a `Surface`."""

from collections.abc import Mapping
from typing import Any

from clawstream.errors import RequestRefused
from services.gateway.surfaces.messages.errors import error_body
from services.gateway.surfaces.messages.format import MessagesFormat
from services.gateway.surfaces.messages.request import read_messages_request
from services.gateway.surfaces.surface import AnswerContext, SurfaceRequest


class MessagesSurface:
    """Implements `services.gateway.surfaces.surface.Surface`."""

    response_id_prefix = "msg_"

    def read(self, body: Mapping[str, Any]) -> SurfaceRequest:
        request = read_messages_request(body)

        def open_format(context: AnswerContext) -> MessagesFormat:
            return MessagesFormat(context, show_thinking=request.show_thinking)

        return SurfaceRequest(request.answer, open_format)

    def error_body(self, refusal: RequestRefused) -> dict[str, Any]:
        return error_body(refusal)
