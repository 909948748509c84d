"""OpenAI's responses as a `Surface`."""

from collections.abc import Mapping
from typing import Any

from clawstream.errors import RequestRefused
from services.gateway.errors import error_body
from services.gateway.surfaces.responses.format import ResponsesFormat
from services.gateway.surfaces.responses.request import read_responses_request
from services.gateway.surfaces.surface import AnswerContext, SurfaceRequest


class ResponsesSurface:
    """Implements `services.gateway.surfaces.surface.Surface`."""

    response_id_prefix = "resp_"

    def read(self, body: Mapping[str, Any]) -> SurfaceRequest:
        request = read_responses_request(body)

        def open_format(context: AnswerContext) -> ResponsesFormat:
            return ResponsesFormat(context, request)

        return SurfaceRequest(request.answer, open_format)

    def error_body(self, refusal: RequestRefused) -> dict[str, Any]:
        return error_body(refusal)
