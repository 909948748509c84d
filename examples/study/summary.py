"""From results to numbers: means over seeds, differences to the control, and whether the expected shape is there. Pure.

The unit is the seed: of a mode with n seeds a number is the mean of n runs, and its error is the standard error of that
mean, s / sqrt(n). A difference to the control is taken within each seed, where both answered the same questions.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from examples.demo.evaluation import Measurement
from examples.study.results import RunResult

CONTROL = "control"
_LENGTHS_DIFFER = 0.9
"""A mode below this share of the control's length is called short."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One row of the table."""

    name: str
    label: str
    template: str
    difference_template: str
    value: Callable[[Measurement], float]


MEASURES = (
    Measure("reward", "held-out reward (-1 to 1)", "{:+.2f}", "{:+.2f}", lambda m: m.reward),
    Measure("correct", "fact correct", "{:.0%}", "{:+.0%}", lambda m: m.correct),
    Measure("satisfied", "user satisfied", "{:.0%}", "{:+.0%}", lambda m: m.satisfied),
    Measure("length_tokens", "length (tokens)", "{:.1f}", "{:+.1f}", lambda m: m.length_tokens),
    Measure("empty", "empty answers", "{:.0%}", "{:+.0%}", lambda m: m.empty),
    Measure("entropy_nats", "entropy (nats per token)", "{:.2f}", "{:+.2f}", lambda m: m.entropy_nats),
)


@dataclass(frozen=True, slots=True)
class SeedMean:
    """A mean over seeds."""

    mean: float
    standard_error: float | None
    """None with one seed."""
    by_seed: tuple[float, ...]

    @property
    def is_clear(self) -> bool:
        """Whether it differs from 0 by more than twice its error."""
        return self.standard_error is not None and abs(self.mean) > 2 * self.standard_error


@dataclass(frozen=True, slots=True)
class ModeSummary:
    """One mode, or the control."""

    name: str
    seeds: tuple[int, ...]
    values: dict[str, SeedMean]
    """By measure."""
    differences: dict[str, SeedMean]
    """To the control, within each seed. Empty for the control."""


def summarise(results: Iterable[RunResult], modes: Sequence[str]) -> list[ModeSummary]:
    """The control, then every mode that has a result, in the order of `modes`.

    The control's number of a seed is the mean over the modes: the frozen copy is asked anew in each run.
    """
    ordered = sorted(results, key=lambda result: result.run)
    if not ordered:
        return []
    seeds = tuple(dict.fromkeys(sorted(result.run.seed for result in ordered)))
    control = {
        measure.name: _mean(
            [fmean(measure.value(each.control) for each in ordered if each.run.seed == seed) for seed in seeds]
        )
        for measure in MEASURES
    }
    summaries = [ModeSummary(CONTROL, seeds, control, {})]
    for mode in modes:
        own = [result for result in ordered if result.run.mode == mode]
        if own:
            summaries.append(
                ModeSummary(
                    mode,
                    tuple(result.run.seed for result in own),
                    {m.name: _mean([m.value(each.policy) for each in own]) for m in MEASURES},
                    {m.name: _mean([m.value(each.policy) - m.value(each.control) for each in own]) for m in MEASURES},
                )
            )
    return summaries


def findings(summaries: Sequence[ModeSummary]) -> list[str]:
    """What the numbers say about the expectation, in sentences."""
    sentences: list[str] = []
    for mode in summaries[1:]:
        reward, correct = mode.differences["reward"], mode.differences["correct"]
        words = f"`{mode.name}`: reward {_told(reward, '{:+.2f}')}, correctness {_told(correct, '{:+.0%}')}"
        length = mode.values["length_tokens"].mean / max(1e-9, summaries[0].values["length_tokens"].mean)
        if length < _LENGTHS_DIFFER:
            words += f", answers {1 - length:.0%} shorter"
        sentences.append(f"{words} (against the control).")
    by_name = {mode.name: mode for mode in summaries}
    scalar = by_name.get("binary")
    for name in ("opd", "combine", "hybrid"):
        hinted = by_name.get(name)
        if scalar is None or hinted is None:
            continue
        shared = [seed for seed in scalar.seeds if seed in hinted.seeds]
        if not shared:
            continue
        difference = _mean(
            [
                hinted.values["correct"].by_seed[hinted.seeds.index(seed)]
                - scalar.values["correct"].by_seed[scalar.seeds.index(seed)]
                for seed in shared
            ]
        )
        sentences.append(f"`{name}` against `binary`: correctness {_told(difference, '{:+.0%}')} (within seeds).")
    return sentences


def _told(value: SeedMean, template: str) -> str:
    error = "one seed" if value.standard_error is None else f"+- {template.format(value.standard_error).lstrip('+')}"
    clear = "" if value.is_clear else ", not distinguishable from 0"
    return f"{template.format(value.mean)} [{error}{clear}]"


def _mean(values: Sequence[float]) -> SeedMean:
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return SeedMean(fmean(values), error, tuple(values))
