"""A model's weights as the engine computes with them: query, key and value fused, gate and up fused, linears packed."""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from clawstream.errors import WeightsError
from services.engine.adapters import CONFIG_NAME, Adapters
from services.engine.architecture import ModelArchitecture, read_architecture, read_json
from services.engine.linear import Linear, make_linear
from services.engine.safetensors_files import read_tensors

IGNORED_SUFFIX = "rotary_emb.inv_freq"
"""Old checkpoints carry the rotary frequencies; they follow from the config."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer."""

    attention_norm: Tensor
    """[hidden]"""
    query_key_value: Linear
    """hidden -> (heads + 2 * kv_heads) * head_dim, in the order queries, keys, values"""
    head_norm: Tensor | None
    """[heads + kv_heads, head_dim]: the norm of every query head, then of every key head (Qwen3)"""
    attention_output: Linear
    """heads * head_dim -> hidden"""
    feed_forward_norm: Tensor
    """[hidden]"""
    gate_up: Linear
    """hidden -> 2 * intermediate, gates first"""
    down: Linear
    """intermediate -> hidden"""


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights of one version. Immutable; an update makes another one beside it."""

    architecture: ModelArchitecture
    embedding: Tensor
    """[vocabulary, hidden]"""
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    """[hidden]"""
    output: Linear
    """hidden -> vocabulary"""

    @property
    def linears(self) -> list[Linear]:
        """All of them."""
        layers = [(x.query_key_value, x.attention_output, x.gate_up, x.down) for x in self.layers]
        return [*chain.from_iterable(layers), self.output]


class TensorReader:
    """The tensors of a model directory by name, each checked for its shape when it is taken."""

    def __init__(self, directory: Path, dtype: torch.dtype, adapters: Adapters | None = None) -> None:
        """`adapters` are merged into what is taken."""
        self._directory = directory
        self._dtype = dtype
        self._tensors = read_tensors(weight_files(directory))
        self._adapters = adapters

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor in the engine's dtype, removed from what is left. `WeightsError` when absent or misshapen."""
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise WeightsError(f"{self._directory}: tensor {name} is missing")
        if tuple(tensor.shape) != shape:
            raise WeightsError(f"{self._directory}: tensor {name} has shape {tuple(tensor.shape)}, not {shape}")
        if self._adapters is not None:
            tensor = self._adapters.merged(name, tensor)
        return tensor.to(self._dtype)

    def take_optional(self, name: str, *shape: int) -> Tensor | None:
        """As `take`, or None when there is no such tensor."""
        return self.take(name, *shape) if name in self._tensors else None

    def discard(self, name: str) -> None:
        """Drop a tensor that is known to be redundant."""
        self._tensors.pop(name, None)

    def check_nothing_left(self) -> None:
        """Raises `WeightsError` when the directory holds a tensor that nobody took: it would be silently ignored."""
        left = [name for name in self._tensors if not name.endswith(IGNORED_SUFFIX)]
        if left:
            raise WeightsError(
                f"{self._directory}: unknown tensors: {', '.join(sorted(left)[:5])} ({len(left)} in all)"
            )
        if self._adapters is not None:
            self._adapters.check_nothing_left()


def weight_files(directory: Path) -> list[Path]:
    """The directory's safetensors files. Raises `WeightsError` when there is none."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        weight_map: dict[str, str] = read_json(index)["weight_map"]
        return [directory / name for name in sorted(set(weight_map.values()))]
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"{directory}: no safetensors file")
    return files


def load_weights(
    directory: Path,
    *,
    dtype: torch.dtype,
    packed: bool,
    expected: ModelArchitecture | None = None,
    base_directory: Path | None = None,
) -> ModelWeights:
    """Read and prepare the weights of a Hugging Face directory. Nothing refers to its files afterwards.

    A directory of LoRA adapters is merged with the model in `base_directory`, to which they must belong.
    Raises `WeightsError` when files or tensors are missing, misshapen or unknown, or when the architecture is not
    `expected` (that of the weights in service).
    """
    if not directory.is_dir():
        raise WeightsError(f"{directory}: no such directory")
    adapters = None
    if (directory / CONFIG_NAME).is_file():
        if base_directory is None:
            raise WeightsError(f"{directory}: adapters without a model; start the engine with the model itself")
        adapters, directory = Adapters(directory), base_directory
    architecture = read_architecture(directory)
    if expected is not None and architecture != expected:
        raise WeightsError(f"{directory}: another architecture than the one in service ({expected} is needed)")
    reader = TensorReader(directory, dtype, adapters)
    with torch.inference_mode():
        weights = assemble(architecture, reader, packed=packed)
    reader.check_nothing_left()
    return weights


def assemble(architecture: ModelArchitecture, reader: TensorReader, *, packed: bool) -> ModelWeights:
    """Fuse and pack the tensors."""
    hidden = architecture.hidden_size
    embedding = reader.take("model.embed_tokens.weight", architecture.vocabulary_size, hidden).clone()
    if architecture.tied_embeddings:
        reader.discard("lm_head.weight")
        output = make_linear(embedding, None, packed=packed)
    else:
        output_weight = reader.take("lm_head.weight", architecture.vocabulary_size, hidden)
        output = make_linear(output_weight, None, packed=packed)
    return ModelWeights(
        architecture=architecture,
        embedding=embedding,
        layers=tuple(assemble_layer(architecture, reader, i, packed=packed) for i in range(architecture.num_layers)),
        final_norm=reader.take("model.norm.weight", hidden).clone(),
        output=output,
    )


def assemble_layer(architecture: ModelArchitecture, reader: TensorReader, layer: int, *, packed: bool) -> LayerWeights:
    """Fuse and pack one layer."""
    hidden, intermediate, head_dim = architecture.hidden_size, architecture.intermediate_size, architecture.head_dim
    query_size, key_size = architecture.num_heads * head_dim, architecture.num_kv_heads * head_dim
    prefix = f"model.layers.{layer}"

    def fused(*parts: tuple[str, int, int]) -> Linear:
        """Linears on the same input, one below the other. Each part: name, rows, columns."""
        weights = [reader.take(f"{prefix}.{name}.weight", rows, columns) for name, rows, columns in parts]
        biases = [reader.take_optional(f"{prefix}.{name}.bias", rows) for name, rows, _ in parts]
        present = [bias for bias in biases if bias is not None]
        if present and len(present) < len(parts):
            raise WeightsError(f"{prefix}: some of {', '.join(part[0] for part in parts)} have a bias and some not")
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        return make_linear(weight, torch.cat(present) if present else None, packed=packed)

    head_norm = None
    if architecture.has_head_norms:
        query_norm = reader.take(f"{prefix}.self_attn.q_norm.weight", head_dim)
        key_norm = reader.take(f"{prefix}.self_attn.k_norm.weight", head_dim)
        head_norm = torch.cat(
            (query_norm.expand(architecture.num_heads, -1), key_norm.expand(architecture.num_kv_heads, -1))
        )
    return LayerWeights(
        attention_norm=reader.take(f"{prefix}.input_layernorm.weight", hidden).clone(),
        query_key_value=fused(
            ("self_attn.q_proj", query_size, hidden),
            ("self_attn.k_proj", key_size, hidden),
            ("self_attn.v_proj", key_size, hidden),
        ),
        head_norm=head_norm,
        attention_output=fused(("self_attn.o_proj", hidden, query_size)),
        feed_forward_norm=reader.take(f"{prefix}.post_attention_layernorm.weight", hidden).clone(),
        gate_up=fused(("mlp.gate_proj", intermediate, hidden), ("mlp.up_proj", intermediate, hidden)),
        down=fused(("mlp.down_proj", hidden, intermediate)),
    )
