"""Settings of the guards."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

from pydantic import Field, model_validator

from clawstream.settings import Section
from services.trainer.algorithms.options import AggregationOptions, RatioMode, RatioOptions
from services.trainer.guards import effective_samples, exploration, shift, signal
from services.trainer.guards.bounds import Bound
from services.trainer.guards.knobs import Knob, KnobRules


class GuardPolicy(StrEnum):
    """What follows when a measurement is beyond its limit. Each includes saying so."""

    ALERT = "alert"
    """A line in the log, a metric, an entry in the step's event."""
    ADAPT = "adapt"
    """A knob moves one step for the next batch, and goes back while all is well."""
    HOLD = "hold"
    """No update from this batch."""
    DROP = "drop"
    """The samples to blame take no part."""


class ExplorationGuard(Section):
    """Does the policy still try different things?"""

    policy: GuardPolicy = GuardPolicy.ALERT
    """What follows."""
    adapts: Literal[Knob.ENTROPY_COEFFICIENT, Knob.LEARNING_RATE, Knob.KL_COEFFICIENT] = Knob.ENTROPY_COEFFICIENT
    """What `adapt` turns."""
    min_entropy_nats: float | None = Field(default=0.05, ge=0)
    """Smallest mean entropy per token; with `drop`, of a sample. Null is off."""
    max_entropy_nats: float | None = Field(default=None, gt=0)
    """Largest; null is off."""
    min_answer_diversity: float | None = Field(default=0.05, ge=0, le=1)
    """Smallest share of distinct bigrams; with `drop`, answers given before in the batch are dropped while it is
    lower. Null is off."""

    @property
    def bounds(self) -> tuple[Bound, ...]:
        """The limits that are set."""
        return exploration.bounds(self.min_entropy_nats, self.max_entropy_nats, self.min_answer_diversity)


class SignalGuard(Section):
    """Does the evidence distinguish good answers from bad ones?"""

    policy: GuardPolicy = GuardPolicy.ALERT
    """What follows; `adapt` lowers the learning rate. Samples without signal are dropped in any case."""
    min_signal_share: float | None = Field(default=0.1, ge=0, le=1)
    """Smallest share of samples that teach something among those that were read. Null is off."""
    min_advantage_variance: float | None = Field(default=None, ge=0)
    """Smallest variance of a batch's advantages; null is off: a batch of nothing but complaints does teach."""

    @property
    def bounds(self) -> tuple[Bound, ...]:
        """The limits that are set."""
        return signal.bounds(self.min_signal_share, self.min_advantage_variance)


class ShiftGuard(Section):
    """Was the batch sampled by nearly the policy that learns from it?"""

    policy: GuardPolicy = GuardPolicy.ALERT
    """What follows."""
    adapts: Literal[Knob.LEARNING_RATE, Knob.KL_COEFFICIENT] = Knob.LEARNING_RATE
    """What `adapt` turns."""
    max_age_versions: float | None = Field(default=None, ge=0)
    """Largest mean age of a batch; with `drop`, of a sample. Below the trainer's `max_age_versions`. Null is off."""
    max_shift_nats: float | None = Field(default=0.5, gt=0)
    """Largest mean |l_prox - mu| per token; with `drop`, of a sample. Null is off."""
    min_effective_sample_share: float | None = Field(default=0.3, ge=0, le=1)
    """Smallest effective sample size over the number of tokens. Not with `drop`: no single sample is to blame. Null is
    off."""
    max_clipped_share: float | None = Field(default=None, ge=0, lt=1)
    """Largest share of clipped tokens; with `drop`, of a sample. Null is off."""

    @property
    def bounds(self) -> tuple[Bound, ...]:
        """The limits that are set."""
        return shift.bounds(
            self.max_age_versions, self.max_shift_nats, self.min_effective_sample_share, self.max_clipped_share
        )


class EffectiveSamplesGuard(Section):
    """Is a batch large enough to mean something?"""

    policy: GuardPolicy = GuardPolicy.ALERT
    """What follows; `adapt` lowers the learning rate."""
    min_samples: int | None = Field(default=None, ge=1)
    """Smallest number of samples that teach something; null is off: a batch of one does teach."""

    @property
    def bounds(self) -> tuple[Bound, ...]:
        """The limits that are set."""
        return effective_samples.bounds(self.min_samples)


class KnobSection(Section):
    """How far and how fast something may be turned; formulas in `services.trainer.guards.knobs`."""

    low: float = Field(ge=0)
    """Smallest value."""
    high: float = Field(gt=0)
    """Largest value."""
    step: float = Field(default=1.5, gt=1)
    """Factor of one step."""
    decay: float = Field(default=0.9, ge=0, lt=1)
    """Share of the distance from the configured value that is left after a good step."""
    first_raise: float = Field(default=0.0, ge=0)
    """What a raise from 0 gives."""

    @model_validator(mode="after")
    def _limits_agree(self) -> "KnobSection":
        if self.low >= self.high:
            raise ValueError(f"low={self.low} must be below high={self.high}")
        if self.first_raise > self.high:
            raise ValueError(f"first_raise={self.first_raise} is above high={self.high}")
        return self


class GuardsSection(Section):
    """The four guards, and what they may turn."""

    exploration: ExplorationGuard = ExplorationGuard()
    """Entropy and diversity of answers."""
    signal: SignalGuard = SignalGuard()
    """Share of samples that teach something, variance of advantages."""
    shift: ShiftGuard = ShiftGuard()
    """Age, shift, effective sample size, clip share."""
    effective_samples: EffectiveSamplesGuard = EffectiveSamplesGuard()
    """Size of a batch."""
    entropy_coefficient: KnobSection = KnobSection(low=0.0, high=0.01, first_raise=0.0005)
    """Limits of the loss's `entropy_coefficient`."""
    learning_rate: KnobSection = KnobSection(low=0.1, high=1.0, step=2.0)
    """Limits of the factor on the scheduled learning rate."""
    kl_coefficient: KnobSection = KnobSection(low=0.0, high=0.1, first_raise=0.001)
    """Limits of the loss's `kl_coefficient`."""

    @property
    def adapting(self) -> dict[str, Knob]:
        """Guards of policy `adapt` to what they turn."""
        turned = {
            exploration.GUARD: (self.exploration.policy, self.exploration.adapts),
            signal.GUARD: (self.signal.policy, Knob.LEARNING_RATE),
            shift.GUARD: (self.shift.policy, self.shift.adapts),
            effective_samples.GUARD: (self.effective_samples.policy, Knob.LEARNING_RATE),
        }
        return {guard: knob for guard, (policy, knob) in turned.items() if policy is GuardPolicy.ADAPT}

    @property
    def policies(self) -> dict[str, tuple[GuardPolicy, tuple[Bound, ...]]]:
        """Guard to policy and limits."""
        return {
            exploration.GUARD: (self.exploration.policy, self.exploration.bounds),
            signal.GUARD: (self.signal.policy, self.signal.bounds),
            shift.GUARD: (self.shift.policy, self.shift.bounds),
            effective_samples.GUARD: (self.effective_samples.policy, self.effective_samples.bounds),
        }

    def knob_section(self, knob: Knob) -> KnobSection:
        """Limits of `knob`."""
        return {
            Knob.ENTROPY_COEFFICIENT: self.entropy_coefficient,
            Knob.LEARNING_RATE: self.learning_rate,
            Knob.KL_COEFFICIENT: self.kl_coefficient,
        }[knob]

    def knob_rules(self, options: Mapping[str, object]) -> dict[Knob, KnobRules]:
        """What may be turned, and how far; `options` are the loss's as configured."""
        rules: dict[Knob, KnobRules] = {}
        for knob in dict.fromkeys(self.adapting.values()):
            section = self.knob_section(knob)
            configured = 1.0 if knob is Knob.LEARNING_RATE else float(str(options.get(knob.value, 0.0)))
            rules[knob] = KnobRules(
                configured, section.low, section.high, section.step, section.decay, section.first_raise
            )
        return rules

    @model_validator(mode="after")
    def _limits_agree(self) -> "GuardsSection":
        mistakes = [
            f"{guard}.policy={policy.value} without any limit: it could never act"
            for guard, (policy, bounds) in self.policies.items()
            if policy is not GuardPolicy.ALERT and not bounds
        ]
        low, high = self.exploration.min_entropy_nats, self.exploration.max_entropy_nats
        if low is not None and high is not None and low >= high:
            mistakes.append(f"exploration.min_entropy_nats={low} must be below max_entropy_nats={high}")
        mistakes += [
            f"{guard}.policy=drop: no single sample is to blame; use alert, adapt or hold"
            for guard in (signal.GUARD, effective_samples.GUARD)
            if self.policies[guard][0] is GuardPolicy.DROP
        ]
        is_set = "min_effective_sample_share" in self.shift.model_fields_set
        if self.shift.policy is GuardPolicy.DROP and is_set and self.shift.min_effective_sample_share is not None:
            mistakes.append(
                "shift.min_effective_sample_share with policy=drop: no single sample is to blame; leave it out"
            )
        for knob, rules in self.knob_rules({}).items():
            if knob is not Knob.LEARNING_RATE and rules.first_raise == 0 and rules.configured == 0:
                mistakes.append(f"{knob.value}.first_raise=0: a factor never moves a coefficient of 0")
        if mistakes:
            raise ValueError("; ".join(mistakes))
        return self


def contradictions(
    guards: GuardsSection,
    *,
    batch_size: int,
    max_age_versions: int | None,
    updates_per_batch: int,
    options: AggregationOptions | None,
    given_options: Mapping[str, object],
) -> list[str]:
    """What of the guards disagrees with the rest of the trainer's settings. `options` is None for anyone's own loss."""
    mistakes: list[str] = []
    smallest = guards.effective_samples.min_samples
    if smallest is not None and smallest > batch_size:
        mistakes.append(
            f"effective_samples.min_samples={smallest} exceeds batch_size={batch_size}: no batch has so many"
        )
    oldest = guards.shift.max_age_versions
    if oldest is not None and max_age_versions is not None and oldest >= max_age_versions:
        mistakes.append(
            f"shift.max_age_versions={oldest} is not below max_age_versions={max_age_versions}, beyond which nothing "
            "is trained anyway: it could never act"
        )
    fresh = updates_per_batch == 1 and isinstance(options, RatioOptions) and options.ratio is not RatioMode.BEHAVIOUR
    if guards.shift.max_clipped_share is not None and fresh:
        mistakes.append(
            "shift.max_clipped_share with updates_per_batch=1: the ratio is 1 at the only update, nothing is clipped"
        )
    if updates_per_batch > 1 and controls_drop(guards):
        mistakes.append(
            f"policy=drop by entropy, shift or clipping with updates_per_batch={updates_per_batch}: a sample is "
            "measured in its own part's update, when others were trained; use one update, or another policy"
        )
    for knob, rules in guards.knob_rules(given_options).items():
        if not rules.low <= rules.configured <= rules.high:
            mistakes.append(
                f"{knob.value}: the configured {rules.configured} is outside {rules.low}..{rules.high}, the limits of "
                "what guards may turn it to"
            )
    proximal = options is not None and options.kl_reference == "proximal"
    if Knob.KL_COEFFICIENT in guards.adapting.values() and proximal and updates_per_batch == 1:
        mistakes.append(
            "a guard adapts kl_coefficient, but with kl_reference=proximal and updates_per_batch=1 that divergence is 0"
        )
    return mistakes


def controls_drop(guards: GuardsSection) -> tuple[Bound, ...]:
    """Limits of single samples that are known only in the step."""
    in_step = {exploration.ENTROPY, shift.SHIFT, shift.CLIPPED}
    return tuple(
        bound
        for policy, bounds in guards.policies.values()
        if policy is GuardPolicy.DROP
        for bound in bounds
        if bound.measurement in in_step
    )


def controls_hold(guards: GuardsSection) -> tuple[Bound, ...]:
    """Limits beyond which a step changes nothing."""
    return tuple(bound for policy, bounds in guards.policies.values() if policy is GuardPolicy.HOLD for bound in bounds)
