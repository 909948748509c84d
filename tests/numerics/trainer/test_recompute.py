"""Activation recompute: the same gradients from less memory."""

from collections.abc import Callable

import pytest
import torch

from services.trainer.engine.lora import LoraSettings
from services.trainer.engine.packed_attention import PackedSelfAttention
from services.trainer.policy import PolicyTrainer
from services.trainer.policy_models import ModelOptions
from tests.fixtures.training_samples import random_samples


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2, alpha=4.0)])
def test_gradients_are_the_same_and_layers_run_twice(
    lora: LoraSettings | None, new_policy: Callable[..., PolicyTrainer]
) -> None:
    moments: list[dict[str, torch.Tensor]] = []
    calls: list[int] = []
    for recompute in (False, True):
        policy = new_policy("qwen3", model_options=ModelOptions(recompute_activations=recompute, lora=lora))
        runs = 0

        def count(*_: object) -> None:
            nonlocal runs
            runs += 1

        for module in policy.model.network.modules():
            if isinstance(module, PackedSelfAttention):
                module.register_forward_pre_hook(count)
        policy.train_step(random_samples([1.0, -1.0, 1.0]), 1e-3)
        calls.append(runs)
        snapshot = policy.snapshot()
        assert snapshot is not None
        moments.append(snapshot.moments["exp_avg"])  # after one update, a tenth of the clipped gradient
    kept, recomputed = moments
    for name, gradient in kept.items():
        assert (gradient - recomputed[name]).abs().max() <= 1e-6, name
    assert any(gradient.abs().max() > 1e-3 for gradient in kept.values())
    assert calls == [2, 4], "two layers, and again in the backward pass"


def test_what_is_kept_for_the_backward_pass_is_much_less(new_policy: Callable[..., PolicyTrainer]) -> None:
    """Counted outside the layers: what torch saves there are the layers' inputs."""
    sizes: list[int] = []
    for recompute in (False, True):
        policy = new_policy("qwen3", model_options=ModelOptions(recompute_activations=recompute))
        saved = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal saved
            saved += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            policy.model.network.decoder(
                hidden_states=torch.randn(64, 1, 32, requires_grad=True),
                attention_mask=None,
                rotary_pos_emb=policy.model.network.rotary_pos_emb(64, packed_seq=True),
                packed_seq_params=_one_sequence(64),
            )
        sizes.append(saved)
    assert sizes[1] < sizes[0] / 5


def _one_sequence(length: int) -> object:
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds = torch.tensor([0, length], dtype=torch.int32)
    return PackedSeqParams("thd", bounds, bounds, max_seqlen_q=length, max_seqlen_kv=length)
