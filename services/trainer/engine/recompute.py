# pyright: basic
# Reason: a module of Megatron-Core's layer specification, which is untyped.
"""Activation recompute: a layer keeps its input only, and runs again when its gradients are needed.

One more forward pass buys memory: per layer `[tokens, hidden]` instead of everything inside (Chen et al.,
arXiv 1604.06174). Megatron's own recompute reads CUDA's random state, so it cannot run on a CPU; torch's can. Nothing
in a layer is random (every dropout is 0), so no random state is kept.
"""

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.utils.checkpoint import checkpoint


class RecomputedLayer(TransformerLayer):
    """A layer of any of Megatron's specifications."""

    def forward(self, *args, **kwargs):
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        return checkpoint(super().forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
