"""Decode attention over slots of any lengths, against scaled_dot_product_attention row by row."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from services.engine.architecture import ModelArchitecture, read_architecture
from services.engine.decode_attention import decode_attention, plan_groups
from services.engine.key_value_cache import BLOCK_TOKENS, KeyValueCache
from services.engine.tiny_model import write_tiny_model

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 24
SLOTS = 9
CONTEXT_TOKENS = 5 * BLOCK_TOKENS + 1


@pytest.fixture(scope="module")
def architecture(tmp_path_factory: pytest.TempPathFactory) -> ModelArchitecture:
    """Three query heads on each key head."""
    directory: Path = tmp_path_factory.mktemp("model")
    write_tiny_model(directory)
    return replace(
        read_architecture(directory), num_layers=2, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM
    )


def random_cache(architecture: ModelArchitecture) -> KeyValueCache:
    """Every position of every slot is filled."""
    cache = KeyValueCache(architecture, SLOTS, CONTEXT_TOKENS)
    generator = torch.Generator().manual_seed(1)
    for memory in (*cache.keys, *cache.values):
        memory.copy_(torch.randn(memory.shape, generator=generator))
    return cache


def expected_attention(cache: KeyValueCache, slot: int, length: int, queries: Tensor) -> Tensor:
    """[heads, head_dim] -> the same, for the second layer"""
    keys, values = cache.read(1, slot, length)
    return scaled_dot_product_attention(
        queries.double().unsqueeze(1), keys.double(), values.double(), enable_gqa=True
    ).squeeze(1)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, SLOTS - 1), st.integers(1, CONTEXT_TOKENS)), min_size=1, unique_by=lambda row: row[0]
    ),
    left=st.sampled_from([0.0, torch.nan, torch.inf, -torch.inf]),
)
def test_every_row_attends_to_its_own_slot_up_to_its_length(
    architecture: ModelArchitecture, rows: list[tuple[int, int]], left: float
) -> None:
    """Whatever an earlier user of the slot has `left` behind it."""
    cache = random_cache(architecture)
    for slot, length in rows:
        positions = torch.arange(length, cache.blocks * BLOCK_TOKENS)
        rest = torch.full((len(positions), KV_HEADS, HEAD_DIM), left)
        cache.write(1, cache.places(torch.full_like(positions, slot), positions), rest, rest)
    queries = torch.randn(len(rows), HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(2))
    groups = plan_groups([slot for slot, _ in rows], [length for _, length in rows], HEADS, cache)
    attended = decode_attention(groups, queries, cache.keys[1], cache.values[1])
    expected = torch.stack(
        [expected_attention(cache, *row, queries[index]) for index, row in enumerate(rows)]
    )  # [rows, heads, head_dim]
    assert torch.allclose(attended.double(), expected, atol=2e-6)


def test_one_long_row_does_not_pad_the_short_ones(architecture: ModelArchitecture) -> None:
    cache = KeyValueCache(architecture, SLOTS, 40 * BLOCK_TOKENS)
    groups = plan_groups(list(range(SLOTS)), [3, 5, 2500, *[4] * 6], HEADS, cache)
    assert sorted(row for group in groups for row in group.rows.tolist()) == list(range(SLOTS))
    assert sum(group.is_unseen.numel() for group in groups) < 3 * 2500  # one rectangle would have 9 * 2500
    even = plan_groups(list(range(SLOTS)), [100 + row for row in range(SLOTS)], HEADS, cache)
    assert [group.rows.tolist() for group in even] == [list(range(SLOTS))]


def test_keys_written_at_positions_are_read_in_their_order(architecture: ModelArchitecture) -> None:
    cache = KeyValueCache(architecture, SLOTS, CONTEXT_TOKENS)
    length = 2 * BLOCK_TOKENS + 3
    keys = torch.randn(length, KV_HEADS, HEAD_DIM)
    values = torch.randn(length, KV_HEADS, HEAD_DIM)
    positions = torch.arange(length)
    cache.write(0, cache.places(torch.full((length,), 4), positions), keys, values)
    read_keys, read_values = cache.read(0, 4, length)
    assert torch.equal(read_keys, keys.transpose(0, 1))
    assert torch.equal(read_values, values.transpose(0, 1))
    cache.copy_prefix(4, 7, length - 1)
    copied_keys, copied_values = cache.read(0, 7, length - 1)
    assert torch.equal(copied_keys, read_keys[:, :-1])
    assert torch.equal(copied_values, read_values[:, :-1])
    assert not any(memory[5].any() for memory in (*cache.keys, *cache.values))
