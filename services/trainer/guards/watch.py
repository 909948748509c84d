"""The four guards over a run: what they measure of a batch, ask of its step, and make of the result.

Knobs are all the state there is. They move after a step by what it measured, in the same way whenever the same is
measured, so a run that restarts from a checkpoint, which holds them, goes on as if it had not ended.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from schemas.events.train_step import DroppedSample, DropReason, GuardAction
from services.trainer.ages import age
from services.trainer.batcher import ClosedBatch
from services.trainer.candidates import Candidate
from services.trainer.guards import effective_samples, exploration, shift, signal
from services.trainer.guards.bounds import Bound, Breach, breaches, is_measured
from services.trainer.guards.controls import StepControls
from services.trainer.guards.knobs import Direction, Knob, KnobRules, direction_of
from services.trainer.guards.settings import GuardPolicy, GuardsSection, controls_drop, controls_hold

DECAY = "decay"
"""The action of a knob that goes back."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """A batch before its step."""

    batch: ClosedBatch
    """Without the samples that were dropped."""
    dropped: list[DroppedSample]
    """Those."""
    measurements: dict[str, float]
    """Of what is left."""
    reasons: list[Breach]
    """Why the dropped ones were."""
    held: list[Breach]
    """Why no update may be made; empty when it may."""


@dataclass(slots=True)
class Guards:
    """See the module's docstring."""

    settings: GuardsSection
    rules: Mapping[Knob, KnobRules]
    """Of what guards of policy `adapt` turn."""
    knobs: dict[Knob, float] = field(default_factory=dict[Knob, float])
    """Present values."""

    @classmethod
    def restored(cls, settings: GuardsSection, options: Mapping[str, object], state: Mapping[str, float]) -> "Guards":
        """With the knobs of a checkpoint, as far as they are still turned, and within today's limits."""
        rules = settings.knob_rules(options)
        knobs = {knob: each.within(state.get(knob.value, each.configured)) for knob, each in rules.items()}
        return cls(settings, rules, knobs)

    @property
    def state(self) -> dict[str, float]:
        """For the checkpoint and the event."""
        return {knob.value: value for knob, value in self.knobs.items()}

    @property
    def learning_rate_factor(self) -> float:
        """Of the scheduled learning rate."""
        return self.knobs.get(Knob.LEARNING_RATE, 1.0)

    def inspect(self, batch: ClosedBatch, current_version: int) -> Inspection:
        """Drops what is to be dropped for what is known before the step, then measures and judges the rest."""
        blamed = self._blamed(batch.candidates, current_version)
        kept = [each for each in batch.candidates if each.sample.sample_id not in blamed]
        dropped = [
            guard_drop(each, blamed[each.sample.sample_id])
            for each in batch.candidates
            if each.sample.sample_id in blamed
        ]
        measurements = _measurements(replace(batch, candidates=kept), current_version)
        held = breaches(controls_hold(self.settings), measurements) if kept else []
        return Inspection(replace(batch, candidates=kept), dropped, measurements, list(blamed.values()), held)

    def controls(self) -> StepControls:
        """What the step is to heed."""
        coefficients = {knob.value: value for knob, value in self.knobs.items() if knob is not Knob.LEARNING_RATE}
        return StepControls(coefficients, controls_hold(self.settings), controls_drop(self.settings))

    def conclude(
        self, measurements: Mapping[str, float], *, dropped: Sequence[Breach] = (), held: Sequence[Breach] = ()
    ) -> list[GuardAction]:
        """Judges everything that a step measured, turns the knobs for the next one, and says what was done.

        `dropped` and `held` say what was dropped, and why there was no update.
        """
        actions = _drop_actions(dropped) + [_action(GuardPolicy.HOLD, breach) for breach in held]
        told = {breach.measurement for breach in held}
        wanted: dict[Knob, set[Direction]] = {}
        causes: dict[Knob, list[Breach]] = {}
        well: set[Knob] = set()
        for guard, (_, bounds) in self.settings.policies.items():
            found = breaches(bounds, measurements)
            knob = self.settings.adapting.get(guard)
            if knob is not None:
                if found:
                    wanted.setdefault(knob, set()).add(_direction(knob, found))
                    causes.setdefault(knob, []).extend(found)
                elif is_measured(bounds, measurements):
                    well.add(knob)
                continue
            actions += [_action(GuardPolicy.ALERT, breach) for breach in found if breach.measurement not in told]
        for knob in self.rules:
            before = self.knobs[knob]
            if len(directions := wanted.get(knob, set())) == 1:
                self.knobs[knob] = self.rules[knob].moved(before, next(iter(directions)))
            elif not directions and knob in well:
                self.knobs[knob] = self.rules[knob].decayed(before)
            after = self.knobs[knob]
            turned = {"knob": knob.value, "before": before, "after": after}
            for breach in causes.get(knob, []):
                actions.append(_action(GuardPolicy.ADAPT, breach).model_copy(update=turned))
            if not directions and after != before:
                owners = [guard for guard, turns in self.settings.adapting.items() if turns is knob]
                actions.append(GuardAction(guard=owners[0], action=DECAY, knob=knob.value, before=before, after=after))
        return actions

    def _blamed(self, candidates: Sequence[Candidate], current_version: int) -> dict[str, Breach]:
        """By sample id: what is to be dropped before the step."""
        blamed: dict[str, Breach] = {}
        section = self.settings
        if section.shift.policy is GuardPolicy.DROP and section.shift.max_age_versions is not None:
            bound = Bound(shift.GUARD, shift.AGE, high=section.shift.max_age_versions)
            for candidate in candidates:
                breach = bound.breach({shift.AGE: float(age(candidate.oldest_version, current_version))})
                if breach is not None:
                    blamed[candidate.sample.sample_id] = breach
        if section.exploration.policy is GuardPolicy.DROP:
            left = [candidate.sample for candidate in candidates if candidate.sample.sample_id not in blamed]
            answers = [sample.response_ids for sample in left]
            diversity = [bound for bound in section.exploration.bounds if bound.measurement == exploration.DIVERSITY]
            for breach in breaches(diversity, exploration.measure(answers)):
                blamed |= {left[place].sample_id: breach for place in exploration.repeated(answers)}
        return blamed


def guard_drop(candidate: Candidate, breach: Breach) -> DroppedSample:
    """A sample that a guard left out."""
    return DroppedSample(
        sample_id=candidate.sample.sample_id,
        turn_id=candidate.turn_id,
        ref=candidate.ref,
        reason=DropReason.GUARD,
        detail=f"{breach.guard}: {breach}",
    )


def _measurements(batch: ClosedBatch, current_version: int) -> dict[str, float]:
    samples = [candidate.sample for candidate in batch.candidates]
    num_neutral = sum(dropped.reason is DropReason.ZERO_ADVANTAGE for dropped in batch.drops)
    ages = [age(candidate.oldest_version, current_version) for candidate in batch.candidates]
    return {
        **exploration.measure([sample.response_ids for sample in samples]),
        **signal.measure(samples, num_neutral),
        **shift.measure(ages),
        **effective_samples.measure(samples),
    }


def _direction(knob: Knob, found: Sequence[Breach]) -> Direction:
    return direction_of(
        knob,
        exploration_is_low=any(breach.is_low for breach in found),
        exploration_is_high=any(not breach.is_low for breach in found),
    )


def _action(policy: GuardPolicy, breach: Breach) -> GuardAction:
    return GuardAction(
        guard=breach.guard,
        action=policy.value,
        measurement=breach.measurement,
        value=breach.value,
        limit=breach.limit,
    )


def _drop_actions(dropped: Sequence[Breach]) -> list[GuardAction]:
    """One per guard and measurement, with the worst value."""
    groups: dict[tuple[str, str], list[Breach]] = {}
    for breach in dropped:
        groups.setdefault((breach.guard, breach.measurement), []).append(breach)
    return [
        _action(GuardPolicy.DROP, max(group, key=lambda each: abs(each.value - each.limit))).model_copy(
            update={"samples": len(group)}
        )
        for group in groups.values()
    ]
