"""When a rollout is over, and its group: decided from what has arrived and when. Pure.

The turns of a rollout are samples of their own, in any order, and only a rollout as a whole can be rewarded: its
outcome comes last, and a step is compared with the same step of other rollouts. So they wait for one another.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from schemas.events.base import RolloutPosition
from services.trainer.candidates import Candidate


@dataclass(frozen=True, slots=True)
class RolloutRules:
    """When waiting ends."""

    timeout_seconds: float = 120.0
    """A rollout, or a group, of which nothing came for so long is over, whatever is missing."""
    settle_seconds: float = 2.0
    """An outcome whose rollout does not say how many steps it has ends it when nothing came for so long: other turns'
    samples may overtake one another on their way."""
    group_size: int | None = None
    """Rollouts that are compared with each other; None does not wait for them."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A sample that waits."""

    candidate: Candidate
    arrived_seconds: float
    """When its newest revision came."""


def units(arrivals: Sequence[Arrival], now_seconds: float, rules: RolloutRules) -> list[list[Candidate]]:
    """What may be trained now, as pieces that must not be torn apart: turns, rollouts, or groups of rollouts.

    In the order of their first arrival; a rollout's turns by step.
    """
    whole: list[list[Candidate]] = []
    rollouts: dict[str, list[Arrival]] = {}
    for arrival in arrivals:
        position = arrival.candidate.rollout
        if position is None:
            whole.append([arrival.candidate])
        elif position.rollout_id in rollouts:
            rollouts[position.rollout_id].append(arrival)
        else:
            rollouts[position.rollout_id] = [arrival]
            whole.append([arrival.candidate])  # keeps its place
    over = {name for name, members in rollouts.items() if _is_over(members, now_seconds, rules)}
    groups: dict[str, list[str]] = defaultdict(list)
    for name, members in rollouts.items():
        groups[_position(members[0]).group_id].append(name)
    found: list[list[Candidate]] = []
    taken: set[str] = set()
    for piece in whole:
        position = piece[0].rollout
        if position is None:
            found.append(piece)
        elif position.rollout_id in taken:
            continue
        elif rules.group_size is None:
            if position.rollout_id in over:
                found.append(_by_step(rollouts[position.rollout_id]))
        else:
            names = groups[position.group_id]
            taken.update(names)
            if _group_is_over([rollouts[name] for name in names], over, names, now_seconds, rules):
                found.append([candidate for name in names for candidate in _by_step(rollouts[name])])
    return found


def _is_over(members: Sequence[Arrival], now_seconds: float, rules: RolloutRules) -> bool:
    silence = now_seconds - max(arrival.arrived_seconds for arrival in members)
    if silence >= rules.timeout_seconds:
        return True
    positions = [_position(arrival) for arrival in members]
    steps = {position.step_index for position in positions}
    counts = [position.trainable_turns for position in positions if position.trainable_turns is not None]
    if counts:
        # An outcome is written for every turn: until each has its own, a judge's older word may stand in for a moment.
        ended = {position.step_index for position in positions if position.trainable_turns is not None}
        settled = len(steps) >= max(counts) and silence >= rules.settle_seconds
        return settled or len(ended) >= max(counts)
    lasts = [position.last_step_index for position in positions if position.last_step_index is not None]
    if lasts and steps >= set(range(max(lasts) + 1)):
        return True
    ends = [_position(arrival).step_index for arrival in members if arrival.candidate.outcome is not None]
    return bool(ends) and steps >= set(range(max(ends) + 1)) and silence >= rules.settle_seconds


def _group_is_over(
    rollouts: Sequence[Sequence[Arrival]],
    over: set[str],
    names: Sequence[str],
    now_seconds: float,
    rules: RolloutRules,
) -> bool:
    if not all(name in over for name in names):
        return False
    assert rules.group_size is not None
    last = max(arrival.arrived_seconds for members in rollouts for arrival in members)
    return len(names) >= rules.group_size or now_seconds - last >= rules.timeout_seconds


def _by_step(members: Sequence[Arrival]) -> list[Candidate]:
    return [arrival.candidate for arrival in sorted(members, key=lambda arrival: _position(arrival).step_index)]


def _position(arrival: Arrival) -> RolloutPosition:
    position = arrival.candidate.rollout
    assert position is not None  # only turns of rollouts are asked
    return position
