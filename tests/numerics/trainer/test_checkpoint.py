"""Checkpoints: exact resumption, and a good one to go back to whatever happens while one is written."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from clawstream.durable_files import remove_directory
from clawstream.errors import SettingsError, TurnLedgerError, TurnLedgerUnreadable
from services.trainer import checkpoint
from services.trainer.checkpoint import Checkpoint, CheckpointError, CheckpointStore, read_checkpoint
from services.trainer.policy import PolicyTrainer
from services.trainer.policy_models import ModelOptions
from services.trainer.progress import Progress
from tests.fixtures.training_samples import random_samples
from tests.numerics.trainer.conftest import assert_same_weights, snapshot

NewPolicy = Callable[..., PolicyTrainer]
RATE = 1e-3


class Killed(BaseException):
    """Stands for SIGKILL: no handler for Exception runs."""


def train(policy: PolicyTrainer, steps: range) -> None:
    for step in steps:
        policy.train_step(random_samples([1.0, -1.0, 1.0], seed=step), RATE)


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(new_policy: NewPolicy, tmp_path: Path) -> None:
    uninterrupted = new_policy()
    train(uninterrupted, range(4))
    first = new_policy()
    train(first, range(2))
    torch.manual_seed(99)
    store = CheckpointStore(tmp_path)
    store.save(snapshot(first), {"offsets": {"0": 17}, "trained": ["turn-1"]}, step=2)
    expected_random = torch.rand(3)

    second = new_policy()
    checkpoint = store.latest_good()
    assert checkpoint is not None
    checkpoint.restore(second)
    assert (checkpoint.step, checkpoint.num_updates) == (2, 2)
    assert checkpoint.progress == {"offsets": {"0": 17}, "trained": ["turn-1"]}
    assert torch.equal(torch.rand(3), expected_random)
    train(second, range(2, 4))
    assert_same_weights(snapshot(second).weights, snapshot(uninterrupted).weights)
    for name in ("exp_avg", "exp_avg_sq"):
        assert_same_weights(snapshot(second).moments[name], snapshot(uninterrupted).moments[name])


def test_a_bf16_run_resumes_from_its_fp32_main_parameters(new_policy: NewPolicy, tmp_path: Path) -> None:
    uninterrupted, first, second = (new_policy(model_options=ModelOptions(dtype=torch.bfloat16)) for _ in range(3))
    train(uninterrupted, range(3))
    train(first, range(2))
    CheckpointStore(tmp_path).save(snapshot(first), {}, step=2)
    checkpoint = CheckpointStore(tmp_path).latest_good()
    assert checkpoint is not None
    checkpoint.restore(second)
    train(second, range(2, 3))
    assert_same_weights(snapshot(second).weights, snapshot(uninterrupted).weights)


def test_a_snapshot_can_be_written_while_training_goes_on(new_policy: NewPolicy, tmp_path: Path) -> None:
    policy = new_policy()
    train(policy, range(1))
    taken = snapshot(policy)
    expected = {name: tensor.clone() for name, tensor in taken.weights.items()}
    with ThreadPoolExecutor(max_workers=1) as writer:
        saved = writer.submit(CheckpointStore(tmp_path).save, taken, {}, 1)
        train(policy, range(1, 3))
        saved.result()
    restored = new_policy()
    checkpoint = CheckpointStore(tmp_path).latest_good()
    assert checkpoint is not None
    checkpoint.restore(restored)
    assert_same_weights(snapshot(restored).weights, expected)


def failing_after(calls: int, error: BaseException, real: Callable[..., Any]) -> Callable[..., Any]:
    """A stand-in for a system call that fails from call number `calls` + 1 on."""
    made: list[int] = []

    def call(*arguments: Any, **options: Any) -> Any:
        made.append(1)
        if len(made) > calls:
            raise error
        return real(*arguments, **options)

    return call


def test_killed_at_any_sync_or_rename_the_previous_or_the_new_checkpoint_is_whole(
    new_policy: NewPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = new_policy()
    old = snapshot(policy)
    train(policy, range(1))
    new = snapshot(policy)
    outcomes: list[int] = []
    for system_call, module in (("fsync", os), ("rename", Path)):
        real = getattr(module, system_call)
        for calls in range(100):
            root = tmp_path / f"{system_call}-{calls}"
            store = CheckpointStore(root)
            store.save(old, {"step": 1}, step=1)
            failing = failing_after(calls, Killed(), real)
            with monkeypatch.context() as patch:
                patch.setattr(module, system_call, failing)
                try:
                    store.save(new, {"step": 2}, step=2)
                    died = False
                except Killed:
                    died = True
            checkpoint = CheckpointStore(root).latest_good()
            assert checkpoint is not None
            expected = old if checkpoint.step == 1 else new
            assert checkpoint.progress == {"step": checkpoint.step}  # never the progress of one with weights of another
            restored = new_policy()
            checkpoint.restore(restored)
            assert_same_weights(snapshot(restored).weights, expected.weights)
            outcomes.append(checkpoint.step)
            store.save(new, {"step": 2}, step=2)  # whatever was left behind is no obstacle
            assert read_checkpoint(root / "step-00000002").progress == {"step": 2}
            if not died:
                break
    assert {1, 2} == set(outcomes)
    assert outcomes.count(1) >= 8  # six files, two directories


def test_a_full_disk_leaves_the_last_checkpoint_and_no_litter(
    new_policy: NewPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = new_policy()
    store = CheckpointStore(tmp_path)
    store.save(snapshot(policy), {}, step=1)
    failing = failing_after(2, OSError(28, "No space left on device"), os.fsync)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(CheckpointError, match="No space left on device"):
            store.save(snapshot(policy), {}, step=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert store.latest_good() is not None


def test_an_old_checkpoint_that_cannot_be_removed_is_told_and_the_new_one_stands(
    new_policy: NewPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = new_policy()
    told: list[OSError] = []
    store = CheckpointStore(tmp_path, on_not_removed=told.append)
    for step in (1, 2):
        store.save(snapshot(policy), {}, step=step)
    with monkeypatch.context() as patch:
        busy = failing_after(0, OSError(16, "Device or resource busy"), remove_directory)
        patch.setattr(checkpoint, "remove_directory", busy)
        store.save(snapshot(policy), {}, step=3)
    assert ["Device or resource busy" in str(error) for error in told] == [True]
    newest = store.latest_good()
    assert newest is not None
    assert newest.step == 3
    store.save(snapshot(policy), {}, step=4)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000003", "step-00000004"]


@pytest.mark.parametrize("file", ["weights.safetensors", "exp_avg_sq.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_a_damaged_checkpoint_is_passed_over_and_reported(
    file: str, damage: str, new_policy: NewPolicy, tmp_path: Path
) -> None:
    taken = snapshot(new_policy())
    rejected: list[tuple[Path, str]] = []
    store = CheckpointStore(tmp_path, on_rejected=lambda directory, reason: rejected.append((directory, reason)))
    for step in (1, 2):
        store.save(taken, {"step": step}, step=step)
    path = tmp_path / "step-00000002" / file
    content = path.read_bytes()
    if damage == "cut":
        path.write_bytes(content[:-9])
    elif damage == "flip":
        path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    else:
        path.unlink()
    checkpoint = store.latest_good()
    assert checkpoint is not None
    assert checkpoint.step == 1
    assert [directory.name for directory, _ in rejected] == ["step-00000002"]


def test_a_checkpoint_whose_turns_are_not_remembered_is_passed_over_and_reported(
    new_policy: NewPolicy, tmp_path: Path
) -> None:
    taken = snapshot(new_policy())
    rejected: list[str] = []
    store = CheckpointStore(tmp_path, on_rejected=lambda _directory, reason: rejected.append(reason))
    for step in (1, 2):
        store.save(taken, {"step": step}, step=step)

    def check(found: Checkpoint) -> None:
        if found.progress["step"] == 2:
            raise TurnLedgerError("overwritten")

    found = store.latest_good(check)
    assert found is not None
    assert (found.step, rejected) == (1, ["overwritten"])

    def refuse(found: Checkpoint) -> None:
        raise TurnLedgerUnreadable("the disk does not answer")

    with pytest.raises(TurnLedgerUnreadable):  # Nothing is known of any of them: training must not begin anew.
        store.latest_good(refuse)


def test_a_checkpoint_of_another_format_is_refused_and_says_what_to_do() -> None:
    document = Progress(lineage="l", step=3).document()
    assert Progress.from_document(document).step == 3
    with pytest.raises(SettingsError, match="format 1, and this program reads 2: move the folder `checkpoints` away"):
        Progress.from_document({**document, "format": 1, "trained": {"turn": 1.0}})


def test_without_a_good_checkpoint_there_is_none(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "nothing").latest_good() is None
    (tmp_path / "step-00000001").mkdir()
    assert CheckpointStore(tmp_path).latest_good() is None


def test_only_the_newest_stay(new_policy: NewPolicy, tmp_path: Path) -> None:
    taken = snapshot(new_policy())
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3, 10):
        store.save(taken, {}, step=step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000010"]


def test_what_a_new_run_writes_outlives_torn_checkpoints_of_higher_steps(new_policy: NewPolicy, tmp_path: Path) -> None:
    taken = snapshot(new_policy())
    store = CheckpointStore(tmp_path, keep=2)
    for step in (8, 9):
        store.save(taken, {}, step=step)
        (tmp_path / f"step-{step:08d}" / "manifest.json").unlink()
    assert store.latest_good() is None
    for step in (0, 1):
        store.save(taken, {}, step=step)
        checkpoint = store.latest_good()
        assert checkpoint is not None
        assert checkpoint.step == step


def test_keeping_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 2"):
        CheckpointStore(tmp_path, keep=1)


def test_nothing_is_pickled(new_policy: NewPolicy, tmp_path: Path) -> None:
    directory = CheckpointStore(tmp_path).save(snapshot(new_policy()), {}, step=1)
    assert {path.suffix for path in directory.iterdir()} == {".safetensors", ".json"}
