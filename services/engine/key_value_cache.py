"""Keys and values of all slots, in the layouts in which decode attention sums rows of them (see `decode_attention`)."""

import math
from dataclasses import dataclass
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

import torch
from torch import Tensor

from services.engine.architecture import ModelArchitecture

BLOCK_TOKENS = 64
"""Tokens whose keys lie side by side."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where rows of a step go, the same in every layer."""

    slots: Tensor
    """[rows]"""
    positions: Tensor
    """[rows] in their sequences"""
    blocks: Tensor
    """[rows] block of keys of each position"""
    columns: Tensor
    """[rows] place of each position in its block"""


class KeyValueCache:
    """Keys and values of all slots, allocated once. The system gives memory only to the pages that are written.

    In fp32 also beside bf16 weights: scores and sums of attention are fp32, and decode attention reads in place.
    """

    def __init__(self, architecture: ModelArchitecture, slots: int, context_tokens: int) -> None:
        """`context_tokens` is rounded up to whole blocks."""
        self.num_kv_heads, self.head_dim = architecture.num_kv_heads, architecture.head_dim
        self.blocks = -(-context_tokens // BLOCK_TOKENS)
        heads = (slots, self.num_kv_heads)
        keys_shape = (*heads, self.blocks, self.head_dim, BLOCK_TOKENS)
        self.keys = [_untouched_zeros(keys_shape) for _ in range(architecture.num_layers)]
        """Per layer [slots, kv_heads, blocks, head_dim, BLOCK_TOKENS]: transposed within each block of tokens"""
        values_shape = (*heads, self.blocks * BLOCK_TOKENS, self.head_dim)
        self.values = [_untouched_zeros(values_shape) for _ in range(architecture.num_layers)]
        """Per layer [slots, kv_heads, blocks * BLOCK_TOKENS, head_dim]"""

    def places(self, slots: Tensor, positions: Tensor) -> Places:
        """For `write`. Both [rows]."""
        return Places(slots, positions, positions // BLOCK_TOKENS, positions % BLOCK_TOKENS)

    def write(self, layer: int, places: Places, keys: Tensor, values: Tensor) -> None:
        """`keys` and `values` [rows, kv_heads, head_dim], in any float dtype."""
        self.keys[layer][places.slots, :, places.blocks, :, places.columns] = keys.float()
        self.values[layer][places.slots, :, places.positions] = values.float()

    def read(self, layer: int, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys (a copy) and values of the first `length` positions of a slot, each [kv_heads, length, head_dim]."""
        blocks = -(-length // BLOCK_TOKENS)
        keys = self.keys[layer][slot, :, :blocks].transpose(2, 3).reshape(self.num_kv_heads, -1, self.head_dim)
        return keys[:, :length], self.values[layer][slot, :, :length]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another, and what follows them in their last block."""
        blocks = -(-length // BLOCK_TOKENS)
        for memory in self.keys:
            memory[target, :, :blocks] = memory[source, :, :blocks]
        for memory in self.values:
            memory[target, :, :length] = memory[source, :, :length]


def _untouched_zeros(shape: tuple[int, ...]) -> Tensor:
    """Zeros whose pages take no memory until they are written: `torch.zeros` writes them all (3 GB for SmolLM2)."""
    memory = mmap(-1, math.prod(shape) * torch.float32.itemsize, MAP_PRIVATE | MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.float32).view(shape)
