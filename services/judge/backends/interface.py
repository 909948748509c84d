"""What a judge backend is.

A *model* backend is three steps, so that the ledger can stand between them: `prepare` makes the request (pure),
`call` sends it (the only step that costs), `interpret` reads the answer (pure; it also reads what the ledger kept).
A *code* backend looks at the next state and answers at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from pydantic import JsonValue

from schemas.events import NextStateEvent
from schemas.events.base import Message


class Abstention(StrEnum):
    """Why a vote has no verdict."""

    UNPARSABLE = "unparsable"
    """The answer holds no verdict that is allowed."""
    TWO_VERDICTS = "two_verdicts"
    """The answer holds two different verdicts."""
    TRUNCATED = "truncated"
    """The token cap ended the answer."""
    TIMEOUT = "timeout"
    """The model did not answer in time, again and again."""
    ERROR = "error"
    """The model refused this request for good, or answered what its contract does not allow."""
    NO_RULE = "no_rule"
    """No rule says anything about this next state."""
    NO_HINT = "no_hint"
    """The answer says that there is a hint, and holds none, or one too short to be one."""
    TWO_HINTS = "two_hints"
    """The answer holds two different hints, or markers that do not pair."""


@dataclass(frozen=True, slots=True)
class Opinion:
    """One vote's content: exactly one of the two is set."""

    verdict: int | None = None
    """+1, 0 or -1."""
    abstention: Abstention | None = None
    """Why there is no verdict."""
    hints: tuple[str, ...] = ()
    """What a judge in code has to say beside its verdict. Models give hints by votes of their own (`HintOpinion`)."""

    def __post_init__(self) -> None:
        if (self.verdict is None) == (self.abstention is None):
            raise ValueError("an opinion is either a verdict or an abstention")


@dataclass(frozen=True, slots=True)
class HintOpinion:
    """One hint vote's content."""

    useful: bool | None = None
    """Whether what followed holds a hint; None when the vote abstains."""
    hint: str = ""
    """The hint; empty unless useful."""
    abstention: Abstention | None = None
    """Why there is no answer."""

    def __post_init__(self) -> None:
        if (self.useful is None) == (self.abstention is None) or bool(self.useful) != bool(self.hint):
            raise ValueError("a hint opinion is a hint, the answer that there is none, or an abstention")


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a judge of your own may return when it has more to say than a verdict."""

    verdict: int | None
    """1, 0 or -1; None to abstain."""
    hints: tuple[str, ...] = ()
    """What the answer should have known. Kept when the spec takes hints from the judge."""


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """One answer of a model."""

    response: JsonValue
    """What `interpret` needs, and what the ledger keeps."""
    prompt_tokens: int = 0
    """Tokens read. Where a call for several answers tells them once, they are the first answer's."""
    completion_tokens: int = 0
    """Tokens written. Where a call for several answers tells them together, they are shared out evenly."""


@runtime_checkable
class ModelBackend(Protocol):
    """A judge that calls a model."""

    def prepare(self, next_state: NextStateEvent) -> Mapping[str, JsonValue]:
        """The request for one vote. The same next state gives the same request: its checksum is in the ledger."""
        ...

    async def call(self, request: Mapping[str, JsonValue], answers: int = 1) -> Sequence[ModelAnswer]:
        """Asks the model once, for as many independent answers: gives at least one of them, and no more.

        Raises EngineUnavailable or EngineTimeout (try again later), EngineRejected (this request will never be
        accepted), EngineProtocolError (the answer is not what its contract promises).
        """
        ...

    def interpret(self, response: JsonValue) -> Opinion:
        """Reads a response, fresh or from the ledger."""
        ...

    async def close(self) -> None:
        """Closes connections."""
        ...


class HintBackend(Protocol):
    """Asks a model for hints, in the same three steps."""

    def prepare(self, next_state: NextStateEvent) -> Mapping[str, JsonValue]:
        """The request for one hint vote. The same next state gives the same request."""
        ...

    async def call(self, request: Mapping[str, JsonValue], answers: int = 1) -> Sequence[ModelAnswer]:
        """As `ModelBackend.call`."""
        ...

    def interpret(self, response: JsonValue) -> HintOpinion:
        """Reads a response, fresh or from the ledger."""
        ...


@runtime_checkable
class TextModel(Protocol):
    """A model that answers messages with text: what verdict and hint votes have in common."""

    def request(self, messages: Sequence[Message]) -> Mapping[str, JsonValue]:
        """What `call` sends."""
        ...

    async def call(self, request: Mapping[str, JsonValue], answers: int = 1) -> Sequence[ModelAnswer]:
        """As `ModelBackend.call`; each response is `{"text": ..., "finish_reason": ...}`."""
        ...


class CodeBackend(Protocol):
    """A judge that is code."""

    async def judge(self, next_state: NextStateEvent) -> Opinion:
        """The verdict. An exception is a bug in the judge: the record goes to the dead-letter topic."""
        ...

    async def close(self) -> None:
        """Releases what it holds."""
        ...


Backend = ModelBackend | CodeBackend
