"""RMSNorm against fp64 arithmetic."""

import pytest
import torch

from services.engine.norm import rms_norm


@pytest.mark.parametrize("shape", [(5, 576), (3, 4, 24)])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_the_norm_divides_by_the_root_of_the_mean_square(shape: tuple[int, ...], size: float) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(shape, generator=generator) * size
    weight = torch.randn(shape[-1], generator=generator)
    before = x.clone()
    epsilon = 1e-5
    wide = x.double()
    expected = wide / (wide.square().mean(dim=-1, keepdim=True) + epsilon).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, torch.tensor(epsilon)).double(), expected, rtol=2e-6, atol=1e-7)
    assert torch.equal(x, before)


def test_the_mean_of_bf16_numbers_is_taken_in_fp32() -> None:
    x = torch.full((1, 4096), 1.0, dtype=torch.bfloat16)  # a bf16 sum of ones stops at 256
    normed = rms_norm(x, torch.ones(4096, dtype=torch.bfloat16), torch.tensor(0.0))
    assert normed.dtype == torch.bfloat16
    assert torch.equal(normed, x)
