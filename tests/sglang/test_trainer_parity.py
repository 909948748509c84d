"""The trainer's own log-probs beside the real SGLang's, before and after an update that the trainer exported."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import torch

from services.trainer.algorithms.binary import Binary
from services.trainer.engine.parallel import ParallelLayout
from services.trainer.policy import PolicyTrainer
from services.trainer.publish import WeightStore
from services.trainer.sample import TrainingSample
from tests.sglang.conftest import TOLERANCE, Sglang

PROMPTS = [[3 + (index * step) % 500 for index in range(length)] for step, length in ((7, 30), (11, 12), (17, 2))]


def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def policy(sglang_models: list[Path]) -> PolicyTrainer:
    one_thread()
    trainer = PolicyTrainer(ParallelLayout.start(seed=0), Binary())
    trainer.load(sglang_models[0])
    return trainer


async def sampled(sglang: Sglang, temperature: float) -> list[TrainingSample]:
    """Answers as they come to the trainer: ids and behaviour log-probs by SGLang."""
    samples: list[TrainingSample] = []
    for number, prompt in enumerate(PROMPTS):
        answer = await sglang.ask(prompt, temperature=temperature, max_new_tokens=24, ignore_eos=True)
        samples.append(
            TrainingSample(
                sample_id=f"sample-{number}",
                prompt_ids=np.array(prompt, dtype=np.int32),
                response_ids=np.array(answer.token_ids, dtype=np.int32),
                behaviour_log_probs=np.array(answer.logprobs, dtype=np.float32),
                rl_mask=np.ones(len(answer.token_ids), dtype=np.bool_),
                reward=1.0 if number % 2 else -1.0,
                sampling_temperature=temperature,
            )
        )
    return samples


def largest_difference(samples: list[TrainingSample], scores: list[np.ndarray]) -> float:
    return max(
        float(np.abs(sample.behaviour_log_probs - score).max()) for sample, score in zip(samples, scores, strict=True)
    )


@pytest.mark.parametrize("temperature", [0.6, 1.0])
async def test_the_trainer_agrees_with_what_was_sampled_before_and_after_an_exported_update(
    sglang: Sglang, policy: PolicyTrainer, tmp_path: Path, temperature: float
) -> None:
    samples = await sampled(sglang, temperature)
    assert largest_difference(samples, policy.score(samples)) < TOLERANCE, "the ratio at step 0 is 1"

    result = policy.train_step(samples, 1e-2)
    assert result.changed
    snapshot = policy.snapshot()
    assert snapshot is not None
    published = WeightStore(tmp_path, "tiny").publish(
        snapshot,
        sglang.models[0],
        weight_version=1,
        base_version=0,
        lineage="lineage",
        train_step_id="step-1",
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
    )
    await sglang.serve(1, published.directory)

    assert largest_difference(samples, policy.score(samples)) > 10 * TOLERANCE, "the update is worth a look"
    later = await sampled(sglang, temperature)
    assert largest_difference(later, policy.score(later)) < TOLERANCE
    for sample in later:
        scores = await sglang.client.score(sample.prompt_ids.tolist(), sample.response_ids.tolist())
        at_one = policy.score([_at_temperature_one(sample)])[0]
        np.testing.assert_allclose(scores.logprobs, at_one, atol=TOLERANCE)
        assert scores.weight_version == 1


def _at_temperature_one(sample: TrainingSample) -> TrainingSample:
    """The teacher's and SGLang's scores are at temperature 1, whatever the answer was sampled with."""
    return TrainingSample(
        sample_id=sample.sample_id,
        prompt_ids=sample.prompt_ids,
        response_ids=sample.response_ids,
        behaviour_log_probs=sample.behaviour_log_probs,
        rl_mask=sample.rl_mask,
    )
