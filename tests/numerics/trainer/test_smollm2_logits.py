"""The real model: Megatron's logits are Hugging Face's."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from clawstream.errors import SettingsError
from services.trainer.engine.bridge import build_bridge, read_config
from services.trainer.engine.model import PolicyModel
from services.trainer.engine.parallel import ParallelLayout
from services.trainer.engine.weights import load_hugging_face
from services.trainer.packing import pack

pytestmark = [pytest.mark.model, pytest.mark.slow]

TEXTS = [
    ("What is the capital of France?", "The capital of France is Paris."),
    ("Name three primes.", "2, 3 and 5 are primes. So are 7, 11 and 13, and there is no largest one."),
    ("Say", "hi"),
]


def test_logits_of_packed_sequences_equal_hugging_face(smollm2_directory: Path, layout: ParallelLayout) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2_directory / "tokenizer.json"))

    def ids(text: str) -> NDArray[np.int64]:
        return np.asarray(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    sequences = [(ids(prompt), ids(response)) for prompt, response in TEXTS]
    reference = AutoModelForCausalLM.from_pretrained(smollm2_directory, dtype=torch.float32)
    model = PolicyModel(read_config(str(smollm2_directory)))
    load_hugging_face(model, layout, smollm2_directory)
    with torch.no_grad():
        logits = model.logits(pack(sequences))  # [response tokens, vocabulary]
        expected = torch.cat(
            [
                reference(torch.tensor([[*prompt, *response]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
                for prompt, response in sequences
            ]
        )
    assert expected.abs().max() > 5, "a model that says something"
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-3)


def test_its_heads_cannot_be_shared_by_two_ranks(smollm2_directory: Path) -> None:
    """9 query and 3 key-value heads: Megatron repeats the latter only where the ranks are a multiple of them."""
    config = read_config(str(smollm2_directory))
    with pytest.raises(SettingsError, match="num_attention_heads=9 cannot be divided"):
        build_bridge(config, dtype=torch.float32, tensor_parallel_size=2, fused_norms=False)
