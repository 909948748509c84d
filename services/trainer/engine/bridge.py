# pyright: basic, reportAttributeAccessIssue=false, reportArgumentType=false
# Reason: a thin adapter around mbridge and transformers, whose hints are partial and sometimes wrong.
"""mbridge's Hugging Face <-> Megatron-Core conversion, with what it lacks for the local layer specification.

mbridge assumes Transformer Engine's specification, where norms are part of the linear layers. The local one
has norms of their own, so their names are added. Three more differences are settled here:
- rope comes from `rope_parameters`, where transformers 5 keeps it;
- name tables are copied per bridge (mbridge changes a class-wide table for tied embeddings, so that a tied
  model loaded first would change the names of an untied one);
- sequence parallelism is off: packed rows have any length, and it needs lengths divisible by the TP size.

mbridge imports every model that it knows, vision models with their networks and torch's compiler among them: more than
a second of every start. `_mbridge_without_its_models` leaves its list of models empty, so that ours are imported alone.
"""

import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from clawstream.errors import MissingDependencyError, SettingsError
from services.trainer.engine import cpu_platform


def _mbridge_without_its_models() -> None:
    name = "mbridge.models"
    found = importlib.util.find_spec("mbridge")
    if found is None:
        raise MissingDependencyError("the trainer needs mbridge: pip install 'clawstream[trainer]'")
    if name not in sys.modules:
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [f"{location}/models" for location in found.submodule_search_locations or ()]


_mbridge_without_its_models()
from mbridge.core.bridge import Bridge  # noqa: E402  (after the line above)
from mbridge.models.llama import LLaMABridge  # noqa: E402
from mbridge.models.qwen2 import Qwen2Bridge  # noqa: E402
from mbridge.models.qwen3 import Qwen3Bridge  # noqa: E402

_BRIDGES: dict[str, type[Bridge]] = {"llama": LLaMABridge, "qwen2": Qwen2Bridge, "qwen3": Qwen3Bridge}

_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Constants that Megatron-Core's llama3 rope scaling has built in; only the factor can be set."""


def read_config(directory: str) -> PretrainedConfig:
    """The model's `config.json`. Raises SettingsError for what this engine cannot train, naming the field."""
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    problems: list[str] = []
    if config.model_type not in _BRIDGES:
        problems.append(f"model_type={config.model_type!r} is not one of {sorted(_BRIDGES)}")
    if config.hidden_act != "silu":
        problems.append(f"hidden_act={config.hidden_act!r}: only 'silu' is supported")
    if getattr(config, "mlp_bias", False):
        problems.append("mlp_bias=true is not supported")
    if config.model_type != "qwen2" and getattr(config, "attention_bias", False):
        problems.append("attention_bias=true is not supported (its output projection has a bias)")
    if getattr(config, "use_sliding_window", False):
        problems.append("use_sliding_window=true is not supported")
    rope = config.rope_parameters
    if rope["rope_type"] not in ("default", "linear", "llama3"):
        problems.append(f"rope_type={rope['rope_type']!r} is not one of default, linear, llama3")
    elif rope["rope_type"] == "llama3" and any(rope[name] != value for name, value in _LLAMA3_ROPE.items()):
        problems.append(f"llama3 rope scaling with other constants than {_LLAMA3_ROPE}")
    if problems:
        raise SettingsError(f"{directory}/config.json cannot be trained: " + "; ".join(problems))
    if getattr(config, "head_dim", None) is None:  # Qwen2's configuration leaves it out
        config.head_dim = config.hidden_size // config.num_attention_heads
    return config


def build_bridge(
    config: PretrainedConfig, *, dtype: torch.dtype, tensor_parallel_size: int, fused_norms: bool
) -> Bridge:
    """mbridge's bridge for `config`.

    `fused_norms` says that the model uses Transformer Engine's layer specification. Vocabularies are padded to
    a multiple of `tensor_parallel_size`. Raises SettingsError when heads cannot be divided among the ranks.
    """
    for field in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, field) % tensor_parallel_size:
            raise SettingsError(
                f"{field}={getattr(config, field)} cannot be divided among tensor_parallel_size={tensor_parallel_size}"
            )
    base = _BRIDGES[config.model_type]

    class ClawstreamBridge(base):
        def _adjust_mapping_for_shared_weights(self) -> None:
            self._DIRECT_MAPPING = dict(base._DIRECT_MAPPING)
            self._DIRECT_MAPPING["output_layer.weight"] = (
                "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
            )
            layer = "model.layers.{layer_number}."
            self._MLP_MAPPING = {
                **base._MLP_MAPPING,
                "pre_mlp_layernorm.weight": [layer + "post_attention_layernorm.weight"],
            }
            self._OTHER_MAPPING = {**base._OTHER_MAPPING, "input_layernorm.weight": [layer + "input_layernorm.weight"]}

        def _build_base_config(self, **overrides: Any) -> Any:
            # Megatron marks which parameters are sharded while it initialises them, so that cannot be skipped.
            overrides |= {"sequence_parallel": False, "perform_initialization": True}
            if not fused_norms:
                overrides |= cpu_platform.TRANSFORMER_OVERRIDES | {"use_cpu_initialization": not cpu_platform.has_gpu()}
            return super()._build_base_config(**overrides)

        def _get_gptmodel_args(self) -> dict[str, Any]:
            rope = config.rope_parameters
            arguments: dict[str, Any] = {
                "vocab_size": config.vocab_size,
                "max_sequence_length": config.max_position_embeddings,
                "position_embedding_type": "rope",
                "rotary_base": rope["rope_theta"],
            }
            if rope["rope_type"] == "linear":
                arguments["seq_len_interpolation_factor"] = rope["factor"]
            elif rope["rope_type"] == "llama3":
                arguments |= {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
            return arguments

    bridge = ClawstreamBridge(config, dtype=dtype, make_vocab_size_divisible_by=tensor_parallel_size)
    bridge.dtype = None  # else it rounds fp32 main parameters and moments to the model's type when they are restored
    bridge.vocab_size = config.vocab_size
    bridge.padded_vocab_size = -(-config.vocab_size // tensor_parallel_size) * tensor_parallel_size
    return bridge
