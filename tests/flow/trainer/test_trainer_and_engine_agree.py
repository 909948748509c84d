"""What the real engine sampled and scored, beside the trainer's own numbers on the same weights."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import torch

from clawstream.engine.client import HttpEngineClient
from clawstream.engine.interface import GenerationRequest
from services.engine.tiny_model import write_tiny_model
from services.trainer.algorithms.base import AlgorithmLoss, TokenBatch
from services.trainer.algorithms.combine import Combine
from services.trainer.engine.parallel import ParallelLayout
from services.trainer.own_teacher import OwnTeacherOptions
from services.trainer.policy import PolicyTrainer
from services.trainer.publish import WeightStore
from services.trainer.sample import TeacherTargets, TrainingSample
from tests.numerics.engine.test_server_process import engine_process

pytestmark = pytest.mark.slow

TOLERANCE = 1e-3
TEMPERATURES = (0.6, 1.0, 1.3)
PROMPTS = [[3 + (index * step) % 240 for index in range(length)] for step, length in ((7, 30), (11, 12), (17, 2))]
HINT = [5, 6, 7, 8]


class Watched(Combine):
    """Remembers every token's ratio and advantage, by component."""

    def __init__(self) -> None:
        super().__init__(ratio="behaviour")
        self.ratios: list[torch.Tensor] = []
        self.distances: list[torch.Tensor] = []

    def loss(self, batch: TokenBatch, weights: Mapping[str, torch.Tensor]) -> AlgorithmLoss:
        loss = super().loss(batch, weights)
        self.ratios.append(loss.components["rl"].ratio)
        self.distances.append(loss.components["opd"].advantages[batch.opd_mask])
        return loss


@dataclass
class Pair:
    """An engine and a trainer that began with the same model."""

    model: Path
    client: HttpEngineClient
    policy: PolicyTrainer
    watched: Watched

    async def sampled(self, temperature: float, hint: Sequence[int] = ()) -> list[TrainingSample]:
        """The engine's answers, as they come to the trainer; each asks the trainer's own teacher."""
        samples: list[TrainingSample] = []
        for number, prompt in enumerate(PROMPTS):
            parameters = {"temperature": temperature, "max_new_tokens": 24, "ignore_eos": True}
            request = GenerationRequest(
                f"{temperature}-{number}-{self.policy.optimizer.num_updates}", prompt, parameters
            )
            chunks = [chunk async for chunk in self.client.generate(request)]
            ids = [token for chunk in chunks for token in chunk.token_ids]
            samples.append(
                TrainingSample(
                    sample_id=f"sample-{number}",
                    prompt_ids=np.array(prompt, np.int32),
                    response_ids=np.array(ids, np.int32),
                    behaviour_log_probs=np.array([one for chunk in chunks for one in chunk.logprobs], np.float32),
                    rl_mask=np.ones(len(ids), np.bool_),
                    reward=1.0 if number % 2 else -1.0,
                    sampling_temperature=temperature,
                    teacher=TeacherTargets.asked(np.array([*hint, *prompt], np.int32), len(ids)),
                )
            )
        return samples

    async def told_by_engine(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """The same questions, answered by the engine."""
        told: list[TrainingSample] = []
        for sample in samples:
            assert sample.teacher is not None
            assert sample.teacher.asked_prompt_ids is not None
            said = await self.client.score(sample.teacher.asked_prompt_ids.tolist(), sample.response_ids.tolist())
            teacher = TeacherTargets(sample.teacher.mask, np.array(said.logprobs, np.float32))
            told.append(replace(sample, teacher=teacher))
        return told

    def step(self, samples: list[TrainingSample]) -> tuple[np.ndarray, np.ndarray]:
        """(ratios, distances of the teacher) of every token in a step that changes the weights."""
        self.watched.ratios.clear()
        self.watched.distances.clear()
        assert self.policy.train_step(samples, 1e-2).changed
        ratios, distances = torch.cat(self.watched.ratios), torch.cat(self.watched.distances)
        assert ratios.numel() == sum(sample.response_ids.size for sample in samples)
        return ratios.numpy(), distances.numpy()


def policy_of(model: Path) -> tuple[PolicyTrainer, Watched]:
    torch.set_num_threads(1)
    watched = Watched()
    policy = PolicyTrainer(ParallelLayout.start(seed=0), watched, teacher=OwnTeacherOptions())
    policy.load(model)
    return policy, watched


async def check_agreement(model: Path, weights: Path) -> None:
    policy, watched = policy_of(model)
    async with engine_process("--model-path", str(model), "--port", "0") as (_, url):
        pair = Pair(model, HttpEngineClient("engine", url), policy, watched)
        try:
            for version, temperature in enumerate(TEMPERATURES, start=1):
                plain, hinted = await pair.sampled(temperature), await pair.sampled(temperature, HINT)
                own, engines = policy.taught(hinted), await pair.told_by_engine(hinted)
                base = version == 1
                for left, right in zip(own, engines, strict=True):
                    assert left.teacher is not None
                    assert right.teacher is not None
                    difference = np.abs(left.teacher.log_probs - right.teacher.log_probs).max()
                    assert (difference < TOLERANCE) == base, "the engine moves on, the trainer's teacher stays"
                told = policy.taught(plain) if base else await pair.told_by_engine(plain)
                ratios, distances = pair.step(told)
                assert np.abs(ratios - 1).max() < TOLERANCE, f"at step 0 of version {version - 1}, T = {temperature}"
                assert np.abs(distances).max() < TOLERANCE, f"an identical teacher without a hint, T = {temperature}"
                ratios, _ = pair.step(told)
                assert np.abs(ratios - 1).max() > 10 * TOLERANCE, "the update is worth a look"
                snapshot = policy.snapshot()
                assert snapshot is not None
                published = WeightStore(weights, "tiny").publish(
                    snapshot,
                    model,
                    weight_version=version,
                    base_version=version - 1,
                    lineage="lineage",
                    train_step_id=None,
                    created_at=datetime(2026, 1, 1, tzinfo=UTC),
                )
                await pair.client.load_weights(str(published.directory), version, flush_cache=True)
        finally:
            await pair.client.close()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
async def test_the_ratio_at_step_0_is_1_on_every_token(architecture: str, tmp_path: Path) -> None:
    await check_agreement(write_tiny_model(tmp_path / "model", architecture, 3), tmp_path / "weights")  # type: ignore[arg-type] # one of its names


@pytest.mark.model
async def test_the_ratio_at_step_0_is_1_with_the_real_model(smollm2_directory: Path, tmp_path: Path) -> None:
    policy, watched = policy_of(smollm2_directory)
    async with engine_process("--model-path", str(smollm2_directory), "--port", "0") as (_, url):
        pair = Pair(smollm2_directory, HttpEngineClient("engine", url), policy, watched)
        try:
            for temperature in (0.6, 1.0):
                samples = await pair.sampled(temperature)
                shift = [
                    np.abs(np.expm1(own - sample.behaviour_log_probs)).max()
                    for own, sample in zip(policy.score(samples), samples, strict=True)
                ]
                assert max(shift) < TOLERANCE, temperature
        finally:
            await pair.client.close()
