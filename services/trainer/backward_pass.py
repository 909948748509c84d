# pyright: basic
# Reason: drives the Megatron engine, whose tensors are untyped.
"""Loss and gradients of micro-batches: forward, the algorithm's loss, backward. Gradients add up in the model.

Losses are divided by global counts before, so how a batch is cut into micro-batches and spread over ranks changes
nothing but rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from services.trainer.algorithms.base import Algorithm
from services.trainer.engine import cpu_platform
from services.trainer.engine.model import PolicyModel
from services.trainer.engine.parallel import ParallelLayout
from services.trainer.forward_pass import forward_pass
from services.trainer.interruption import Interruption
from services.trainer.metrics import StepMeasurements
from services.trainer.sample import TrainingSample
from services.trainer.step_plan import MicroBatch, PartPlan
from services.trainer.token_batches import PolicyOutputs, token_batch


@dataclass(frozen=True, slots=True)
class BackwardPass:
    """See the module's docstring. Every rank of a tensor-parallel group makes the same passes in the same order."""

    model: PolicyModel
    """What is trained."""
    reference: PolicyModel | None
    """The base model, where the algorithm may need it; the policy itself where only adapters are trained."""
    layout: ParallelLayout
    algorithm: Algorithm
    """Its loss."""
    interruption: Interruption
    """May give up what is computed."""

    def new_measurements(self, batch: Sequence[TrainingSample]) -> StepMeasurements:
        """Nothing measured yet."""
        return StepMeasurements(len(batch), self.algorithm.components, cpu_platform.device())

    @torch.no_grad()
    def proximal(self, batch: Sequence[TrainingSample], plans: Sequence[PartPlan]) -> dict[MicroBatch, PolicyOutputs]:
        """The policy at the start of the batch, where it cannot be read off the first forward pass.

        Raises StepInterrupted. A collective of all ranks.
        """
        if len(plans) == 1 and not self.algorithm.needs.recomputed_proximal:
            return {}
        micro_batches = [each for plan in plans for each in plan.micro_batches]

        def outputs(micro_batch: MicroBatch) -> PolicyOutputs:
            samples = [batch[index] for index in micro_batch]
            return forward_pass(self.model, samples, self.layout, self.algorithm.needs)[0]

        return dict(zip(micro_batches, self.interruption.each(micro_batches, outputs), strict=True))

    def accumulate(
        self,
        batch: Sequence[TrainingSample],
        micro_batch: MicroBatch,
        plan: PartPlan,
        proximal: PolicyOutputs | None,
        measurements: StepMeasurements,
    ) -> None:
        """Adds the gradients of one micro-batch of `plan` to the model's, and what it measures to `measurements`.

        Without `proximal` the policy at the start of the batch is the current one.
        """
        samples = [batch[index] for index in micro_batch]
        outputs, row = forward_pass(self.model, samples, self.layout, self.algorithm.needs)
        tokens = token_batch(samples, outputs, proximal or outputs.constant(), self.algorithm.needs)
        if self.reference is not None and self.algorithm.needs.reference:
            with torch.no_grad(), self.reference.without_adapters():
                reference = forward_pass(self.reference, samples, self.layout)[0]
            tokens = replace(tokens, reference_log_probs=reference.log_probs)
        place = torch.as_tensor(micro_batch, device=outputs.log_probs.device)  # [samples]
        weights = {name: each.to(place.device)[place - plan.first] for name, each in plan.weights.items()}
        loss = self.algorithm.loss(tokens, weights)
        loss.per_sample.sum().backward()
        measurements.add(place, tokens, loss, row.token_ids.size)
