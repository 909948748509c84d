"""The seams inside the gateway: the OpenAI surface knows conversations and engines only through these.

One request runs so: render -> `Conversations.place`, and beside it `EngineRouter.lease` -> generate -> stream what
comes, once it is placed -> `Conversations.finish` -> last byte to the client.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from clawstream.engine.interface import EngineClient
from schemas.events import TurnEvent
from schemas.events.base import Message, RolloutPosition, TurnType
from schemas.events.turn import ParentEvidence


@dataclass(frozen=True, slots=True)
class IncomingRequest:
    """A chat request as it arrived, before anything is known of its conversation."""

    turn_id: str
    """Of the turn that it will make."""
    principal: str
    """Whom the API key belongs to."""
    messages: Sequence[Message]
    """As the client sent them."""
    tools: Sequence[Message]
    """As the client sent them."""
    session_header: str | None
    """`X-Session-Id`, if given: an assertion."""
    session_hint: str | None
    """Another sign of the session that agents can be told to send: a hint."""
    turn_type_header: TurnType | None
    """`X-Turn-Type`, if given."""
    session_done: bool
    """`X-Session-Done`: this is the session's last turn."""
    trace_id: str | None
    """W3C trace id, if given."""
    user_agent: str
    """Helps to choose a client profile; may be empty."""
    rollout: RolloutPosition | None
    """Position in an environment's rollout, if any."""
    received_at: datetime


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request belongs. Everything of a turn that is known before its answer."""

    turn_id: str
    session_id: str
    parent_turn_id: str | None
    parent_evidence: ParentEvidence
    depth: int
    turn_type: TurnType
    turn_type_reason: str
    client_profile: str


@dataclass(frozen=True, slots=True)
class RolloutOutcome:
    """What an environment says when a rollout has ended."""

    rollout_id: str
    """As it stood in `X-Rollout-Id`."""
    score: float
    """From -1 (failed) to +1 (solved)."""
    steps: int | None
    """How many recorded turns the environment knows of; None when it does not say."""
    step_scores: Mapping[int, float]
    """By step index; steps without a score are absent."""
    text: str | None
    """In words: a source of hints."""
    source: str
    """The environment's or verifier's name."""
    feedback_id: str
    """The same one again changes nothing. By default it follows from the rollout: one outcome per rollout."""


@dataclass(frozen=True, slots=True)
class RecordedOutcome:
    """What became of an outcome."""

    next_state_ids: list[str]
    """One per turn, in the order of steps."""


class TurnRecorder(Protocol):
    """What one answer needs of conversations: a place before, a record after."""

    async def place(self, request: IncomingRequest) -> Placement:
        """Finds session and parent; writes down the parent's next state, whatever becomes of the answer.

        Never raises for odd histories: at worst the request starts a new session.
        """
        ...

    async def finish(self, request: IncomingRequest, placement: Placement, turn: TurnEvent) -> bool:
        """Writes the turn down. Returns when it is safe on disk: the last byte may then go to the client.

        False means that the outbox refused the turn, or what the request said of the turn before it
        (`x-clawstream-recorded: false`).
        """
        ...


class Conversations(TurnRecorder, Protocol):
    """The session tree, its index and the outbox."""

    async def feedback(
        self, principal: str, response_id: str, *, feedback_id: str, score: float, text: str | None, source: str
    ) -> str:
        """Writes explicit feedback down and returns the id of its next state. Raises LookupError for an unknown id."""
        ...

    async def rollout_outcome(self, principal: str, outcome: RolloutOutcome) -> RecordedOutcome:
        """Writes a rollout's outcome down, once for every turn of it. A repetition writes what is missing.

        Raises LookupError for a rollout without turns, and RequestRefused, status 409, while fewer turns are known
        than the environment says it had.
        """
        ...

    def is_ready(self) -> bool:
        """Whether the index has been read to its end once, so that a restart forgets nothing."""
        ...


@dataclass(frozen=True, slots=True)
class EngineLease:
    """The right to run one answer on one engine. The engine is not chosen for others above its fair load."""

    engine: EngineClient
    weight_version: int
    """What the engine serves as far as the gate knows; the spans in the answer are what counts."""


class EngineRouter(Protocol):
    """Chooses engines by load and by what the weight gate says of them."""

    def lease(self, session_id: Callable[[], Awaitable[str]]) -> AbstractAsyncContextManager[EngineLease]:
        """Waits, within a bound, only while no engine is ready. `session_id` is asked only where there is a choice.

        Raises what `session_id` raises, and NoEngineReady (see `clawstream.errors`) past the bound, with the seconds
        after which to try again.
        """
        ...

    def report_failure(self, engine_name: str) -> None:
        """The engine did not answer: leave it out until it is seen healthy again."""
        ...

    def is_ready(self) -> bool:
        """Whether at least one engine serves a known version."""
        ...
