"""Served against trained: whom does the policy learn from? Pure.

For each of user, length, temperature and weight version the answers are put into groups. With p_i the share of group i
among the main answers served, and q_i its share among those trained,

    distance     1/2 sum |q_i - p_i|                                   total variation: 0 is the same, 1 is disjoint
    by chance    1/2 sum sqrt(2 p_i (1 - p_i) / (pi n))                what n fair draws from p would show on average
    users heard  1 / sum q_i^2                                         effective number (inverse Simpson index)

A distance well above chance says that the policy learns from others than it serves.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from schemas.events import Event, TrainStepEvent, TurnEvent
from schemas.events.base import TurnType

UNKNOWN = "unknown"
"""Group of trained answers that the event does not describe, and whose turn is outside the window."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What is compared of an answer."""

    turn_id: str
    principal: str
    tokens: int
    temperature: float | None
    """None where it is not known."""
    weight_version: int | None
    """Of the oldest token; None where it is not known."""
    reward: float | None = None
    """What was trained on; None for a served answer, and without a reward."""


@dataclass(frozen=True, slots=True)
class GroupShare:
    """One group's part of what was served and of what was trained."""

    group: str
    served: int
    trained: int
    served_share: float
    trained_share: float
    mean_reward: float | None
    """Of its trained answers; None where none has a reward."""


@dataclass(frozen=True, slots=True)
class Dimension:
    """The comparison by one property."""

    name: str
    distance: float
    by_chance: float
    effective_served: float
    """Effective number of groups among the served."""
    effective_trained: float
    """Among the trained."""
    groups: list[GroupShare]
    """The largest differences first."""


@dataclass(frozen=True, slots=True)
class DriftReport:
    """See the module's docstring."""

    served: int
    """Main answers served in the window."""
    trainable: int
    """Those that may be trained at all."""
    trained: int
    """Answers trained in the window; some may have been served before it."""
    dimensions: list[Dimension]

    @property
    def headline(self) -> str:
        """The answer in one sentence."""
        if not self.trained or not self.served:
            return f"{self.served} answers served and {self.trained} trained: there is nothing to compare"
        drifted = [each for each in self.dimensions if each.distance > max(2 * each.by_chance, _NOTICEABLE)]
        if not drifted:
            return "what is trained looks like what is served"
        told = ", ".join(f"{each.name} ({each.distance:.0%} apart, {each.by_chance:.0%} by chance)" for each in drifted)
        return f"what is trained differs from what is served by {told}"


_NOTICEABLE = 0.05


@dataclass(slots=True)
class DriftFold:
    """Takes in turns and train-steps of one policy, in any order."""

    policy: str
    served: dict[str, Answer]
    """Main turns by id."""
    trained: dict[str, Answer]
    trainable: int = 0

    @classmethod
    def of(cls, policy: str) -> "DriftFold":
        """An empty one."""
        return cls(policy, {}, {})

    def apply(self, event: Event) -> None:
        """Takes in an event; others than turns and train-steps are passed over."""
        if isinstance(event, TurnEvent) and event.policy == self.policy and event.turn_type is TurnType.MAIN:
            version = min((span.weight_version for span in event.version_spans), default=None)
            tokens = event.response_ids.element_count
            self.trainable += event.trainable and event.turn_id not in self.served
            self.served[event.turn_id] = Answer(
                event.turn_id, event.principal, tokens, event.sampling.temperature, version
            )
        elif isinstance(event, TrainStepEvent) and event.policy == self.policy and event.weight_version is not None:
            for sample in event.samples:
                self.trained[sample.turn_id] = Answer(
                    sample.turn_id,
                    sample.principal or UNKNOWN,
                    sample.response_tokens,
                    sample.sampling_temperature,
                    event.base_version - sample.age,
                    sample.reward,
                )

    def report(self) -> DriftReport:
        """The comparison."""
        trained = [self._completed(answer) for answer in self.trained.values()]
        served = list(self.served.values())
        return DriftReport(
            served=len(served),
            trainable=self.trainable,
            trained=len(trained),
            dimensions=[_dimension(name, served, trained, group) for name, group in _DIMENSIONS],
        )

    def _completed(self, answer: Answer) -> Answer:
        """Steps written before events told principal and temperature: the turn tells them, where it is retained."""
        turn = self.served.get(answer.turn_id)
        if turn is None or answer.principal != UNKNOWN:
            return answer
        return Answer(
            answer.turn_id, turn.principal, answer.tokens, turn.temperature, answer.weight_version, answer.reward
        )


def drift(policy: str, events: Iterable[Event]) -> DriftReport:
    """The report over `events`."""
    fold = DriftFold.of(policy)
    for event in events:
        fold.apply(event)
    return fold.report()


def length_group(tokens: int) -> str:
    """Powers of two: `9-16 tokens`."""
    if tokens <= 1:
        return f"{tokens} tokens"
    top = 2 ** math.ceil(math.log2(tokens))
    return f"{top // 2 + 1}-{top} tokens"


def _known(value: float | None, unit: str) -> str:
    return UNKNOWN if value is None else f"{unit}{value:g}"


_DIMENSIONS: tuple[tuple[str, Callable[[Answer], str]], ...] = (
    ("user", lambda answer: answer.principal),
    ("length", lambda answer: length_group(answer.tokens)),
    ("temperature", lambda answer: _known(answer.temperature, "T = ")),
    ("weight version", lambda answer: _known(answer.weight_version, "version ")),
)


def _dimension(
    name: str, served: Sequence[Answer], trained: Sequence[Answer], group: Callable[[Answer], str]
) -> Dimension:
    p, q = Counter(map(group, served)), Counter(map(group, trained))
    rewards: dict[str, list[float]] = {}
    for answer in trained:
        if answer.reward is not None:
            rewards.setdefault(group(answer), []).append(answer.reward)
    rows = [
        GroupShare(
            group=each,
            served=p[each],
            trained=q[each],
            served_share=p[each] / max(1, len(served)),
            trained_share=q[each] / max(1, len(trained)),
            mean_reward=sum(rewards[each]) / len(rewards[each]) if each in rewards else None,
        )
        for each in sorted(p.keys() | q.keys())
    ]
    rows.sort(key=lambda row: -abs(row.trained_share - row.served_share))
    draws = max(1, len(trained))
    return Dimension(
        name=name,
        distance=sum(abs(row.trained_share - row.served_share) for row in rows) / 2,
        by_chance=sum(math.sqrt(2 * r.served_share * (1 - r.served_share) / (math.pi * draws)) for r in rows) / 2,
        effective_served=_effective_number([row.served_share for row in rows]),
        effective_trained=_effective_number([row.trained_share for row in rows]),
        groups=rows,
    )


def _effective_number(shares: Sequence[float]) -> float:
    squares = sum(share * share for share in shares)
    return 1 / squares if squares else 0.0
