# pyright: basic
# Reason: drives the Megatron engine, whose optimizer is untyped.
"""A training step: one optimizer update on one batch, or several, each on a part of its own; or none, with the reason.

Every rank holds the same batch and runs the same step. What is decided is decided by global numbers, alike on all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from clawstream.errors import StepInterrupted
from services.trainer.backward_pass import BackwardPass
from services.trainer.engine.optimizer import ParallelAdamW
from services.trainer.guards.bounds import Breach, breaches
from services.trainer.guards.controls import StepControls
from services.trainer.metrics import StepMeasurements
from services.trainer.sample import StepResult, TrainingSample, UnchangedReason
from services.trainer.step_plan import MicroBatch, PartPlan, consecutive_parts, plan_part
from services.trainer.token_batches import PolicyOutputs


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What became of one part of a batch."""

    reason: UnchangedReason | None
    """Why nothing changed; None when something did."""
    measurements: StepMeasurements
    gradient_norm: float = 0.0
    culprits: tuple[str, ...] = ()
    """Samples to blame for `non_finite`."""
    offenders: dict[int, Breach] = field(default_factory=dict[int, Breach])
    """By place: samples that must be left out before the part can be trained."""
    held: tuple[Breach, ...] = ()
    """Why a guard allows no update."""


@dataclass(frozen=True, slots=True)
class TrainStep:
    """See the module's docstring."""

    gradients: BackwardPass
    """Of the model that is trained."""
    optimizer: ParallelAdamW
    """Of the same model."""
    tokens_per_micro_batch: int
    updates_per_batch: int
    """Into so many parts a batch is cut. All are bounded against the policy at the start of the batch."""

    def run(self, batch: Sequence[TrainingSample], learning_rate: float, controls: StepControls) -> StepResult:
        """Trains on `batch`, which is not empty. A collective of all ranks.

        Samples that `controls` drop take no part, as if they had not been there. Where it holds a part of the batch,
        that part and those after it make no update. Raises ValueError for dropping with several updates per batch, and
        StepInterrupted, with everything as it was, when the process is to end; not after the first update.
        """
        if controls.drop and self.updates_per_batch > 1:
            raise ValueError("samples can be dropped by what a step measures only with one update per batch")
        plans, updates_before = self._plans(batch), self.optimizer.num_updates
        proximal = self.gradients.proximal(batch, plans)
        total = self.gradients.new_measurements(batch)
        outcomes: list[_Outcome] = []
        dropped: dict[str, Breach] = {}
        for plan in plans:
            may_be_given_up = self.optimizer.num_updates == updates_before
            outcome = self._update(batch, plan, proximal, learning_rate, controls, may_be_given_up)
            if outcome.offenders:
                dropped = {batch[place].sample_id: breach for place, breach in outcome.offenders.items()}
                batch = [each if index not in outcome.offenders else each.masked() for index, each in enumerate(batch)]
                (plan_of_rest,) = self._plans(batch)
                proximal = self.gradients.proximal(batch, [plan_of_rest])
                outcome = self._update(
                    batch, plan_of_rest, proximal, learning_rate, replace(controls, drop=()), may_be_given_up
                )
            if outcome.reason is not UnchangedReason.NON_FINITE or len(plans) == 1:
                total.merge(outcome.measurements)
            outcomes.append(outcome)
            if outcome.reason is UnchangedReason.HELD:
                break
        changed = any(outcome.reason is None for outcome in outcomes)
        return StepResult(
            changed=changed,
            unchanged_reason=None if changed else outcomes[0].reason,
            metrics=total.metrics()
            | {
                "gradient_norm": max(outcome.gradient_norm for outcome in outcomes),
                "learning_rate": learning_rate,
                "num_updates": float(self.optimizer.num_updates),
                "num_samples": float(len(batch) - len(dropped)),
            }
            | _evidence(batch),
            samples=dict(zip((sample.sample_id for sample in batch), total.sample_statistics(), strict=True)),
            non_finite_samples=tuple(culprit for outcome in outcomes for culprit in outcome.culprits),
            dropped=dropped,
            held=outcomes[-1].held,
        )

    def _plans(self, batch: Sequence[TrainingSample]) -> list[PartPlan]:
        return [
            plan_part(batch, part, self.gradients.algorithm, self.tokens_per_micro_batch, self.gradients.layout)
            for part in consecutive_parts(len(batch), self.updates_per_batch)
        ]

    def _update(
        self,
        batch: Sequence[TrainingSample],
        plan: PartPlan,
        proximal: dict[MicroBatch, PolicyOutputs],
        learning_rate: float,
        controls: StepControls,
        may_be_given_up: bool,
    ) -> _Outcome:
        """One part of the batch."""
        self.optimizer.discard_gradients()
        measurements = self.gradients.new_measurements(batch)
        if plan.reason is not None:
            return _Outcome(plan.reason, measurements, culprits=tuple(plan.culprits))

        def accumulate(micro_batch: MicroBatch) -> None:
            self.gradients.accumulate(batch, micro_batch, plan, proximal.get(micro_batch), measurements)

        if may_be_given_up:
            try:
                self.gradients.interruption.each(plan.micro_batches, accumulate)
            except StepInterrupted:
                self.optimizer.discard_gradients()
                raise
        else:
            for micro_batch in plan.micro_batches:
                accumulate(micro_batch)
        measurements.combine(self.gradients.layout)
        if controls.drop:
            statistics = measurements.sample_statistics()
            offenders = controls.offenders([statistic.measurements for statistic in statistics])
            if offenders:
                self.optimizer.discard_gradients()
                return _Outcome(UnchangedReason.HELD, measurements, offenders=offenders)
        gradient_norm = self.optimizer.reduce_gradients()
        if not np.isfinite(gradient_norm) or not np.isfinite(measurements.loss):
            self.optimizer.discard_gradients()
            culprits = [
                sample.sample_id
                for sample, statistic in zip(batch, measurements.sample_statistics(), strict=True)
                if not np.isfinite(statistic.loss)
            ]
            return _Outcome(UnchangedReason.NON_FINITE, measurements, culprits=tuple(culprits))
        if gradient_norm == 0.0:
            self.optimizer.discard_gradients()
            return _Outcome(UnchangedReason.ZERO_GRADIENT, measurements)
        held = breaches(controls.hold, measurements.metrics()) if controls.hold else []
        if held:
            self.optimizer.discard_gradients()
            return _Outcome(UnchangedReason.HELD, measurements, gradient_norm, held=tuple(held))
        self.optimizer.step(learning_rate, gradient_norm)
        return _Outcome(None, measurements, gradient_norm)


def _evidence(batch: Sequence[TrainingSample]) -> dict[str, float]:
    """The batch's rewards and teachers in numbers."""
    rewarded = [sample for sample in batch if sample.rl_mask.any()]
    rewards = np.asarray([sample.reward for sample in rewarded] or [0.0])
    advantages = np.asarray([sample.rl_advantage for sample in rewarded] or [0.0])
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "nonzero_reward_share": float((rewards != 0).mean()),
        "nonzero_advantage_share": float((advantages != 0).mean()),
        "num_rl_samples": float(len(rewarded)),
        "num_opd_samples": float(sum(bool(sample.opd_mask.any()) for sample in batch)),
    }
