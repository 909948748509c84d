"""AdamW, clipping and the learning rate against the formulas in NumPy."""

import numpy as np
import pytest
import torch

from services.trainer.engine.optimizer import OptimizerSettings, ParallelAdamW
from services.trainer.engine.parallel import ParallelLayout
from services.trainer.learning_rate import LearningRateSchedule

SETTINGS = OptimizerSettings(weight_decay=0.1, max_gradient_norm=1.0)


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = {
        "matrix": torch.nn.Parameter(torch.randn(4, 3, generator=generator).to(dtype)),
        "norm": torch.nn.Parameter(torch.randn(5, generator=generator).to(dtype)),
    }
    for parameter in made.values():
        parameter.tensor_model_parallel = False  # type: ignore[attr-defined] # Megatron's mark
    return made


def reference_updates(start: np.ndarray, gradients: list[np.ndarray], rate: float, decay: float) -> np.ndarray:
    theta, mean, square = start.astype(np.float64), 0.0, 0.0
    for number, gradient in enumerate(gradients, start=1):
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.98 * square + 0.02 * gradient**2
        update = (mean / (1 - 0.9**number)) / (np.sqrt(square / (1 - 0.98**number)) + 1e-8)
        theta = theta - rate * (update + decay * theta)
    return theta


def test_updates_equal_adamw_with_clipping_and_decay_of_matrices_only(layout: ParallelLayout) -> None:
    made = parameters()
    start = {name: parameter.detach().numpy().copy() for name, parameter in made.items()}
    optimizer = ParallelAdamW(made, layout, SETTINGS)
    random = np.random.default_rng(0)
    clipped: dict[str, list[np.ndarray]] = {"matrix": [], "norm": []}
    for scale in (0.01, 10.0, 1.0):
        raw = {name: (scale * random.normal(size=value.shape)).astype(np.float32) for name, value in start.items()}
        norm = float(np.sqrt(sum((gradient.astype(np.float64) ** 2).sum() for gradient in raw.values())))
        for name, gradient in raw.items():
            optimizer.gradient(name).copy_(torch.tensor(gradient))
            clipped[name].append(gradient * min(1.0, 1.0 / norm))
        measured = optimizer.reduce_gradients()
        assert measured == pytest.approx(norm, rel=1e-6)
        optimizer.step(0.01, measured)
    for name, decay in (("matrix", 0.1), ("norm", 0.0)):
        expected = reference_updates(start[name], clipped[name], 0.01, decay)
        np.testing.assert_allclose(made[name].detach().numpy(), expected, rtol=2e-5, atol=2e-6)


def test_bf16_parameters_keep_small_updates_in_fp32(layout: ParallelLayout) -> None:
    made = parameters(torch.bfloat16)
    optimizer = ParallelAdamW(made, layout, SETTINGS)
    before = optimizer.main_parameters["matrix"].clone()
    for _ in range(3):
        (made["matrix"].float().sum() + made["norm"].float().sum()).backward()
        optimizer.step(1e-6, optimizer.reduce_gradients())
    assert not torch.equal(optimizer.main_parameters["matrix"], before)
    assert torch.equal(made["matrix"], optimizer.main_parameters["matrix"].bfloat16())


def test_gradients_of_micro_batches_accumulate_in_fp32(layout: ParallelLayout) -> None:
    made = parameters(torch.bfloat16)
    optimizer = ParallelAdamW(made, layout, SETTINGS)
    for scale in (256.0, 1.0):  # 256 + 1 is not a bf16 number
        (scale * made["norm"]).sum().backward()
    assert optimizer.gradient("norm").tolist() == [257.0] * 5


def test_updates_too_small_for_bf16_add_up_in_fp32(layout: ParallelLayout) -> None:
    """Near 1 bf16's step is 1/128 upward and 1/256 downward: without fp32 beside, a tenth of that is lost each time."""
    made = {"norm": torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))}
    made["norm"].tensor_model_parallel = False  # type: ignore[attr-defined] # Megatron's mark
    optimizer = ParallelAdamW(made, layout, SETTINGS)
    rate, gradients = 0.1 / 256, []
    seen = []
    for _ in range(30):
        optimizer.gradient("norm").fill_(0.25)
        gradients.append(np.full(5, 0.25))
        optimizer.step(rate, optimizer.reduce_gradients())
        seen.append(made["norm"].detach().tolist()[0])
    assert float((torch.ones(1).bfloat16() - rate)[0]) == 1.0, "in bf16 alone nothing would ever move"
    assert seen[0] == 1.0
    expected = reference_updates(np.ones(5), gradients, rate, decay=0.0)
    np.testing.assert_allclose(optimizer.main_parameters["norm"].numpy(), expected, rtol=1e-6)
    assert expected[0] < 0.99
    assert made["norm"].tolist() == torch.tensor(expected).float().bfloat16().tolist()


def test_a_constant_rate_after_a_linear_warmup() -> None:
    schedule = LearningRateSchedule(peak=1.0, warmup_updates=4)
    assert [schedule.at(updates) for updates in (0, 1, 3, 4, 100)] == [0.25, 0.5, 1.0, 1.0, 1.0]


def test_a_cosine_ends_at_its_final_share() -> None:
    schedule = LearningRateSchedule(peak=2.0, shape="cosine", warmup_updates=10, decay_updates=100, final_share=0.1)
    assert schedule.at(10) == pytest.approx(2.0)
    assert schedule.at(60) == pytest.approx(2.0 * 0.55)
    assert schedule.at(110) == schedule.at(10_000) == pytest.approx(0.2)
