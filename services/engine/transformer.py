"""The forward pass of one step: decode rows and prompt chunks of many requests packed into one batch, no padding.

Every request owns a slot of preallocated key-value memory. A step feeds each request the tokens that its slot does not
hold yet: one for a running answer, a chunk for a prompt. Linears see all rows at once; attention is batched over the
decode rows and computed per sequence for chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention, silu

from services.engine.architecture import ModelArchitecture
from services.engine.decode_attention import DecodeGroup, decode_attention, plan_groups
from services.engine.key_value_cache import KeyValueCache, Places
from services.engine.norm import rms_norm
from services.engine.rope import rotary_tables, rotate
from services.engine.weights import LayerWeights, ModelWeights


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one request that enter its slot in this step."""

    slot: int
    start: int
    """Position of the first token; everything before it is in the slot already."""
    token_ids: Sequence[int]
    """[length], at least one"""


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Where the rows of a step go, computed once for all layers."""

    places: Places
    """[rows] where the keys and values of each row go"""
    cosines: Tensor
    """[rows, 1, head_dim]"""
    sines: Tensor
    """[rows, 1, head_dim], signed for `rotate`"""
    decode_rows: int
    """The first rows: those of requests with one token each"""
    decode_groups: list[DecodeGroup]
    """What these rows read"""
    chunks: list[tuple[Chunk, int, Tensor | None]]
    """Longer chunks: the chunk, its first row, and its mask [length, start + length] (None: plain causal)"""


class Transformer:
    """Computes steps. Holds the cache and the rotary tables; the weights come with each call."""

    def __init__(self, architecture: ModelArchitecture, slots: int, context_tokens: int, dtype: torch.dtype) -> None:
        self.architecture = architecture
        self.dtype = dtype
        self.cache = KeyValueCache(architecture, slots, context_tokens)
        self._norm_epsilon = torch.tensor(architecture.norm_epsilon)
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
        in_order = not logit_rows or list(logit_rows) == list(range(hidden.shape[0]))
        kept = None if in_order else torch.tensor(logit_rows)
        for index, layer in enumerate(weights.layers):
            hidden = self._layer(index, layer, hidden, layout, kept if index == last else None)
        if not logit_rows:
            return hidden.new_empty((0, self.architecture.vocabulary_size), dtype=torch.float32)
        normed = rms_norm(hidden, weights.final_norm, self._norm_epsilon)
        return weights.output(normed).float()

    def _layer(
        self, index: int, layer: LayerWeights, hidden: Tensor, layout: StepLayout, kept: Tensor | None
    ) -> Tensor:
        """[rows, hidden] -> [rows, hidden], or the `kept` [kept_rows] of these rows"""
        architecture = self.architecture
        num_rotated = architecture.num_heads + architecture.num_kv_heads

        normed = rms_norm(hidden, layer.attention_norm, self._norm_epsilon)
        heads = layer.query_key_value(normed).view(hidden.shape[0], -1, architecture.head_dim)  # [rows, h + 2 kv, d]
        rotated = heads[:, :num_rotated]
        if layer.head_norm is not None:
            rotated = rms_norm(rotated, layer.head_norm, self._norm_epsilon)
        rotated = rotate(rotated, layout.cosines, layout.sines)
        queries, keys, values = (
            rotated[:, : architecture.num_heads],
            rotated[:, architecture.num_heads :],
            heads[:, num_rotated:],
        )
        self.cache.write(index, layout.places, keys, values)
        attended = self._attention(index, queries, keys, values, layout)  # [rows, heads * head_dim]
        if kept is not None:
            attended, hidden = attended[kept], hidden[kept]
        hidden = layer.attention_output.added_to(hidden, attended)

        normed = rms_norm(hidden, layer.feed_forward_norm, self._norm_epsilon)
        gate, up = layer.gate_up(normed).chunk(2, dim=-1)  # each [rows, intermediate]
        return layer.down.added_to(hidden, silu(gate).mul_(up))

    def _attention(self, index: int, queries: Tensor, keys: Tensor, values: Tensor, layout: StepLayout) -> Tensor:
        """Queries [rows, heads, head_dim], keys and values [rows, kv_heads, head_dim] -> [rows, heads * head_dim]"""
        decode_rows = layout.decode_rows
        parts: list[Tensor] = []
        if decode_rows:
            cached = self.cache.keys[index], self.cache.values[index]
            parts.append(decode_attention(layout.decode_groups, queries[:decode_rows].float(), *cached).to(self.dtype))
        for chunk, first, mask in layout.chunks:
            end = first + len(chunk.token_ids)
            if chunk.start == 0:
                chunk_keys, chunk_values = keys[first:end].transpose(0, 1), values[first:end].transpose(0, 1)
            else:
                chunk_keys, chunk_values = self.cache.read(index, chunk.slot, chunk.start + len(chunk.token_ids))
            parts.append(self._chunk_attention(queries[first:end], chunk_keys, chunk_values, mask))
        joined = torch.cat(parts) if len(parts) > 1 else parts[0]
        return joined.reshape(queries.shape[0], -1)

    def _chunk_attention(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """`queries` [length, heads, head_dim], `keys` and `values` [kv_heads, total, head_dim] -> as the queries"""
        # The query heads of a group share keys by a stride of 0: [kv_heads, query heads of each, length, head_dim].
        length, heads, head_dim = queries.shape
        grouped = queries.view(length, keys.shape[0], heads // keys.shape[0], head_dim).permute(1, 2, 0, 3)
        shape = (*grouped.shape[:2], *keys.shape[1:])
        attended = scaled_dot_product_attention(
            grouped,
            keys.to(self.dtype).unsqueeze(1).expand(shape),
            values.to(self.dtype).unsqueeze(1).expand(shape),
            attn_mask=mask,
            is_causal=mask is None,
        )
        return attended.permute(2, 0, 1, 3).flatten(1, 2)

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
            places=self.cache.places(torch.tensor(slots), position_index),
            cosines=self._cosines[position_index].unsqueeze(1),
            sines=self._sines[position_index].unsqueeze(1),
            decode_rows=len(decode_slots),
            decode_groups=plan_groups(decode_slots, decode_lengths, self.architecture.num_heads, self.cache),
            chunks=longer,
        )

    def _chunk_mask(self, chunk: Chunk) -> Tensor | None:
        if chunk.start == 0:
            return None
        length = len(chunk.token_ids)
        blocked = torch.full((length, chunk.start + length), -torch.inf, dtype=self.dtype)
        return blocked.triu(diagonal=chunk.start + 1)
