"""What a model says about packed answers, against Hugging Face on one answer at a time."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from services.trainer.policy import PolicyTrainer
from tests.fixtures.training_samples import random_samples

NewPolicy = Callable[..., PolicyTrainer]


def test_scores_equal_hugging_face_at_the_sampling_temperature(
    new_policy: NewPolicy, model_directory: Callable[[str], Path]
) -> None:
    samples = random_samples([1.0, -1.0, 0.0, 1.0, -1.0, 1.0], temperature=0.6)
    model = AutoModelForCausalLM.from_pretrained(model_directory("qwen3"), dtype=torch.float32)
    scores = new_policy(tokens_per_micro_batch=40).score(samples)
    for sample, score in zip(samples, scores, strict=True):
        ids = torch.as_tensor(np.concatenate([sample.prompt_ids, sample.response_ids]).astype(np.int64))
        with torch.no_grad():
            log_probs = (
                model(ids[None], use_cache=False).logits[0, sample.prompt_ids.size - 1 : -1] / 0.6
            ).log_softmax(-1)
        expected = log_probs.gather(1, ids[sample.prompt_ids.size :, None]).squeeze(1).numpy()
        np.testing.assert_allclose(score, expected, atol=1e-4)
