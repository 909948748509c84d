"""The forward pass of one step: decode rows and prompt chunks of many requests packed into one batch, no padding.

Every request owns a slot of preallocated key-value memory. A step feeds each request the tokens that its slot does not
hold yet: one for a running answer, a chunk for a prompt. Linears see all rows at once; attention is batched over the
decode rows and computed per sequence for chunks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm, scaled_dot_product_attention, silu

from services.engine.architecture import ModelArchitecture
from services.engine.rope import rotary_tables, rotate
from services.engine.weights import LayerWeights, ModelWeights

LARGEST_PADDING_RATIO = 2.0
"""Decode attention is batched while the padded rectangle is at most this many times the real keys."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one request that enter its slot in this step."""

    slot: int
    start: int
    """Position of the first token; everything before it is in the slot already."""
    token_ids: Sequence[int]
    """[length], at least one"""


class KeyValueCache:
    """Keys and values of all slots, allocated once. The system gives memory only to the pages that are written."""

    def __init__(self, architecture: ModelArchitecture, slots: int, context_tokens: int, dtype: torch.dtype) -> None:
        shape = (slots, architecture.num_kv_heads, context_tokens, architecture.head_dim)
        # Zeros, not empty: attention multiplies masked positions by 0, and 0 times a stray NaN is NaN.
        self.keys = [_untouched_zeros(shape, dtype) for _ in range(architecture.num_layers)]
        self.values = [_untouched_zeros(shape, dtype) for _ in range(architecture.num_layers)]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""
        for memory in (*self.keys, *self.values):
            memory[target, :, :length] = memory[source, :, :length]

    def clear(self, slot: int) -> None:
        """Zero one slot, so that non-finite values in it cannot reach its next user."""
        for memory in (*self.keys, *self.values):
            memory[slot].zero_()


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros whose pages take no memory until they are written: `torch.zeros` writes them all (3 GB for SmolLM2)."""
    memory = mmap(-1, math.prod(shape) * dtype.itemsize, MAP_PRIVATE | MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Where the rows of a step go, computed once for all layers."""

    slots: Tensor
    """[rows] slot of each row"""
    positions: Tensor
    """[rows] position of each row in its sequence"""
    cosines: Tensor
    """[rows, 1, head_dim]"""
    sines: Tensor
    """[rows, 1, head_dim], signed for `rotate`"""
    decode_slots: list[int]
    """[decode_rows] slots of the first rows: those with one token each"""
    decode_lengths: list[int]
    """[decode_rows] keys that each of them sees, its own included"""
    decode_mask: Tensor | None
    """[slot_range, 1, 1, longest] to add to the scores; None when decode attention runs per sequence"""
    chunks: list[tuple[Chunk, int, Tensor | None]]
    """Longer chunks: the chunk, its first row, and its mask [length, start + length] (None: plain causal)"""


class Transformer:
    """Computes steps. Holds the cache and the rotary tables; the weights come with each call."""

    def __init__(self, architecture: ModelArchitecture, slots: int, context_tokens: int, dtype: torch.dtype) -> None:
        self.architecture = architecture
        self.dtype = dtype
        self.cache = KeyValueCache(architecture, slots, context_tokens, dtype)
        self._cosines, self._sines = rotary_tables(architecture, context_tokens, dtype)

    def step(self, weights: ModelWeights, chunks: Sequence[Chunk], logit_rows: Sequence[int]) -> Tensor:
        """Write the chunks into the cache and return fp32 logits [len(logit_rows), vocabulary] of the chosen rows.

        Rows are numbered through the chunks in their order; chunks of one token must come first.
        """
        layout = self._layout(chunks)
        token_ids = torch.tensor([token for chunk in chunks for token in chunk.token_ids])  # [rows]
        hidden = embedding(token_ids, weights.embedding)  # [rows, hidden]
        last = len(weights.layers) - 1
        # Of the last layer the cache wants all rows, but only those with logits are computed past its attention.
        kept = torch.tensor(logit_rows) if 0 < len(logit_rows) < hidden.shape[0] else None
        for index, layer in enumerate(weights.layers):
            hidden = self._layer(index, layer, hidden, layout, kept if index == last else None)
        if not logit_rows:
            return hidden.new_empty((0, self.architecture.vocabulary_size), dtype=torch.float32)
        normed = rms_norm(hidden, weights.final_norm.shape, weights.final_norm, self.architecture.norm_epsilon)
        return weights.output(normed).float()

    def _layer(
        self, index: int, layer: LayerWeights, hidden: Tensor, layout: StepLayout, kept: Tensor | None
    ) -> Tensor:
        """[rows, hidden] -> [rows, hidden], or the `kept` [kept_rows] of these rows"""
        architecture = self.architecture
        epsilon = architecture.norm_epsilon
        num_rotated = architecture.num_heads + architecture.num_kv_heads

        normed = rms_norm(hidden, layer.attention_norm.shape, layer.attention_norm, epsilon)
        heads = layer.query_key_value(normed).view(hidden.shape[0], -1, architecture.head_dim)  # [rows, h + 2 kv, d]
        rotated = heads[:, :num_rotated]
        if layer.head_norm is not None:
            rotated = rms_norm(rotated, (architecture.head_dim,), None, epsilon) * layer.head_norm
        rotated = rotate(rotated, layout.cosines, layout.sines)
        self.cache.keys[index][layout.slots, :, layout.positions] = rotated[:, architecture.num_heads :]
        self.cache.values[index][layout.slots, :, layout.positions] = heads[:, num_rotated:]
        attended = self._attention(index, rotated[:, : architecture.num_heads], layout)  # [rows, heads * head_dim]
        if kept is not None:
            attended, hidden = attended[kept], hidden[kept]
        hidden = layer.attention_output.added_to(hidden, attended)

        normed = rms_norm(hidden, layer.feed_forward_norm.shape, layer.feed_forward_norm, epsilon)
        gate, up = layer.gate_up(normed).chunk(2, dim=-1)  # each [rows, intermediate]
        return layer.down.added_to(hidden, silu(gate).mul_(up))

    def _attention(self, index: int, queries: Tensor, layout: StepLayout) -> Tensor:
        """`queries` [rows, heads, head_dim] -> [rows, heads * head_dim]"""
        architecture = self.architecture
        rows, groups, head_dim = queries.shape[0], architecture.num_kv_heads, architecture.head_dim
        keys, values = self.cache.keys[index], self.cache.values[index]
        grouped = queries.view(rows, groups, -1, head_dim)  # [rows, kv_heads, query heads of each, head_dim]
        parts: list[Tensor] = []
        decode_rows = len(layout.decode_slots)
        if layout.decode_mask is not None:
            parts.append(self._batched_decode_attention(grouped[:decode_rows], keys, values, layout))
        else:
            for row, (slot, length) in enumerate(zip(layout.decode_slots, layout.decode_lengths, strict=True)):
                slot_keys, slot_values = keys[slot : slot + 1, :, :length], values[slot : slot + 1, :, :length]
                parts.append(scaled_dot_product_attention(grouped[row : row + 1], slot_keys, slot_values))
        for chunk, first, mask in layout.chunks:
            length = len(chunk.token_ids)
            total = chunk.start + length
            # The query heads of a group share keys by a stride of 0: [kv_heads, query heads of each, length, head_dim].
            chunk_queries = grouped[first : first + length].permute(1, 2, 0, 3)
            shape = (groups, chunk_queries.shape[1], total, head_dim)
            attended = scaled_dot_product_attention(
                chunk_queries,
                keys[chunk.slot, :, :total].unsqueeze(1).expand(shape),
                values[chunk.slot, :, :total].unsqueeze(1).expand(shape),
                attn_mask=mask,
                is_causal=mask is None,
            )
            parts.append(attended.permute(2, 0, 1, 3))
        joined = torch.cat(parts) if len(parts) > 1 else parts[0]
        return joined.reshape(rows, -1)

    def _batched_decode_attention(self, queries: Tensor, keys: Tensor, values: Tensor, layout: StepLayout) -> Tensor:
        """All decode rows at once over the range of slots they lie in; rows of idle slots are computed and dropped."""
        assert layout.decode_mask is not None
        slot_range, longest = layout.decode_mask.shape[0], layout.decode_mask.shape[-1]
        dense = layout.decode_slots == list(range(slot_range))
        decode_slots = layout.slots[: len(layout.decode_slots)]
        if not dense:
            scattered = queries.new_zeros((slot_range, *queries.shape[1:]))
            scattered[decode_slots] = queries
            queries = scattered
        attended = scaled_dot_product_attention(
            queries, keys[:slot_range, :, :longest], values[:slot_range, :, :longest], attn_mask=layout.decode_mask
        )
        return attended if dense else attended[decode_slots]

    def _layout(self, chunks: Sequence[Chunk]) -> StepLayout:
        positions: list[int] = []
        slots: list[int] = []
        longer: list[tuple[Chunk, int, Tensor | None]] = []
        decode_slots: list[int] = []
        decode_lengths: list[int] = []
        for chunk in chunks:
            length = len(chunk.token_ids)
            if length == 1:
                assert not longer, "chunks of one token come first"
                decode_slots.append(chunk.slot)
                decode_lengths.append(chunk.start + 1)
            else:
                longer.append((chunk, len(positions), self._chunk_mask(chunk)))
            positions.extend(range(chunk.start, chunk.start + length))
            slots.extend([chunk.slot] * length)
        position_index = torch.tensor(positions)
        return StepLayout(
            slots=torch.tensor(slots),
            positions=position_index,
            cosines=self._cosines[position_index].unsqueeze(1),
            sines=self._sines[position_index].unsqueeze(1),
            decode_slots=decode_slots,
            decode_lengths=decode_lengths,
            decode_mask=self._decode_mask(decode_slots, decode_lengths),
            chunks=longer,
        )

    def _chunk_mask(self, chunk: Chunk) -> Tensor | None:
        if chunk.start == 0:
            return None
        length = len(chunk.token_ids)
        blocked = torch.full((length, chunk.start + length), -torch.inf, dtype=self.dtype)
        return blocked.triu(diagonal=chunk.start + 1)

    def _decode_mask(self, decode_slots: list[int], decode_lengths: list[int]) -> Tensor | None:
        if not decode_slots:
            return None
        slot_range, longest = max(decode_slots) + 1, max(decode_lengths)
        if slot_range * longest > LARGEST_PADDING_RATIO * sum(decode_lengths) + 1024:
            return None
        lengths = torch.ones(slot_range, dtype=torch.int64)
        lengths[torch.tensor(decode_slots)] = torch.tensor(decode_lengths)
        blocked = torch.arange(longest) >= lengths.unsqueeze(1)  # [slot_range, longest]
        mask = torch.zeros(blocked.shape, dtype=self.dtype).masked_fill_(blocked, -torch.inf)
        return mask.view(slot_range, 1, 1, longest)
