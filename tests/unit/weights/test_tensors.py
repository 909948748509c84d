"""What an engine must be given: the tensors it has."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from clawstream.errors import WeightsError
from clawstream.weights.tensors import check_same_tensors, tensor_shapes
from services.engine.tiny_model import write_tiny_model

NORM = "model.norm.weight"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "base", seed=0)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "other", seed=1)


def test_shapes_are_those_that_the_library_reads(base: Path) -> None:
    tensors = load_file(base / "model.safetensors")
    assert tensor_shapes(base) == {name: tensor.shape for name, tensor in tensors.items()}


def test_other_values_fit_and_so_does_another_cut_into_files(base: Path, other: Path) -> None:
    check_same_tensors(other, base)
    tensors = load_file(other / "model.safetensors")
    (other / "model.safetensors").unlink()
    for number, name in enumerate(tensors):
        save_file({name: tensors[name]}, other / f"model-{number}.safetensors")
    check_same_tensors(other, base)


@pytest.mark.parametrize("change", ["shape", "missing", "unknown"])
def test_a_difference_is_named(base: Path, other: Path, change: str) -> None:
    tensors = load_file(other / "model.safetensors")
    if change == "shape":
        tensors[NORM] = tensors[NORM][:-2]
    elif change == "missing":
        del tensors[NORM]
    else:
        tensors["model.more.weight"] = tensors[NORM]
    save_file(tensors, other / "model.safetensors")
    with pytest.raises(WeightsError, match=r"model\.(norm|more)\.weight is .*1 differences"):
        check_same_tensors(other, base)


def test_what_follows_from_other_tensors_may_be_there_or_not(base: Path, other: Path) -> None:
    tensors = load_file(other / "model.safetensors")
    tensors["lm_head.weight"] = np.zeros((512, 64), dtype=np.float32)
    save_file(tensors, other / "model.safetensors")
    check_same_tensors(other, base)
    check_same_tensors(base, other)


def test_a_torn_file_is_no_version_and_no_reference(base: Path, other: Path, tmp_path: Path) -> None:
    file = other / "model.safetensors"
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(WeightsError, match="no safetensors file"):
        check_same_tensors(other, base)
    check_same_tensors(base, other)
    check_same_tensors(base, tmp_path / "no-such-directory")
