# pyright: basic, reportAttributeAccessIssue=false
# Reason: a thin adapter around mbridge and safetensors; Megatron marks parameters with attributes of its own.
"""Parameters between Hugging Face's names and shapes and this rank's Megatron shards.

The conversion is mbridge's and a pure permutation of numbers, so export after import is bit-exact. It serves
anything that has a parameter's shape: weights, and also Adam's moments. That is why checkpoints can be read
back with another tensor-parallel size.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as distributed
from safetensors import SafetensorError, safe_open

from clawstream.errors import WeightsError
from services.trainer.engine.model import PolicyModel
from services.trainer.engine.parallel import ParallelLayout

ReadTensor = Callable[[str], torch.Tensor]
"""Gives the whole tensor of a Hugging Face name."""
PutTensor = Callable[[str, torch.Tensor], object]
"""Takes what belongs to a parameter of this rank, by Megatron's name and in its shape."""


@torch.no_grad()
def load_shards(model: PolicyModel, layout: ParallelLayout, read: ReadTensor, put: PutTensor) -> None:
    """Hands every parameter's shard of whole tensors to `put`.

    Raises WeightsError when a tensor is missing or has another shape than the model's configuration says.
    """
    bridge = model.bridge
    for name, parameter in model.named_parameters().items():
        hugging_face_names = bridge._weight_name_mapping_mcore_to_hf(name)
        whole = [read(hugging_face_name) for hugging_face_name in hugging_face_names]
        try:
            merged = bridge._weight_to_mcore_format(name, whole)
            shards = bridge._weight_split_across_tp(name, merged, parameter, layout.tensor_size)
            shard = shards[layout.tensor_rank]
        except (AssertionError, RuntimeError) as error:  # mbridge's views and asserts on shapes
            raise WeightsError(f"{hugging_face_names} do not fit the model's configuration: {error}") from error
        if shard.shape != parameter.shape:
            raise WeightsError(
                f"{hugging_face_names} give {tuple(shard.shape)}, but the model needs {tuple(parameter.shape)} ({name})"
            )
        put(name, shard)


@torch.no_grad()
def whole_tensors(
    model: PolicyModel, layout: ParallelLayout, sources: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields Hugging Face names and whole tensors, on every rank, from `sources` shaped like the parameters.

    A collective of the tensor-parallel group: every rank of it must consume the iterator to its end.
    The tensors may share memory with `sources`.
    """
    bridge = model.bridge
    for name, parameter in model.named_parameters().items():
        source = sources[name]
        if parameter.tensor_model_parallel and layout.tensor_size > 1:
            shards = [torch.empty_like(source) for _ in range(layout.tensor_size)]
            distributed.all_gather(shards, source.contiguous(), group=layout.tensor_group)
            whole = bridge._weight_merge_across_tp(name, shards, parameter)
        else:
            whole = source
        yield from zip(*bridge._weight_to_hf_format(name, whole), strict=True)


def load_hugging_face(model: PolicyModel, layout: ParallelLayout, directory: Path) -> None:
    """Loads the safetensors of a Hugging Face model directory into the model's parameters.

    Raises WeightsError naming the file or tensor that is missing or does not fit.
    """
    parameters = model.named_parameters()
    load_shards(
        model, layout, SafetensorsDirectory(directory).read, lambda name, shard: parameters[name].data.copy_(shard)
    )


class SafetensorsDirectory:
    """The tensors of all `*.safetensors` files of a directory, read one at a time."""

    def __init__(self, directory: Path, names: Iterable[str] = ()) -> None:
        """`names` limits the files; by default the index's files, or every `*.safetensors` file."""
        files = [directory / name for name in names]
        index = directory / "model.safetensors.index.json"
        if not files and index.exists():
            files = [directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        if not files:
            files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise WeightsError(f"{directory} holds no *.safetensors files")
        self._directory = directory
        self._file_of: dict[str, Path] = {}
        for file in files:
            if not file.is_file():
                raise WeightsError(f"{file} is missing")
            try:
                with safe_open(file, framework="pt") as tensors:
                    self._file_of.update(dict.fromkeys(tensors.keys(), file))
            except (SafetensorError, OSError) as error:
                raise WeightsError(f"{file} cannot be read: {error}; fetch or convert the model again") from error

    def read(self, name: str) -> torch.Tensor:
        """The tensor `name`, on the CPU. Raises WeightsError when no file holds it."""
        file = self._file_of.get(name)
        if file is None:
            raise WeightsError(f"{self._directory} holds no tensor {name!r}")
        with safe_open(file, framework="pt") as tensors:
            return tensors.get_tensor(name)
