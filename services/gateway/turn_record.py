"""A finished answer as the event that the log keeps. Pure."""

from datetime import datetime

from clawstream.rendering.interface import ChatRenderer, ParsedAnswer, RenderedPrompt
from schemas.arrays import float32_array, int32_array
from schemas.events import TurnEvent
from schemas.events.turn import SamplingParameters
from services.gateway.capture import Capture, why_untrainable
from services.gateway.openai_format import assistant_message
from services.gateway.ports import IncomingRequest, Placement


def build_turn(
    *,
    incoming: IncomingRequest,
    placement: Placement,
    response_id: str,
    prompt: RenderedPrompt,
    sampling: SamplingParameters,
    capture: Capture,
    answer: ParsedAnswer,
    reason: str,
    client_gone: bool,
    policy: str,
    engine: str,
    renderer: ChatRenderer,
    first_token_at: datetime | None,
    finished_at: datetime,
) -> TurnEvent:
    """`response_id` and `reason` are what the client is told; ids and log-probs are the capture's, as they are."""
    untrainable = why_untrainable(
        capture,
        client_gone=client_gone,
        sampling=sampling,
        repaired=prompt.repaired,
        turn_type=placement.turn_type,
    )
    return TurnEvent(
        turn_id=placement.turn_id,
        session_id=placement.session_id,
        parent_turn_id=placement.parent_turn_id,
        parent_evidence=placement.parent_evidence,
        depth=placement.depth,
        principal=incoming.principal,
        turn_type=placement.turn_type,
        turn_type_reason=placement.turn_type_reason,
        client_profile=placement.client_profile,
        response_id=response_id,
        policy=policy,
        request_messages=list(incoming.messages),
        tools=list(incoming.tools),
        response_message=assistant_message(answer),
        prompt_ids=int32_array(prompt.token_ids),
        response_ids=int32_array(capture.token_ids),
        response_logprobs=float32_array(capture.recorded_logprobs()),
        version_spans=capture.version_spans,
        sampling=sampling,
        finish_reason=reason,
        truncated=capture.finish_reason == "length",
        trainable=untrainable is None,
        untrainable_reason=None if untrainable is None else untrainable.reason,
        untrainable_detail="" if untrainable is None else untrainable.detail,
        tokenizer_fingerprint=renderer.tokenizer_fingerprint,
        renderer=renderer.name,
        engine=engine,
        rollout=incoming.rollout,
        started_at=incoming.received_at,
        first_token_at=first_token_at,
        finished_at=finished_at,
    )
