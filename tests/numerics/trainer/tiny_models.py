"""Tiny random Hugging Face models, also used by the torchrun worker."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from tests.fixtures.training_samples import VOCABULARY_SIZE

ARCHITECTURES = ("llama", "llama_untied_llama3_rope", "qwen2", "qwen3")


def tiny_config(architecture: str) -> PretrainedConfig:
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    if architecture == "llama":
        return LlamaConfig(**shape, tie_word_embeddings=True)
    if architecture == "llama_untied_llama3_rope":
        rope = {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        return LlamaConfig(**shape, tie_word_embeddings=False, rope_parameters=rope)
    if architecture == "qwen2":
        return Qwen2Config(**shape, tie_word_embeddings=False)
    assert architecture == "qwen3"
    return Qwen3Config(**shape, head_dim=24, tie_word_embeddings=True)


def save_tiny_model(architecture: str, directory: Path) -> Path:
    """Every parameter is random, norms and biases included: a swapped pair of tensors cannot go unnoticed."""
    model = AutoModelForCausalLM.from_config(tiny_config(architecture), dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            centre = 1.0 if parameter.ndim == 1 else 0.0
            parameter.copy_(centre + 0.2 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory
