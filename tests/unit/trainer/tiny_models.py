"""Tiny random Hugging Face models and random samples, also used by the torchrun worker."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from services.trainer.sample import IdTargets, TeacherTargets, TrainingSample

VOCABULARY_SIZE = 131
"""Odd, so that two ranks need a padded column."""

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


def random_samples(rewards: list[float], seed: int = 0, temperature: float = 0.6) -> list[TrainingSample]:
    """One sample per reward, of ragged lengths."""
    random = np.random.default_rng(seed)
    samples = []
    for index, reward in enumerate(rewards):
        prompt_length, response_length = random.integers(2, 20, size=2)
        samples.append(
            TrainingSample(
                sample_id=f"sample-{index}",
                prompt_ids=random.integers(0, VOCABULARY_SIZE, prompt_length).astype(np.int32),
                response_ids=random.integers(0, VOCABULARY_SIZE, response_length).astype(np.int32),
                behaviour_log_probs=random.normal(-5.0, 0.5, response_length).astype(np.float32),
                rl_mask=np.ones(response_length, dtype=np.bool_),
                reward=reward,
                sampling_temperature=temperature,
            )
        )
    return samples


def with_teachers(samples: list[TrainingSample], seed: int = 0, k: int = 5) -> list[TrainingSample]:
    """A teacher's signal, with its own and the policy's likeliest ids, for the even samples; the first token masked."""
    random = np.random.default_rng(seed)
    return [with_teacher(each, random, k) if index % 2 == 0 else each for index, each in enumerate(samples)]


def with_teacher(sample: TrainingSample, random: np.random.Generator, k: int = 5) -> TrainingSample:
    tokens = sample.response_ids.size
    mask = np.ones(tokens, np.bool_)
    mask[0] = tokens == 1

    def targets() -> IdTargets:
        ids = np.stack([random.choice(VOCABULARY_SIZE, k, replace=False) for _ in range(tokens)]).astype(np.int32)
        shares = 0.9 * random.dirichlet(np.ones(k), tokens)
        return IdTargets(ids, np.log(shares).astype(np.float32))

    log_probs = random.normal(-4.0, 1.0, tokens).astype(np.float32)
    return replace(sample, teacher=TeacherTargets(mask, log_probs, top=targets(), support=targets()))
