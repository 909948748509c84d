"""The engine's key-value memory: reserved for every slot, taken from the system only where something was written."""

from dataclasses import replace
from pathlib import Path

import psutil
import torch

from services.engine.architecture import read_architecture
from services.engine.key_value_cache import KeyValueCache
from services.engine.tiny_model import write_tiny_model

SLOTS = 16
CONTEXT_TOKENS = 65536


def test_a_cache_takes_memory_only_where_it_was_written(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    architecture = replace(read_architecture(tmp_path), num_layers=2, num_kv_heads=2, head_dim=16)
    process = psutil.Process()
    before = process.memory_info().rss
    cache = KeyValueCache(architecture, SLOTS, CONTEXT_TOKENS)
    size = sum(memory.nbytes for memory in (*cache.keys, *cache.values))
    assert size >= 2**28
    taken_at_start = process.memory_info().rss - before
    assert taken_at_start < size / 20, f"{taken_at_start} of {size} bytes are taken before the first request"
    cache.keys[0][3, :, :64] = 1.0
    cache.copy_prefix(3, 5, 64)
    assert process.memory_info().rss - before < size / 20


def test_a_cache_starts_as_zeros(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    cache = KeyValueCache(read_architecture(tmp_path), 2, 32)
    assert all(memory.dtype == torch.float32 and not memory.any() for memory in (*cache.keys, *cache.values))
