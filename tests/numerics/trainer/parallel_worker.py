"""Run by torchrun in two processes: what tensor and data parallelism compute, written to a directory for the test.

Arguments: the directory of tiny models (one folder per architecture), the directory to write to.
"""

import itertools
import json
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from safetensors.torch import save_file

from clawstream.errors import StepInterrupted
from services.trainer.algorithms.base import load_algorithm
from services.trainer.algorithms.binary import Binary
from services.trainer.batch_archive import BatchArchive
from services.trainer.checkpoint import CheckpointStore
from services.trainer.engine.lora import LoraSettings
from services.trainer.engine.optimizer import MOMENTS
from services.trainer.engine.parallel import ParallelLayout
from services.trainer.guards.bounds import Bound
from services.trainer.guards.controls import StepControls
from services.trainer.own_teacher import OwnTeacherOptions
from services.trainer.policy import PolicyTrainer
from services.trainer.policy_models import ModelOptions
from services.trainer.ranks import RankChannel, RankedPolicy, follow
from services.trainer.sample import StepResult, TeacherTargets, TrainingSample, UnchangedReason
from tests.fixtures.training_samples import random_samples, with_teachers
from tests.numerics.trainer.tiny_models import ARCHITECTURES

RATE = 1e-3
ADAPTERS = ModelOptions(lora=LoraSettings(rank=3, alpha=12.0))
BFLOAT16 = ModelOptions(dtype=torch.bfloat16)
REWARDS = [1.0, -1.0, 0.0, 1.0, -1.0]


LOSSES: dict[str, tuple[str, dict[str, object]]] = {
    "combine": ("combine:Combine", {"kl_coefficient": 0.1, "entropy_coefficient": 0.1, "ratio": "recomputed"}),
    "topk": ("topk:TopK", {"aggregation": "token_mean"}),
    "hybrid": ("hybrid:Hybrid", {"ratio_level": "sequence"}),
}
"""Compared over layouts beside the binary loss: two temperatures, further ids, a reference, an entropy's gradient."""


def samples() -> list[TrainingSample]:
    return random_samples(REWARDS)


def run(
    layout: ParallelLayout,
    models: Path,
    out: Path,
    architecture: str,
    tokens_per_micro_batch: int,
    **options: Any,
) -> None:
    """Scores, steps, the state after them; all as seen from rank 0."""
    policy = PolicyTrainer(layout, Binary(), tokens_per_micro_batch=tokens_per_micro_batch, **options)
    policy.load(models / architecture)
    scores = policy.score(samples())
    if "lora" in options:  # B starts as 0, and so does the gradient of A
        policy.train_step(samples(), RATE)
    result = policy.train_step(samples(), RATE)
    snapshot = policy.snapshot()
    assert (snapshot is None) == (layout.rank != 0)
    if snapshot is not None:
        write(out, scores, result, snapshot.weights, snapshot.moments["exp_avg"])


def run_loss(layout: ParallelLayout, models: Path, out: Path, name: str) -> None:
    """One step of a loss that needs more than the sampled ids; as seen from rank 0."""
    result, moments = step_of(layout, models / "qwen3", name)
    if layout.rank == 0:
        out.mkdir(parents=True)
        save_file(moments, out / "exp_avg.safetensors")
        losses = {sample_id: statistics.loss for sample_id, statistics in result.samples.items()}
        (out / "result.json").write_text(json.dumps({"metrics": dict(result.metrics), "losses": losses}))


def step_of(layout: ParallelLayout, model: Path, name: str) -> tuple[StepResult, dict[str, torch.Tensor]]:
    """(result, first moments) of a step in two updates, the second of which has a ratio that is not 1."""
    path, options = LOSSES[name]
    algorithm = load_algorithm(f"services.trainer.algorithms.{path}", options)
    policy = PolicyTrainer(layout, algorithm, tokens_per_micro_batch=30, updates_per_batch=2)
    policy.load(model)
    result = policy.train_step(with_teachers(samples()), RATE)
    snapshot = policy.snapshot()
    return result, {} if snapshot is None else snapshot.moments["exp_avg"]


def run_teacher(layout: ParallelLayout, model: Path, out: Path) -> None:
    """What the own teacher says, on every rank; the file is as seen from rank 0."""
    said = taught(layout, model)
    mine = torch.cat([each.double().flatten() for each in said.values()])
    largest = mine.clone()
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    assert torch.equal(largest, mine), "the ranks were told different things"
    if layout.rank == 0:
        out.mkdir(parents=True)
        save_file(said, out / "taught.safetensors")


def taught(layout: ParallelLayout, model: Path) -> dict[str, torch.Tensor]:
    """Everything that it can say: at the answer's ids, the policy's and its own; the second sample does not ask."""
    algorithm = load_algorithm("services.trainer.algorithms.hybrid:Hybrid", {"support": "overlap", "support_size": 5})
    policy = PolicyTrainer(layout, algorithm, tokens_per_micro_batch=40, teacher=OwnTeacherOptions())
    policy.load(model)
    questions = [
        each
        if index == 1
        else replace(
            each, teacher=TeacherTargets.asked(np.append(each.prompt_ids, np.int32(7)), each.response_ids.size)
        )
        for index, each in enumerate(samples())
    ]
    said: dict[str, torch.Tensor] = {}
    for index, sample in enumerate(policy.taught(questions)):
        if sample.teacher is not None:
            assert sample.teacher.top is not None
            assert sample.teacher.support is not None
            said |= {
                f"{index}.log_probs": torch.as_tensor(sample.teacher.log_probs),
                f"{index}.top_ids": torch.as_tensor(sample.teacher.top.ids),
                f"{index}.top_log_probs": torch.as_tensor(sample.teacher.top.log_probs),
                f"{index}.support_ids": torch.as_tensor(sample.teacher.support.ids),
                f"{index}.support_log_probs": torch.as_tensor(sample.teacher.support.log_probs),
            }
    return {name: tensor.contiguous() for name, tensor in said.items()}


def write(
    out: Path,
    scores: list[np.ndarray],
    result: StepResult,
    weights: dict[str, torch.Tensor],
    moments: dict[str, torch.Tensor],
) -> None:
    out.mkdir(parents=True)
    save_file(weights, out / "weights.safetensors")
    save_file(moments, out / "exp_avg.safetensors")
    save_file({str(index): torch.as_tensor(score) for index, score in enumerate(scores)}, out / "scores.safetensors")
    losses = {name: statistics.loss for name, statistics in result.samples.items()}
    (out / "result.json").write_text(json.dumps({"metrics": dict(result.metrics), "losses": losses}))


def main(models: Path, out: Path) -> None:
    torch.set_num_threads(1)
    layout = ParallelLayout.start(tensor_parallel_size=2)
    for architecture in ARCHITECTURES:
        run(layout, models, out / "tensor" / architecture, architecture, tokens_per_micro_batch=40)
    for name in LOSSES:
        run_loss(layout, models, out / "tensor-losses" / name, name)
    for architecture in ("qwen2", "qwen3"):
        run(
            layout,
            models,
            out / "tensor-lora" / architecture,
            architecture,
            tokens_per_micro_batch=40,
            model_options=ADAPTERS,
        )
    run_teacher(layout, models / "qwen3", out / "tensor-teacher")
    resume_on_the_other_layout(layout, models, out / "tensor-checkpoints")
    guards_decide_alike(layout, models)
    all_ranks_give_a_step_up(layout, models)
    parallel_state.destroy_model_parallel()

    layout = ParallelLayout.start(tensor_parallel_size=1)
    assert (layout.data_size, layout.data_rank) == (2, layout.rank)
    run(layout, models, out / "data" / "qwen3", "qwen3", tokens_per_micro_batch=20)
    run(layout, models, out / "data-bfloat16" / "qwen3", "qwen3", tokens_per_micro_batch=20, model_options=BFLOAT16)
    run(layout, models, out / "data-lora" / "qwen3", "qwen3", tokens_per_micro_batch=20, model_options=ADAPTERS)
    run_teacher(layout, models / "qwen3", out / "data-teacher")
    resume_on_the_other_layout(layout, models, out / "data-checkpoints")
    for name in LOSSES:
        run_loss(layout, models, out / "data-losses" / name, name)
    one_sample_on_two_copies(layout, models)
    guards_decide_alike(layout, models)
    all_ranks_give_a_step_up(layout, models)
    each_copy_holds_half_of_the_optimizer(layout, models)
    the_first_rank_keeps_the_others_waiting(layout, models)
    layout.stop()


class RecordingChannel(RankChannel):
    """Remembers what it carried."""

    def __init__(self, layout: ParallelLayout) -> None:
        super().__init__(layout)
        self.orders: list[str] = []
        self.kept_alive = threading.Event()

    def send(self, document: Mapping[str, Any]) -> None:
        super().send(document)
        self.orders.append(document["do"])
        if self.orders.count("wait") >= 5:
            self.kept_alive.set()

    def receive(self) -> dict[str, Any]:
        document = super().receive()
        self.orders.append(document["do"])
        return document


def the_first_rank_keeps_the_others_waiting(layout: ParallelLayout, models: Path) -> None:
    """Its main thread does something else for as long as five signs of life; orders go on to be carried out whole."""
    channel = RecordingChannel(layout)
    trainer = PolicyTrainer(layout, Binary())
    if layout.rank == 0:
        policy = RankedPolicy(trainer, channel, keep_alive_seconds=0.01)
        policy.open(models / "qwen3")
        assert channel.kept_alive.wait(60.0)
        for _ in range(3):
            assert policy.snapshot().num_updates == 0
        policy.close()
    else:
        follow(trainer, channel)
        assert trainer.optimizer.num_updates == 0
    assert channel.orders.count("wait") >= 5
    assert [order for order in channel.orders if order != "wait"] == ["open", *["snapshot"] * 3, "end"]


def resume_on_the_other_layout(layout: ParallelLayout, models: Path, root: Path) -> None:
    """Two ranks continue the checkpoint of one rank that the test wrote, and write theirs."""
    checkpoint = CheckpointStore(root).latest_good()
    assert checkpoint is not None
    policy = PolicyTrainer(layout, Binary())
    policy.load(models / "qwen3")
    checkpoint.restore(policy)
    policy.train_step(random_samples(REWARDS, seed=1), RATE)
    snapshot = policy.snapshot()
    if snapshot is not None:
        CheckpointStore(root).save(snapshot, {}, step=2)


def one_sample_on_two_copies(layout: ParallelLayout, models: Path) -> None:
    """One rank has no micro-batch: both must make the same update, and the same refusal."""
    policy = PolicyTrainer(layout, Binary())
    policy.load(models / "qwen3")
    assert policy.train_step(random_samples([1.0]), RATE).changed
    refused = policy.train_step(random_samples([0.0]), RATE)
    assert refused.unchanged_reason is UnchangedReason.ZERO_ADVANTAGE
    for name, parameter in policy.model.named_parameters().items():
        largest = layout.max_over_data_ranks(parameter.detach().clone())
        assert torch.equal(largest, parameter), f"{name} differs between the copies"


def guards_decide_alike(layout: ParallelLayout, models: Path) -> None:
    """A step that is held, and one that drops a sample, leave all ranks in the same state and collective."""
    policy = PolicyTrainer(layout, Binary(), tokens_per_micro_batch=20)
    policy.load(models / "qwen3")
    batch = samples()
    before = {name: each.detach().clone() for name, each in policy.model.named_parameters().items()}
    held = policy.train_step(batch, RATE, StepControls(hold=(Bound("shift", "shift_mean_abs", high=1e-6),)))
    assert held.unchanged_reason is UnchangedReason.HELD
    for name, parameter in policy.model.named_parameters().items():
        assert torch.equal(before[name], parameter), f"{name} was changed by a held step"
    measured = {name: each.mean_absolute_shift for name, each in held.samples.items() if each.active_tokens}
    farthest = max(measured, key=lambda name: measured[name])
    limit = (sorted(measured.values())[-1] + sorted(measured.values())[-2]) / 2
    dropped = policy.train_step(batch, RATE, StepControls(drop=(Bound("shift", "shift_mean_abs", high=limit),)))
    assert (dropped.changed, list(dropped.dropped)) == (True, [farthest])
    for name, parameter in policy.model.named_parameters().items():
        largest = layout.max_over_data_ranks(parameter.detach().clone())
        assert torch.equal(largest, parameter), f"{name} differs between the copies"


def all_ranks_give_a_step_up(layout: ParallelLayout, models: Path) -> None:
    """One rank alone is told that the process is to end; orders go on afterwards."""
    for told in range(layout.world_size):
        asked = itertools.count()
        told_at = 2 if layout.rank == told else sys.maxsize  # a layer, or where ranks share them the third micro-batch
        channel = RankChannel(layout)
        trainer = PolicyTrainer(
            layout, Binary(), tokens_per_micro_batch=1, is_ending=lambda asked=asked, at=told_at: next(asked) >= at
        )
        if layout.rank == 0:
            policy = RankedPolicy(trainer, channel)
            policy.open(models / "qwen3")
            before = policy.snapshot()
            with tempfile.TemporaryDirectory() as folder:
                archived = BatchArchive(Path(folder), keep=1).write("lineage", 1, samples())
                try:
                    policy.train_step(samples(), archived, RATE, StepControls())
                except StepInterrupted:
                    pass
                else:
                    raise AssertionError(f"rank {told} was told to end, and the step went on")
            after = policy.snapshot()
            assert after.num_updates == 0
            for name, tensor in before.weights.items():
                assert torch.equal(tensor, after.weights[name]), f"{name} was changed by a step that was given up"
            policy.close()
        else:
            follow(trainer, channel)
            assert trainer.optimizer.num_updates == 0


def each_copy_holds_half_of_the_optimizer(layout: ParallelLayout, models: Path) -> None:
    """What distributing it is for."""
    policy = PolicyTrainer(layout, Binary(), model_options=BFLOAT16)
    policy.load(models / "qwen3")
    num_parameters = sum(parameter.numel() for parameter in policy.model.named_parameters().values())
    adam = policy.optimizer._adam  # pyright: ignore[reportPrivateUsage] - memory shows nowhere else
    held = sum(main.numel() for group in adam.param_groups for main in group["params"])
    assert num_parameters / 2 <= held < 0.6 * num_parameters
    for state in adam.state.values():
        assert {state[moment].numel() for moment in MOMENTS} <= {
            main.numel() for group in adam.param_groups for main in group["params"]
        }


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
