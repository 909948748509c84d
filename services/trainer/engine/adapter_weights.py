# pyright: basic, reportAttributeAccessIssue=false
# Reason: a thin adapter around mbridge; Megatron marks parameters with attributes of its own.
"""LoRA adapters between PEFT's names and shapes and this rank's shards, as `weights` does it for whole models.

A fused module has one A, which PEFT's form holds once per projection; reading takes the first. Like `weights`, this
serves anything that has a parameter's shape: Adam's moments too.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as distributed

from clawstream.errors import WeightsError
from services.trainer.engine.lora import HUGGING_FACE_MODULES, LoraSettings
from services.trainer.engine.model import PolicyModel
from services.trainer.engine.parallel import ParallelLayout
from services.trainer.engine.weights import PutTensor, ReadTensor

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
_NAME = re.compile(r"decoder\.layers\.(\d+)\..*\.(linear_\w+)\.lora_([ab])")


def adapter_config(settings: LoraSettings, base_directory: Path) -> dict[str, object]:
    """PEFT's `adapter_config.json`. `base_directory` holds the model that the adapters belong to."""
    projections = [name.rpartition(".")[2] for module in settings.modules for name in HUGGING_FACE_MODULES[module]]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base_directory.resolve()),
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(projections),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def check_adapter_config(directory: Path, settings: LoraSettings) -> None:
    """Raises WeightsError when the adapters in `directory` are not of these settings: they could not be continued."""
    found = json.loads((directory / CONFIG_NAME).read_text())
    wanted = adapter_config(settings, Path())
    for field in ("r", "lora_alpha", "target_modules"):
        if found[field] != wanted[field]:
            raise WeightsError(
                f"{directory / CONFIG_NAME}: {field} is {found[field]}, but the settings under trainer.lora say "
                f"{wanted[field]}; adapters are continued with the settings they were begun with"
            )


@torch.no_grad()
def whole_adapters(
    model: PolicyModel, layout: ParallelLayout, sources: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields PEFT's names and whole tensors from `sources` shaped like the adapters.

    A collective of the tensor-parallel group: every rank of it must consume the iterator to its end.
    """
    for name, parameter in model.adapters.items():
        source = sources[name]
        if parameter.tensor_model_parallel and layout.tensor_size > 1:
            shards = [torch.empty_like(source) for _ in range(layout.tensor_size)]
            distributed.all_gather(shards, source.contiguous(), group=layout.tensor_group)
            source = model.bridge._weight_merge_across_tp(_weight_name(name), shards, parameter)
        names = _peft_names(name)
        pieces = _split(model, name, source) if name.endswith("lora_b") else [source] * len(names)
        yield from zip(names, pieces, strict=True)


@torch.no_grad()
def load_adapters(model: PolicyModel, layout: ParallelLayout, read: ReadTensor, put: PutTensor) -> None:
    """Hands every adapter's shard of whole tensors to `put`. Raises WeightsError for what is missing or misshapen."""
    for name, parameter in model.adapters.items():
        names = _peft_names(name)
        whole = _join(model, name, [read(each) for each in names]) if name.endswith("lora_b") else read(names[0])
        if parameter.tensor_model_parallel and layout.tensor_size > 1:
            shards = model.bridge._weight_split_across_tp(_weight_name(name), whole, parameter, layout.tensor_size)
            whole = shards[layout.tensor_rank]
        if whole.shape != parameter.shape:
            raise WeightsError(f"{names} give {tuple(whole.shape)}, but {name} needs {tuple(parameter.shape)}")
        put(name, whole)


def _weight_name(name: str) -> str:
    """mbridge knows how the rows of a fused weight are spread over ranks; those of B are spread as they are."""
    return name.replace(".lora_b", ".weight")


def _parts(name: str) -> tuple[str, str, str]:
    match = _NAME.fullmatch(name)
    assert match is not None, name
    return match.group(1), match.group(2), match.group(3)


def _peft_names(name: str) -> list[str]:
    layer, module, letter = _parts(name)
    return [
        f"base_model.model.model.layers.{layer}.{projection}.lora_{letter.upper()}.weight"
        for projection in HUGGING_FACE_MODULES[module]
    ]


def _rows_per_group(model: PolicyModel) -> list[int]:
    """Rows of queries, keys and values in one query group of a fused projection."""
    config = model.hugging_face_config
    queries = config.num_attention_heads // config.num_key_value_heads * config.head_dim
    return [queries, config.head_dim, config.head_dim]


def _split(model: PolicyModel, name: str, whole: torch.Tensor) -> list[torch.Tensor]:
    """[out, rank] of a fused module to its projections."""
    _, module, _ = _parts(name)
    rank = whole.size(1)
    if module == "linear_qkv":
        rows = _rows_per_group(model)
        groups = whole.view(-1, sum(rows), rank)  # [groups, rows of a group, rank]
        return [piece.reshape(-1, rank) for piece in groups.split(rows, dim=1)]
    return list(whole.chunk(len(HUGGING_FACE_MODULES[module])))


def _join(model: PolicyModel, name: str, pieces: list[torch.Tensor]) -> torch.Tensor:
    """The reverse of `_split`."""
    _, module, _ = _parts(name)
    if module == "linear_qkv":
        rank, groups = pieces[0].size(1), model.hugging_face_config.num_key_value_heads
        return torch.cat([piece.view(groups, -1, rank) for piece in pieces], dim=1).view(-1, rank)
    return torch.cat(pieces)
