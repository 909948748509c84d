"""The routes that answer, on ASGI itself: FastAPI's layers would cost every request, and every chunk of a stream."""

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.surfaces.answer_response import AnswerResponse

AnswerEndpoint = Callable[[Request], Awaitable[AnswerResponse]]
"""Starts an answer. Whatever it raises is told to the client."""


class AnswerRoutes:
    """An ASGI application: POSTs to `endpoints`; everything else is `others`' to answer."""

    def __init__(
        self,
        endpoints: Mapping[str, AnswerEndpoint],
        others: ASGIApp,
        failure: Callable[[Request, Exception], Response],
    ) -> None:
        """`endpoints` by path; `failure` counts and logs an error, and gives what is said of it."""
        self._endpoints = endpoints
        self._others = others
        self._failure = failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = self._endpoints.get(scope["path"]) if is_post else None
        if endpoint is None:
            await self._others(scope, receive, send)
            return
        request = Request(scope, receive)
        answer: AnswerResponse | None = None
        try:
            answer = await endpoint(request)
            await answer(scope, receive, send)
        except Exception as error:
            told = self._failure(request, error)
            if answer is not None and answer.has_begun:
                raise  # The server closes the connection: nothing else tells the client that its answer is not whole.
            await told(scope, receive, send)
