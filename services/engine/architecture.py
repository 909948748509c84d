"""What config.json says about a model, and the refusal of everything that this engine would compute wrongly."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from clawstream.errors import WeightsError

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Llama 3's stretch of the low rotary frequencies (transformers' `rope_type: llama3`)."""

    factor: float
    """By how much low frequencies are slowed."""
    low_frequency_factor: float
    """Wavelengths above original_context_tokens / this are slowed fully."""
    high_frequency_factor: float
    """Wavelengths below original_context_tokens / this are kept."""
    original_context_tokens: int
    """The context length of pre-training."""


@dataclass(frozen=True, slots=True)
class ModelArchitecture:
    """The shape of a Llama, Qwen2 or Qwen3 decoder. Two directories with equal architectures can be swapped."""

    model_type: str
    """`llama`, `qwen2` or `qwen3`."""
    vocabulary_size: int
    hidden_size: int
    intermediate_size: int
    """Width of the gated feed-forward layer."""
    num_layers: int
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key-value heads; each serves num_heads / num_kv_heads query heads."""
    head_dim: int
    norm_epsilon: float
    rope_theta: float
    rope_scaling: Llama3RopeScaling | None
    tied_embeddings: bool
    """The output projection is the embedding."""
    max_context_tokens: int
    """Positions that the model was made for."""

    @property
    def has_head_norms(self) -> bool:
        """Whether queries and keys are normalised per head (Qwen3)."""
        return self.model_type == "qwen3"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises `WeightsError` when it is missing or malformed."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise WeightsError(f"{path}: no such file; a Hugging Face model directory is needed") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise WeightsError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path}: a JSON object is expected")
    return cast("dict[str, Any]", value)


def read_architecture(directory: Path) -> ModelArchitecture:
    """The architecture of a model directory. Raises `WeightsError` naming the file and everything unsupported in it."""
    path = directory / "config.json"
    config = read_json(path)
    try:
        return parse_architecture(config)
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsError(f"{path}: {error!s}") from error


def parse_architecture(config: dict[str, Any]) -> ModelArchitecture:
    """The architecture that a parsed config.json describes.

    Raises KeyError for a missing field and ValueError for what this engine cannot compute.
    """
    problems = unsupported_features(config)
    if problems:
        raise ValueError("unsupported: " + "; ".join(problems))
    num_heads = int(config["num_attention_heads"])
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}")
    rope = rope_parameters(config)
    return ModelArchitecture(
        model_type=config["model_type"],
        vocabulary_size=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        intermediate_size=int(config["intermediate_size"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=int(config.get("head_dim") or config["hidden_size"] // num_heads),
        norm_epsilon=float(config["rms_norm_eps"]),
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10_000.0))),
        rope_scaling=llama3_scaling(rope),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_context_tokens=int(config["max_position_embeddings"]),
    )


def unsupported_features(config: dict[str, Any]) -> list[str]:
    """Everything in the config that would make this engine's answers differ from the model's."""
    problems: list[str] = []
    if config.get("model_type") not in SUPPORTED_MODEL_TYPES:
        problems.append(f"model_type {config.get('model_type')!r}, one of {', '.join(SUPPORTED_MODEL_TYPES)} is needed")
    if config.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act {config['hidden_act']!r}, silu is needed")
    if config.get("quantization_config"):
        problems.append("quantization_config, plain float weights are needed")
    layer_types = set(cast("list[str]", config.get("layer_types") or []))
    if config.get("use_sliding_window") or layer_types - {"full_attention"}:
        problems.append("sliding-window attention")
    rope = rope_parameters(config)
    if rope_type(rope) not in ("default", "llama3"):
        problems.append(f"rope scaling {rope_type(rope)!r}, default or llama3 is needed")
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        problems.append("partial_rotary_factor")
    return problems


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary parameters: `rope_parameters` since transformers 5, `rope_scaling` before."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def rope_type(rope: dict[str, Any]) -> str:
    """The kind of rotary scaling; `type` is its older name."""
    return rope.get("rope_type", rope.get("type", "default"))


def llama3_scaling(rope: dict[str, Any]) -> Llama3RopeScaling | None:
    """Llama 3's scaling, or None for plain rotary positions."""
    if rope_type(rope) != "llama3":
        return None
    return Llama3RopeScaling(
        factor=float(rope["factor"]),
        low_frequency_factor=float(rope["low_freq_factor"]),
        high_frequency_factor=float(rope["high_freq_factor"]),
        original_context_tokens=int(rope["original_max_position_embeddings"]),
    )


def read_stop_token_ids(directory: Path) -> frozenset[int]:
    """The ids that end an answer: `eos_token_id` of config.json and generation_config.json together, as SGLang does."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = directory / name
        if path.is_file():
            value: int | list[int] | None = read_json(path).get("eos_token_id")
            if value is not None:
                found.update(value if isinstance(value, list) else [value])
    return frozenset(found)
