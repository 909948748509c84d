"""Attention of the decode rows: one query token each, over the keys and values of slots of any lengths.

A few query rows on long keys are no shape for matrix products: on CPUs they run at a fifth of their speed, and padding
to the longest slot is read too. But both products of attention are weighted sums of rows of the cache:

- the scores of a block of tokens are the sum over d of query[d] * keys[block, d, :] (keys are transposed in blocks);
- the result is the sum over tokens of weight[token] * values[token, :].

`embedding_bag` computes just that for ragged lists of rows, on x86 by FBGEMM's generated code, which fetches ahead and
runs on all threads. Keys and values are read in place, those of no other position, and none is repeated for the query
heads that share them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

from services.engine.key_value_cache import BLOCK_TOKENS, KeyValueCache

LARGEST_PADDING_RATIO = 2.0
"""Rows share a rectangle of scores while it has at most this many times their keys."""
FREE_PADDING_TOKENS = 1024
"""Padding of this much is never worth another group."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows of similar lengths, and which rows of a layer's cache they sum. Computed once for all layers.

    Row numbers are int32: more than that many rows would be a cache of 500 GB.
    """

    rows: Tensor
    """[group_rows] decode rows of the step"""
    query_rows: Tensor
    """[key_bags] (group row, head) of each block of keys that is read: its query is the bag's weights"""
    key_rows: Tensor
    """[key_bags * head_dim] rows of the keys as [.., BLOCK_TOKENS]"""
    key_offsets: Tensor
    """[group_rows * heads * blocks + 1] where each bag starts; bags beyond a row's last block are empty"""
    is_unseen: Tensor
    """[group_rows, 1, blocks * BLOCK_TOKENS] keys behind a row's last token: whatever is there, NaN too, is nothing"""
    weight_positions: Tensor
    """[value_rows] positions in the flat weights [group_rows, heads, blocks * BLOCK_TOKENS]"""
    value_rows: Tensor
    """[value_rows] rows of the values as [.., head_dim], in the order of `weight_positions`"""
    value_offsets: Tensor
    """[group_rows * heads + 1]"""

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[group_rows, heads, head_dim] -> the same, in fp32. `keys` and `values`: the cache's, of one layer."""
        num_rows, heads, head_dim = queries.shape
        scaled = queries * head_dim**-0.5
        scores = embedding_bag(
            self.key_rows,
            keys.view(-1, BLOCK_TOKENS),
            self.key_offsets,
            mode="sum",
            per_sample_weights=scaled.reshape(-1, head_dim).index_select(0, self.query_rows).view(-1),
            include_last_offset=True,
        )  # [group_rows * heads * blocks, BLOCK_TOKENS]
        # Filled, not added to: NaN plus -inf is NaN.
        scores = scores.view(num_rows, heads, -1).masked_fill_(self.is_unseen, -torch.inf)
        weights = scores.softmax(dim=-1).view(-1).index_select(0, self.weight_positions)
        attended = embedding_bag(
            self.value_rows,
            values.view(-1, head_dim),
            self.value_offsets,
            mode="sum",
            per_sample_weights=weights,
            include_last_offset=True,
        )  # [group_rows * heads, head_dim]
        return attended.view(num_rows, heads, head_dim)


def decode_attention(groups: Sequence[DecodeGroup], queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """[decode_rows, heads, head_dim] -> the same, in fp32; `groups` hold each row once."""
    if len(groups) == 1:
        return groups[0].attend(queries, keys, values)
    attended = torch.empty(queries.shape)
    for group in groups:
        attended[group.rows] = group.attend(queries[group.rows], keys, values)
    return attended


def plan_groups(slots: Sequence[int], lengths: Sequence[int], heads: int, cache: KeyValueCache) -> list[DecodeGroup]:
    """Groups for decode rows of these slots that see so many keys: one, unless padding would cost too much."""
    members: list[list[int]] = []
    keys = 0
    for row in sorted(range(len(slots)), key=lambda row: lengths[row], reverse=True):
        rectangle = lengths[members[-1][0]] * (len(members[-1]) + 1) if members else 0
        if not members or rectangle > LARGEST_PADDING_RATIO * (keys + lengths[row]) + FREE_PADDING_TOKENS:
            members.append([])
            keys = 0
        members[-1].append(row)
        keys += lengths[row]
    return [plan_group(sorted(rows), slots, lengths, heads, cache) for rows in members]


def plan_group(
    rows: Sequence[int], slots: Sequence[int], lengths: Sequence[int], heads: int, cache: KeyValueCache
) -> DecodeGroup:
    """The lists of the group of these `rows`; `slots` and `lengths` of all decode rows."""
    key_counts = torch.tensor([lengths[row] for row in rows]).view(-1, 1)  # [group_rows, 1]
    blocks = -(-max(lengths[row] for row in rows) // BLOCK_TOKENS)
    # Where each head's keys and values start, in units of a slot's kv head: [group_rows, heads, 1]
    kv_heads = torch.arange(heads) // (heads // cache.num_kv_heads)
    group_slots = torch.tensor([slots[row] for row in rows]).view(-1, 1)
    regions = (group_slots * cache.num_kv_heads + kv_heads).unsqueeze(-1)

    block_index = torch.arange(blocks)
    block_is_read = (block_index * BLOCK_TOKENS < key_counts).unsqueeze(1).expand(-1, heads, -1).reshape(-1)
    bags = block_is_read.nonzero().squeeze(1)  # [key_bags] among group_rows * heads * blocks
    first_key_rows = ((regions * cache.blocks + block_index) * cache.head_dim).view(-1).index_select(0, bags)

    tokens = torch.arange(blocks * BLOCK_TOKENS)
    is_seen = tokens < key_counts  # [group_rows, tokens]
    weight_positions = is_seen.unsqueeze(1).expand(-1, heads, -1).reshape(-1).nonzero().squeeze(1)
    all_value_rows = (regions * (cache.blocks * BLOCK_TOKENS) + tokens).view(-1)  # [group_rows * heads * tokens]
    return DecodeGroup(
        rows=torch.tensor(rows),
        query_rows=bags // blocks,
        key_rows=(first_key_rows.unsqueeze(1) + torch.arange(cache.head_dim)).view(-1).int(),
        key_offsets=pad(block_is_read.cumsum(0) * cache.head_dim, (1, 0)).int(),
        is_unseen=~is_seen.unsqueeze(1),
        weight_positions=weight_positions,
        value_rows=all_value_rows.index_select(0, weight_positions).int(),
        value_offsets=pad(key_counts.expand(-1, heads).reshape(-1).cumsum(0), (1, 0)).int(),
    )
