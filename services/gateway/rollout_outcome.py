"""How a rollout ends on the log: its outcome becomes explicit evidence for every one of its turns. Pure.

The outcome (how the rollout ended) and the step scores (what each step was worth by itself) stay separate numbers;
the trainer combines them. Every one of these next states says where the rollout ended and how many of its turns may be
trained, so that whoever joins them knows when it has all.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from schemas.events.next_state import ExplicitFeedback
from services.gateway.known_turn import KnownTurn
from services.gateway.next_states import NextStateDraft, explicit_next_state
from services.gateway.ports import RolloutOutcome


def turns_of_rollout(turns: Sequence[KnownTurn]) -> list[KnownTurn]:
    """The main turns that make up a rollout, one per step, in order.

    Of a step that was asked for twice (the agent never received the first answer) the newest turn counts.
    """
    by_step: dict[int, KnownTurn] = {}
    for turn in sorted(turns, key=lambda turn: (turn.created_at, turn.turn_id)):
        if turn.is_main and turn.rollout is not None:
            by_step[turn.rollout.step_index] = turn
    return [by_step[step] for step in sorted(by_step)]


def outcome_next_states(
    turns: Sequence[KnownTurn], outcome: RolloutOutcome, observed_at: datetime
) -> list[NextStateDraft]:
    """One next state of kind outcome per turn. `turns` are those of `turns_of_rollout`, at least one."""
    positions = [turn.rollout for turn in turns if turn.rollout is not None]
    last_step_index = max(position.step_index for position in positions)
    trainable_turns = sum(turn.trainable for turn in turns)
    drafts: list[NextStateDraft] = []
    for turn, position in zip(turns, positions, strict=True):
        ended = position.model_copy(update={"last_step_index": last_step_index, "trainable_turns": trainable_turns})
        judgement = ExplicitFeedback(
            feedback_id=outcome.feedback_id,
            score=outcome.score,
            step_score=outcome.step_scores.get(position.step_index),
            text=outcome.text if position.step_index == last_step_index else None,
            source=outcome.source,
        )
        drafts.append(explicit_next_state(replace(turn, rollout=ended), judgement, observed_at))
    return drafts
