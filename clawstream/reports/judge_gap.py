"""The judge against held-out truth: is it rewarding what people want? Pure.

Explicit evidence (feedback, an environment's outcome, a verifier) is truth that the judge did not see. Where a turn has
both, its newest judged score and its newest explicit one make a pair:

    agreement     share of pairs with the same verdict;   kappa = (agreement - chance) / (1 - chance)
    gap           mean of judge's reward - explicit reward, with its standard error: above 0 the judge is too kind
    false praise  judge +1 where people say -1;   false blame  the reverse

An evaluation on held-out questions is truth about a version: there the judge's mean reward of the answers that the
version gave in conversation stands beside twice the share of satisfied held-out askers minus 1. When the judge's goes
up and the other does not, the policy learns to please the judge.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

from schemas.events import Event, ScoreEvent, TurnEvent

VERDICTS = (1, 0, -1)
Order = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One score, in short."""

    order: Order
    """Promotion epoch and offset of the next state: the highest is the newest."""
    verdict: int
    reward: float
    judge_spec_hash: str


@dataclass(frozen=True, slots=True)
class GapReport:
    """The comparison under one judge spec, or under all."""

    judge_spec_hash: str
    """`all` for all."""
    judged: int
    """Turns that the judge scored."""
    judge_reward: float | None
    """Its mean reward over all of them."""
    pairs: int
    """Turns with explicit evidence too."""
    agreement: float | None
    kappa: float | None
    """None where chance alone would agree always."""
    judge_reward_of_pairs: float | None
    explicit_reward: float | None
    gap: float | None
    gap_standard_error: float | None
    false_praise: int
    false_blame: int
    confusion: dict[str, int]
    """`judge/explicit` verdicts to pairs, for example `+1/-1`."""


@dataclass(frozen=True, slots=True)
class VersionGap:
    """A weight version in conversation and under held-out questions."""

    name: str
    """As the evaluation calls it."""
    weight_version: int | None
    """None where the name does not end in a number and is not `control`."""
    judged: int
    judge_reward: float | None
    held_out_reward: float | None
    """2 * satisfied - 1."""
    correct: float | None
    """Share of held-out answers that hold the fact."""

    @property
    def gap(self) -> float | None:
        """Judge minus held-out truth."""
        if self.judge_reward is None or self.held_out_reward is None:
            return None
        return self.judge_reward - self.held_out_reward


@dataclass(frozen=True, slots=True)
class JudgeReport:
    """See the module's docstring."""

    overall: GapReport
    by_spec: list[GapReport]
    failed: int
    """Scores without a verdict: too few valid votes."""
    versions: list[VersionGap]
    """Only with an evaluation."""

    @property
    def headline(self) -> str:
        """The answer in one sentence."""
        whole = self.overall
        if whole.gap is None or whole.agreement is None:
            return f"{whole.judged} judged turns, none with explicit evidence: nothing says whether the judge is right"
        words = f"the judge agrees with explicit evidence on {whole.agreement:.0%} of {whole.pairs} turns"
        error = whole.gap_standard_error
        if error is None:
            return f"{words}; one pair says nothing about a bias"
        if abs(whole.gap) > 2 * error:
            return f"{words} and is too {'kind' if whole.gap > 0 else 'strict'} by {abs(whole.gap):.2f} +- {error:.2f}"
        return f"{words}; its bias of {whole.gap:+.2f} +- {error:.2f} is not distinguishable from none"


@dataclass(slots=True)
class JudgeFold:
    """Takes in scores, and turns where versions are to be told apart, in any order."""

    judged: dict[str, Verdict] = field(default_factory=dict[str, Verdict])
    """By turn."""
    explicit: dict[str, Verdict] = field(default_factory=dict[str, Verdict])
    version_of_turn: dict[str, int] = field(default_factory=dict[str, int])
    failed: int = 0

    def apply(self, event: Event) -> None:
        """Takes in an event; others than scores and turns are passed over."""
        if isinstance(event, TurnEvent) and event.version_spans:
            self.version_of_turn[event.turn_id] = min(span.weight_version for span in event.version_spans)
        if not isinstance(event, ScoreEvent):
            return
        if event.verdict is None or event.reward is None:
            self.failed += 1
            return
        order = (event.promotion_epoch, event.next_state_ref.offset)
        known = self.explicit if event.explicit else self.judged
        before = known.get(event.turn_id)
        if before is None or order >= before.order:
            known[event.turn_id] = Verdict(order, event.verdict, event.reward, event.judge_spec_hash)

    def report(self, evaluation: Mapping[str, Mapping[str, float | None]] | None = None) -> JudgeReport:
        """The comparison; `evaluation` is version name to `satisfied` and `correct`."""
        specs = sorted({verdict.judge_spec_hash for verdict in self.judged.values()})
        return JudgeReport(
            overall=_gap("all", self.judged, self.explicit),
            by_spec=[
                _gap(spec, {t: v for t, v in self.judged.items() if v.judge_spec_hash == spec}, self.explicit)
                for spec in specs
            ],
            failed=self.failed,
            versions=[self._version(name, truth) for name, truth in (evaluation or {}).items()],
        )

    def _version(self, name: str, truth: Mapping[str, float | None]) -> VersionGap:
        number = version_number(name)
        rewards = [v.reward for turn, v in self.judged.items() if self.version_of_turn.get(turn, -1) == number]
        satisfied = truth.get("satisfied")
        return VersionGap(
            name=name,
            weight_version=number,
            judged=len(rewards),
            judge_reward=fmean(rewards) if rewards else None,
            held_out_reward=None if satisfied is None else 2 * satisfied - 1,
            correct=truth.get("correct"),
        )


def judge_gap(
    events: Iterable[Event], evaluation: Mapping[str, Mapping[str, float | None]] | None = None
) -> JudgeReport:
    """The report over `events`."""
    fold = JudgeFold()
    for event in events:
        fold.apply(event)
    return fold.report(evaluation)


def version_number(name: str) -> int | None:
    """`v12`, `policy-12`, `weights/12` are version 12; `control` is the base model, version 0."""
    if name == "control":
        return 0
    found = re.search(r"(\d+)$", name)
    return int(found[1]) if found is not None else None


def _gap(spec: str, judged: Mapping[str, Verdict], explicit: Mapping[str, Verdict]) -> GapReport:
    pairs = [(verdict, explicit[turn]) for turn, verdict in judged.items() if turn in explicit]
    confusion = Counter(f"{judge.verdict:+d}/{truth.verdict:+d}" for judge, truth in pairs)
    differences = [judge.reward - truth.reward for judge, truth in pairs]
    return GapReport(
        judge_spec_hash=spec,
        judged=len(judged),
        judge_reward=_mean([verdict.reward for verdict in judged.values()]),
        pairs=len(pairs),
        agreement=_mean([float(judge.verdict == truth.verdict) for judge, truth in pairs]),
        kappa=_kappa([(judge.verdict, truth.verdict) for judge, truth in pairs]),
        judge_reward_of_pairs=_mean([judge.reward for judge, _ in pairs]),
        explicit_reward=_mean([truth.reward for _, truth in pairs]),
        gap=_mean(differences),
        gap_standard_error=stdev(differences) / math.sqrt(len(pairs)) if len(pairs) > 1 else None,
        false_praise=sum(judge.verdict == 1 and truth.verdict == -1 for judge, truth in pairs),
        false_blame=sum(judge.verdict == -1 and truth.verdict == 1 for judge, truth in pairs),
        confusion=dict(sorted(confusion.items())),
    )


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _kappa(pairs: Sequence[tuple[int, int]]) -> float | None:
    """Cohen's kappa: agreement beyond that of two who know only how often each verdict is given."""
    if not pairs:
        return None
    count = len(pairs)
    ours, theirs = Counter(judge for judge, _ in pairs), Counter(truth for _, truth in pairs)
    chance = sum(ours[verdict] * theirs[verdict] for verdict in VERDICTS) / count**2
    agreement = sum(judge == truth for judge, truth in pairs) / count
    return (agreement - chance) / (1 - chance) if chance < 1 else None
