"""Two processes over gloo: tensor and data parallelism compute what one process does."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from clawstream.errors import SettingsError
from services.trainer.algorithms.binary import Binary
from services.trainer.checkpoint import CheckpointStore
from services.trainer.engine.parallel import ParallelLayout
from services.trainer.policy import PolicyTrainer
from services.trainer.policy_snapshot import PolicySnapshot
from services.trainer.sample import StepResult
from tests.fixtures.training_samples import random_samples
from tests.numerics.trainer.conftest import snapshot
from tests.numerics.trainer.parallel_worker import ADAPTERS, BFLOAT16, LOSSES, RATE, REWARDS, samples, step_of, taught
from tests.numerics.trainer.tiny_models import ARCHITECTURES

pytestmark = pytest.mark.slow

NewPolicy = Callable[..., PolicyTrainer]
LAYOUTS = [*(("tensor", architecture) for architecture in ARCHITECTURES), ("data", "qwen3")]
OPTIONS = [("data-bfloat16", "qwen3"), ("tensor-lora", "qwen2"), ("tensor-lora", "qwen3"), ("data-lora", "qwen3")]


@pytest.fixture(scope="module")
def two_processes(
    tmp_path_factory: pytest.TempPathFactory, model_directory: Callable[[str], Path], layout: ParallelLayout
) -> Path:
    """The directory that the worker filled. One launch for all tests: importing Megatron twice takes seconds."""
    models, out = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("parallel")
    for architecture in ARCHITECTURES:
        (models / architecture).symlink_to(model_directory(architecture))
    policy = PolicyTrainer(layout, Binary())
    policy.load(models / "qwen3")
    policy.train_step(samples(), RATE)
    for kind in ("tensor", "data"):
        CheckpointStore(out / f"{kind}-checkpoints").save(snapshot(policy), {}, step=1)
    worker = Path(__file__).with_name("parallel_worker.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(worker)]
    root = str(Path(__file__).parents[3])
    finished = subprocess.run(
        [*launch, str(models), str(out)],
        env=os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    return out


def one_process(
    new_policy: NewPolicy, architecture: str, **options: object
) -> tuple[list[torch.Tensor], StepResult, PolicySnapshot]:
    policy = new_policy(architecture, **options)
    scores = [torch.as_tensor(score) for score in policy.score(samples())]
    if "lora" in options:
        policy.train_step(samples(), RATE)
    result = policy.train_step(samples(), RATE)
    return scores, result, snapshot(policy)


@pytest.mark.parametrize(("kind", "architecture"), LAYOUTS)
def test_log_probs_are_the_same(kind: str, architecture: str, two_processes: Path, new_policy: NewPolicy) -> None:
    """One process equals Hugging Face (test_weights), so two do. The vocabulary is odd: a padded column would show."""
    scores, _, _ = one_process(new_policy, architecture)
    found = load_file(two_processes / kind / architecture / "scores.safetensors")
    for index, score in enumerate(scores):
        torch.testing.assert_close(found[str(index)], score, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("kind", "architecture"), [*LAYOUTS, *OPTIONS])
def test_gradients_and_weights_after_a_step_are_the_same(
    kind: str, architecture: str, two_processes: Path, new_policy: NewPolicy
) -> None:
    # bf16 rounds a micro-batch's gradients, so there both must cut the batch the same.
    options: dict[str, object] = {}
    if kind == "data-bfloat16":
        options = {"model_options": BFLOAT16, "tokens_per_micro_batch": 20}
    elif kind.endswith("-lora"):
        options = {"model_options": ADAPTERS}
    _, result, expected = one_process(new_policy, architecture, **options)
    directory = two_processes / kind / architecture
    found = json.loads((directory / "result.json").read_text())
    for name in ("loss", "gradient_norm", "entropy_mean", "active_tokens", "effective_sample_share", "shift_max_abs"):
        assert found["metrics"][name] == pytest.approx(result.metrics[name], rel=1e-4, abs=1e-6), name
    for sample_id, statistics in result.samples.items():
        assert found["losses"][sample_id] == pytest.approx(statistics.loss, rel=1e-4, abs=1e-6)
    # After one update Adam's first moment is a tenth of the clipped gradient: every gradient is compared.
    gradients = load_file(directory / "exp_avg.safetensors")
    assert gradients.keys() == expected.moments["exp_avg"].keys()
    for name, gradient in expected.moments["exp_avg"].items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    weights = load_file(directory / "weights.safetensors")
    for name, tensor in expected.weights.items():
        assert (weights[name] - tensor).abs().mean() < 1e-3 * RATE, name


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("kind", ["tensor-losses", "data-losses"])
def test_every_loss_is_the_same(
    kind: str, name: str, two_processes: Path, layout: ParallelLayout, model_directory: Callable[[str], Path]
) -> None:
    result, moments = step_of(layout, model_directory("qwen3"), name)
    found = json.loads((two_processes / kind / name / "result.json").read_text())
    assert found["metrics"].keys() == result.metrics.keys()
    for metric, value in result.metrics.items():
        assert found["metrics"][metric] == pytest.approx(value, rel=1e-3, abs=1e-5), metric
    for sample_id, statistics in result.samples.items():
        assert found["losses"][sample_id] == pytest.approx(statistics.loss, rel=1e-3, abs=1e-5)
    for tensor, moment in load_file(two_processes / kind / name / "exp_avg.safetensors").items():
        torch.testing.assert_close(moment, moments[tensor], rtol=5e-3, atol=1e-5, msg=lambda m, n=tensor: f"{n}: {m}")


@pytest.mark.parametrize("kind", ["tensor-teacher", "data-teacher"])
def test_the_own_teacher_says_the_same(
    kind: str, two_processes: Path, layout: ParallelLayout, model_directory: Callable[[str], Path]
) -> None:
    expected = taught(layout, model_directory("qwen3"))
    found = load_file(two_processes / kind / "taught.safetensors")
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=0, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", ["tensor", "data"])
def test_a_checkpoint_of_one_process_continues_on_two(kind: str, two_processes: Path, new_policy: NewPolicy) -> None:
    policy = new_policy("qwen3")
    policy.train_step(samples(), RATE)
    policy.train_step(random_samples(REWARDS, seed=1), RATE)
    checkpoint = CheckpointStore(two_processes / f"{kind}-checkpoints").latest_good()
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.num_updates) == (2, 2)
    resumed = new_policy("qwen3")
    checkpoint.restore(resumed)
    expected = snapshot(policy)
    for name, tensor in snapshot(resumed).moments["exp_avg"].items():
        torch.testing.assert_close(tensor, expected.moments["exp_avg"][name], rtol=1e-3, atol=1e-6)


def test_processes_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(SettingsError, match="does not divide the 1 processes"):
        ParallelLayout.start(tensor_parallel_size=2)
