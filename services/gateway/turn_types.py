"""Decides whether a request is part of the conversation or a side call. Pure."""

from collections.abc import Sequence

from schemas.events.base import Message, TurnType
from services.gateway.client_profiles import ClientProfile, RuleKind
from services.gateway.conversation_view import ConversationView
from services.gateway.session_tree import Found


def decide_turn_type(
    header: TurnType | None,
    messages: Sequence[Message],
    *,
    has_tools: bool,
    profile: ClientProfile,
    view: ConversationView,
    found: Found,
) -> tuple[TurnType, str]:
    """Type and reason. The header wins; then the profile's patterns; then what the request adds to its parent."""
    if header is not None:
        return header, "header"
    rule = profile.side_request(messages, has_tools=has_tools)
    if rule is not None:
        return TurnType.SIDE, rule
    if found.parent is not None and not found.parent.is_main:
        return TurnType.SIDE, "side_parent"
    added = view.messages_after(found.answer.position if found.answer is not None else None)
    last = added[-1].view.rule if added else None
    if last is not None and last.kind is RuleKind.HARNESS:
        return TurnType.SIDE, last.name
    return TurnType.MAIN, "default"
