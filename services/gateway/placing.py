"""From a request to its place in a conversation, and from a finished turn to its index entry."""

from collections.abc import Callable
from dataclasses import dataclass

from clawstream.ids import IdSource
from schemas.events import TurnEvent
from schemas.events.base import TurnType
from services.gateway.canonical import MessageKeys
from services.gateway.client_profiles import ClientProfiles
from services.gateway.conversation_view import ConversationView, view_request
from services.gateway.known_turn import MAX_ANCESTORS, KnownTurn
from services.gateway.next_states import NextStateDraft, next_state_of_request
from services.gateway.ports import IncomingRequest, Placement
from services.gateway.session_tree import TurnLookup, find_place
from services.gateway.turn_types import decide_turn_type

LookupFor = Callable[[str, str | None], TurnLookup]
"""The index for a principal and, if one is asserted, a session."""


@dataclass(frozen=True, slots=True)
class Placed(Placement):
    """A placement with what `finish` needs of the work that was done for it."""

    view: ConversationView
    parent: KnownTurn | None
    next_state: NextStateDraft | None
    """What the request says about its parent's answer."""


class Placer:
    """Thread-safe."""

    def __init__(self, *, profiles: ClientProfiles, secret: bytes, lookup_for: LookupFor, id_source: IdSource) -> None:
        self._profiles = profiles
        self._secret = secret
        self._lookup_for = lookup_for
        self._id_source = id_source

    def place(self, request: IncomingRequest) -> Placed:
        """Session, parent and type of a request, and its parent's next state."""
        profile = self._profiles.choose(request.user_agent, request.messages)
        keys = MessageKeys(self._secret, request.principal)
        view = view_request(request, profile, keys)
        found = find_place(view, self._lookup_for(request.principal, view.asserted_session_id))
        turn_type, reason = decide_turn_type(
            request.turn_type_header,
            request.messages,
            has_tools=bool(request.tools),
            profile=profile,
            view=view,
            found=found,
        )
        next_state = (
            next_state_of_request(request, view, found, child_turn_id=request.turn_id, keys=keys)
            if turn_type is TurnType.MAIN
            else None
        )
        return Placed(
            turn_id=request.turn_id,
            session_id=found.session_id or str(self._id_source()),
            parent_turn_id=found.parent.turn_id if found.parent is not None else None,
            parent_evidence=found.evidence,
            depth=found.parent.depth + 1 if found.parent is not None else 0,
            turn_type=turn_type,
            turn_type_reason=reason,
            client_profile=profile.name,
            view=view,
            parent=found.parent,
            next_state=next_state,
        )

    def known_turn(self, request: IncomingRequest, placed: Placed, turn: TurnEvent) -> KnownTurn:
        """What the index will say of a finished turn."""
        profile = self._profiles.named(placed.client_profile)
        parent = placed.parent
        ancestors = (parent.answer_key, *parent.ancestor_answer_keys) if parent is not None else ()
        return KnownTurn(
            turn_id=turn.turn_id,
            session_id=turn.session_id,
            principal=turn.principal,
            parent_turn_id=turn.parent_turn_id,
            depth=turn.depth,
            turn_type=turn.turn_type,
            trainable=turn.trainable,
            response_id=turn.response_id,
            answer_key=MessageKeys(self._secret, request.principal).answer(profile.answer(turn.response_message)),
            ancestor_answer_keys=ancestors[:MAX_ANCESTORS],
            message_keys=placed.view.newest_message_keys,
            session_hint=placed.view.hint_key,
            trace_id=request.trace_id,
            rollout=turn.rollout,
            created_at=turn.finished_at,
            turn_ref=None,
        )


def expects_parent(placed: Placed) -> bool:
    """Whether the newest answer in the request is unknown here, so that another gateway may have given it."""
    newest = next((answer for answer in reversed(placed.view.answers) if not answer.empty and not answer.silent), None)
    if newest is None:
        return False
    return placed.parent is None or placed.parent.answer_key != newest.key
