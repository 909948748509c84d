"""From a logged answer to a turn event: rendered as the gateway renders, its log-probs scored by an engine.

The log-probs are those that the policy *now* gives to a text that something else wrote: no behaviour log-probs. An
importance ratio against them starts at 1 whatever the text is, so training on imported turns is reward-weighted
imitation and off-policy; that is why they are not trainable unless the caller says so.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np

from clawstream import ids
from clawstream.blobs import BlobStore
from clawstream.clock import Clock
from clawstream.engine.interface import ScoredTokens
from clawstream.engine.pool import EnginePool
from clawstream.errors import EngineRejected
from clawstream.importing.conversations import LoggedConversation, LoggedTurn
from clawstream.rendering.interface import ChatRenderer
from schemas.arrays import float32_array, int32_array
from schemas.events import TurnEvent
from schemas.events.base import Message, VersionSpan
from schemas.events.turn import ParentEvidence, SamplingParameters, UntrainableReason

SCORED_TEMPERATURE = 1.0
"""Engines score at this temperature: it is what the turn says that it was sampled at."""


@dataclass(frozen=True, slots=True)
class ImportRules:
    """What imported turns say of themselves."""

    policy: str
    principal: str
    """Of conversations whose log does not say whose they are."""
    trainable: bool
    """Whether judge, teacher and trainer may learn from them."""


@dataclass(frozen=True, slots=True)
class ScoredTurn:
    """A turn that is ready for the log."""

    logged: LoggedTurn
    event: TurnEvent


class TurnScorer:
    """Makes turn events. Safe to use from many tasks."""

    def __init__(
        self, rules: ImportRules, renderer: ChatRenderer, engines: EnginePool, blobs: BlobStore, clock: Clock
    ) -> None:
        self._rules = rules
        self._renderer = renderer
        self._engines = engines
        self._blobs = blobs
        self._clock = clock

    async def score(self, conversation: LoggedConversation, turns: Sequence[LoggedTurn]) -> list[ScoredTurn]:
        """All turns of a conversation, one after the other: each prompt is a prefix that the engine has cached.

        Raises ContractError for a conversation that cannot be rendered, and EngineUnavailable, EngineTimeout or
        EngineProtocolError. A turn that the engine refuses (too long) is recorded without log-probs.
        """
        session_id = conversation.session_id(conversation.principal or self._rules.principal)
        scored: list[ScoredTurn] = []
        for turn in turns:
            parent = scored[-1].event.turn_id if scored else None
            scored.append(ScoredTurn(turn, await self._event(conversation, turn, session_id, parent)))
        return scored

    async def _event(
        self, conversation: LoggedConversation, turn: LoggedTurn, session_id: str, parent: str | None
    ) -> TurnEvent:
        request = [each.message for each in turn.request]
        tools = list(conversation.tools)
        prompt = self._renderer.render(request, tools)
        response_ids, is_exact = self._response_ids(prompt.token_ids, turn, tools)
        refusal, scores = "", None
        if response_ids:
            try:
                scores = await self._engines.score(prompt.token_ids, response_ids)
            except EngineRejected as error:
                refusal = str(error)
        reason, detail = self._untrainable(scores, refusal, is_exact=is_exact and not prompt.repaired)
        logprobs = scores.logprobs if scores is not None else []
        version = scores.weight_version if scores is not None else None
        turn_id = ids.derive("imported-turn", session_id, turn.number, conversation.content_sha256)
        now = self._clock.now()
        event = TurnEvent(
            turn_id=turn_id,
            session_id=session_id,
            parent_turn_id=parent,
            parent_evidence=ParentEvidence(rule="imported" if parent is not None else "none"),
            depth=turn.number,
            principal=conversation.principal or self._rules.principal,
            turn_type_reason="imported",
            client_profile=conversation.log_format,
            response_id=f"chatcmpl-{turn_id}",
            policy=self._rules.policy,
            request_messages=request,
            tools=tools,
            response_message=turn.answer.message,
            prompt_ids=int32_array(prompt.token_ids),
            response_ids=int32_array(response_ids),
            response_logprobs=float32_array(logprobs),
            version_spans=[]
            if version is None
            else [VersionSpan(weight_version=version, start=0, end=len(response_ids))],
            sampling=SamplingParameters(temperature=SCORED_TEMPERATURE, max_new_tokens=len(response_ids)),
            finish_reason="tool_calls" if turn.answer.message.get("tool_calls") else "stop",
            trainable=reason is None,
            untrainable_reason=reason,
            untrainable_detail=detail,
            tokenizer_fingerprint=self._renderer.tokenizer_fingerprint,
            renderer=self._renderer.name,
            engine="" if scores is None else scores.engine,
            imported_from=conversation.log_format,
            started_at=_first_time(turn.request[-1].at, turn.answer.at, now),
            finished_at=_first_time(turn.answer.at, turn.request[-1].at, now),
        )
        return await asyncio.to_thread(self._packed, event)

    def _response_ids(
        self, prompt_ids: list[int], turn: LoggedTurn, tools: Sequence[Message]
    ) -> tuple[list[int], bool]:
        """[response_tokens] with the terminator, and whether they are what the template writes after this prompt.

        The conversation is rendered with the answer; what follows the prompt is the answer as the policy would have
        written it. A template that renders an answer differently once it is history (many cut its reasoning) gives no
        such prefix: then the visible text is encoded by itself.
        """
        messages = [*(each.message for each in turn.request), turn.answer.message]
        whole = self._renderer.render(messages, tools).token_ids
        stops = self._renderer.stop_token_ids
        if whole[: len(prompt_ids)] == prompt_ids:
            rest = whole[len(prompt_ids) :]
            end = next((index + 1 for index, each in enumerate(rest) if each in stops), None)
            if end is not None:
                return rest[:end], True
        content = turn.answer.message.get("content")
        if not isinstance(content, str) or not content:
            return [], False
        return [*self._renderer.encode(content), *stops[:1]], not turn.answer.message.get("tool_calls")

    def _untrainable(
        self, scores: ScoredTokens | None, refusal: str, *, is_exact: bool
    ) -> tuple[UntrainableReason | None, str]:
        if scores is None:
            reason = UntrainableReason.NO_LOGPROBS if refusal else UntrainableReason.EMPTY_RESPONSE
            return reason, refusal
        if not all(math.isfinite(each) for each in scores.logprobs):
            return UntrainableReason.NON_FINITE_LOGPROB, ""
        if scores.weight_version is None:
            return UntrainableReason.UNKNOWN_VERSION, f"engine {scores.engine} does not say which weights it serves"
        if not is_exact:
            return UntrainableReason.RENDERING_REPAIRED, "the template renders this answer in another form"
        if not self._rules.trainable:
            return UntrainableReason.IMPORTED, "imported without --trainable"
        return None, ""

    def _packed(self, event: TurnEvent) -> TurnEvent:
        arrays = {
            "prompt_ids": event.prompt_ids,
            "response_ids": event.response_ids,
            "response_logprobs": event.response_logprobs,
        }
        return event.model_copy(
            update={name: self._blobs.pack(np.asarray(array.to_numpy())) for name, array in arrays.items()}
        )


def _first_time(*times: datetime | None) -> datetime:
    return next(time for time in times if time is not None)
