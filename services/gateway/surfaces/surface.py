"""What every API has to say for itself: how to read a request, and how to write an answer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from clawstream.errors import RequestRefused
from services.gateway.generation_events import Finished, Piece
from services.gateway.surfaces.answer_request import AnswerRequest


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """What is known of an answer before it begins."""

    response_id: str
    """The id that the client gets, with the API's prefix."""
    model: str
    created: int
    """Seconds since 1970."""
    prompt_tokens: int


class AnswerFormat(Protocol):
    """Writes one answer: either `body`, or the chunks of a stream in the order of the methods."""

    def body(self, finished: Finished) -> dict[str, Any]:
        """The whole answer of a request that does not stream."""
        ...

    def first_chunks(self) -> list[bytes]:
        """The beginning of the stream."""
        ...

    def keep_alive(self) -> list[bytes]:
        """Says nothing, but resets clients' time-outs: comments do not."""
        ...

    def piece_chunks(self, piece: Piece) -> list[bytes]:
        """What some tokens added."""
        ...

    def last_chunks(self, finished: Finished) -> list[bytes]:
        """Why it ended, usage, whether it was recorded (as a comment), and the end."""
        ...

    def failure_chunks(self, refusal: RequestRefused) -> list[bytes]:
        """A failure after the stream began: it ends the stream."""
        ...


@dataclass(frozen=True, slots=True)
class SurfaceRequest:
    """A request as it was read."""

    answer: AnswerRequest
    open_format: Callable[[AnswerContext], AnswerFormat]
    """Opens the format for its answer; knows what only this API's clients can ask for."""


class Surface(Protocol):
    """One API."""

    @property
    def response_id_prefix(self) -> str:
        """Before the turn's id."""
        ...

    def read(self, body: Mapping[str, Any]) -> SurfaceRequest:
        """Raises RequestRefused, naming the parameter."""
        ...

    def error_body(self, refusal: RequestRefused) -> dict[str, Any]:
        """The JSON of a failure."""
        ...
