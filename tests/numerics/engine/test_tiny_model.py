"""The tests' own model: the same arguments give the same bytes, and transformers agrees with what config.json says."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.engine.tiny_model import Architecture, write_tiny_model


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_transformers_loads_every_parameter_of_the_tiny_model(tmp_path: Path, architecture: Architecture) -> None:
    directory = write_tiny_model(tmp_path / "model", architecture)
    loaded: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    report = loaded[1]
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(tmp_path: Path) -> None:
    one, same, other = (
        (write_tiny_model(tmp_path / name, seed=seed) / "model.safetensors").read_bytes()
        for name, seed in (("one", 1), ("same", 1), ("other", 2))
    )
    assert one == same
    assert one != other


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_any_text_round_trips_and_special_tokens_are_single_ids(tmp_path: Path, architecture: Architecture) -> None:
    tokenizer = AutoTokenizer.from_pretrained(write_tiny_model(tmp_path / "model", architecture))
    text = "What's up 12345 ?? \n\n  日本 café 🙂"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|>") == [0, 1, 2]
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
