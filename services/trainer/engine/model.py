# pyright: basic, reportAttributeAccessIssue=false
# Reason: a thin adapter around Megatron-Core, whose specifications are typed as object.
"""A Megatron-Core GPTModel made from a Hugging Face configuration, run on packed rows.

On a CPU, and on a GPU without Transformer Engine, layers come from Megatron's local specification with
`PackedSelfAttention`; with Transformer Engine they come from its specification. The forward pass is the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from transformers import PretrainedConfig

from services.trainer.engine import cpu_platform
from services.trainer.engine.bridge import build_bridge
from services.trainer.engine.log_probabilities import VocabularyShard
from services.trainer.engine.lora import LoraSettings, add_adapters
from services.trainer.engine.packed_attention import PackedSelfAttention
from services.trainer.engine.parallel import ParallelLayout
from services.trainer.engine.recompute import RecomputedLayer
from services.trainer.packing import PackedRow


class PolicyModel:
    """The policy's network on this rank, with its bridge to Hugging Face's format."""

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        dtype: torch.dtype = torch.float32,
        tensor_parallel_size: int = 1,
        fused_norms: bool = True,
        recompute_activations: bool = False,
    ) -> None:
        """Parameters are random: load weights before use. Raises SettingsError for a layout that cannot be.

        Without `fused_norms` Transformer Engine is not used: its linear layers hide what LoRA needs, the normed input.
        """
        transformer_engine = fused_norms and cpu_platform.has_gpu() and find_spec("transformer_engine") is not None
        self.adapters: dict[str, torch.nn.Parameter] = {}
        """LoRA's parameters by name; when there are any, they alone are trained."""
        self._adapters_are_on = True
        self.hugging_face_config = config
        self.vocabulary_size: int = config.vocab_size
        self.bridge = build_bridge(
            config, dtype=dtype, tensor_parallel_size=tensor_parallel_size, fused_norms=transformer_engine
        )
        qk_norm = self.bridge.config.qk_layernorm
        if transformer_engine:
            layer_spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_norm)
        else:
            layer_spec = get_gpt_layer_local_spec(qk_layernorm=qk_norm, normalization="RMSNorm")
            layer_spec.submodules.self_attention.submodules.core_attention = PackedSelfAttention
        if recompute_activations:
            layer_spec.module = RecomputedLayer
        arguments = self.bridge._get_gptmodel_args() | {"vocab_size": self.bridge.padded_vocab_size}
        self.network = GPTModel(
            config=self.bridge.config,
            transformer_layer_spec=layer_spec,
            share_embeddings_and_output_weights=config.tie_word_embeddings,
            **arguments,
        ).to(device=cpu_platform.device(), dtype=dtype)
        for parameter in self.network.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)

    def add_adapters(self, settings: LoraSettings, layout: ParallelLayout, seed: int) -> None:
        """From here on adapters are trained, and nothing else."""
        self.adapters = add_adapters(self.network, settings, layout, seed, are_on=lambda: self._adapters_are_on)

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Forward passes inside are those of the model that the adapters were added to: it needs no second copy."""
        self._adapters_are_on = False
        try:
            yield
        finally:
            self._adapters_are_on = True

    def shard(self, logits: torch.Tensor, layout: ParallelLayout) -> VocabularyShard:
        """Which part of the vocabulary this rank's `logits` [tokens, columns] are."""
        return VocabularyShard.of_rank(
            self.vocabulary_size, logits.size(1), layout.tensor_rank, layout.tensor_size, layout.tensor_group
        )

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """This rank's shard of every parameter of the model itself, by Megatron's name."""
        return {name: each for name, each in self.network.named_parameters() if name not in self.adapters}

    def trained_parameters(self) -> dict[str, torch.nn.Parameter]:
        """This rank's shard of every parameter that is trained, by name."""
        return self.adapters or self.named_parameters()

    def logits(self, row: PackedRow) -> torch.Tensor:
        """Logits at `row.logit_positions` only: prompts need none, which saves most of the output layer.

        Returns [response_tokens, vocabulary / tensor_parallel_size], the vocabulary padded to a multiple of the
        number of ranks.
        """
        device = cpu_platform.device()
        network = self.network
        token_ids = torch.as_tensor(row.token_ids, dtype=torch.int64, device=device).unsqueeze(0)  # [1, tokens]
        bounds = torch.as_tensor(row.sequence_bounds, dtype=torch.int32, device=device)  # [sequences + 1]
        longest = int(row.sequence_lengths.max())
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        hidden = network.decoder(  # [tokens, 1, hidden]
            hidden_states=network.embedding(input_ids=token_ids, position_ids=torch.zeros_like(token_ids)),
            attention_mask=None,
            rotary_pos_emb=network.rotary_pos_emb(longest, packed_seq=True),
            packed_seq_params=packed,
        )
        positions = torch.as_tensor(row.logit_positions, dtype=torch.int64, device=device)
        tied = network.shared_embedding_or_output_weight() if network.share_embeddings_and_output_weights else None
        logits, _ = network.output_layer(hidden[positions], weight=tied)
        return logits.squeeze(1)
