"""All events, and the registry that maps a CloudEvents type to its model."""

from types import MappingProxyType

from schemas.events.base import Event
from schemas.events.config import ActiveJudgeSpecEvent
from schemas.events.deployment import DeploymentEvent
from schemas.events.forgotten import ForgottenEvent
from schemas.events.imported import ImportedConversationEvent
from schemas.events.llm_call import LlmCallEvent
from schemas.events.next_state import NextStateEvent
from schemas.events.replay import ReplayScoreEvent
from schemas.events.sample import SampleEvent
from schemas.events.score import ScoreEvent
from schemas.events.session_key import MasterKeyEvent, SessionKeyEvent
from schemas.events.skipped_inputs import SkippedInputsEvent
from schemas.events.train_step import TrainStepEvent
from schemas.events.turn import TurnEvent
from schemas.events.turn_index import OutboxPositionEvent, TurnIndexEvent
from schemas.events.weights import WeightPointerEvent, WeightsAppliedEvent, WeightVersionEvent

EVENT_MODELS: MappingProxyType[str, type[Event]] = MappingProxyType(
    {
        model.event_type: model
        for model in (
            TurnEvent,
            NextStateEvent,
            ScoreEvent,
            ReplayScoreEvent,
            SkippedInputsEvent,
            SampleEvent,
            WeightVersionEvent,
            WeightPointerEvent,
            WeightsAppliedEvent,
            TrainStepEvent,
            TurnIndexEvent,
            OutboxPositionEvent,
            LlmCallEvent,
            ActiveJudgeSpecEvent,
            ForgottenEvent,
            ImportedConversationEvent,
            SessionKeyEvent,
            MasterKeyEvent,
            DeploymentEvent,
        )
    }
)
"""CloudEvents type to model: the only place where an event is registered."""

__all__ = [
    "EVENT_MODELS",
    "ActiveJudgeSpecEvent",
    "DeploymentEvent",
    "Event",
    "ForgottenEvent",
    "ImportedConversationEvent",
    "LlmCallEvent",
    "MasterKeyEvent",
    "NextStateEvent",
    "OutboxPositionEvent",
    "ReplayScoreEvent",
    "SampleEvent",
    "ScoreEvent",
    "SessionKeyEvent",
    "SkippedInputsEvent",
    "TrainStepEvent",
    "TurnEvent",
    "TurnIndexEvent",
    "WeightPointerEvent",
    "WeightVersionEvent",
    "WeightsAppliedEvent",
]
