# pyright: basic
# Reason: torch leaves Tensor.tolist and Tensor.unique untyped.
"""From logits to a token and its log-prob, by SGLang's conventions.

- The log-prob of a sampled token is that of softmax(logits / temperature), after penalties and *before* top-k, top-p
  and min-p: with truncation it is not the log-prob under the truncated distribution that was sampled.
- Temperature 0 is greedy; its log-probs are those at temperature 1.
- Truncation: top-k first, then the smallest set of top probabilities that reaches top-p of the *untruncated* mass, then
  min-p relative to the most likely token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK_SIZE = 256
"""Probabilities are searched block by block: no running sum over the whole vocabulary, and no rounding from it."""

NUM_CANDIDATES = 1024
"""Most likely tokens that truncation looks at first: sorting the whole vocabulary costs ten times as much."""
LEAST_TEMPERATURE = 1e-6
"""Below it sampling is greedy, as in SGLang."""


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How one row of logits is to be sampled."""

    temperature: float
    """0 is greedy."""
    top_k: int
    """-1 keeps all."""
    top_p: float
    """1.0 keeps all."""
    min_p: float
    """0.0 keeps all."""
    uniform: float
    """In [0, 1): the row's random number. Unused when greedy."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it was sampled."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that was sampled."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of every token of the answer. Not of the prompt: so does SGLang
    0.5.23, unlike the paper (Keskar et al. 2019) and Hugging Face."""
    output_ids: Sequence[int] = ()
    """[output_tokens], needed by all penalties."""

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < LEAST_TEMPERATURE or self.top_k == 1

    @property
    def divisor(self) -> float:
        """What the logits are divided by."""
        return self.temperature if self.temperature >= LEAST_TEMPERATURE else 1.0

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens cannot be sampled."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def is_penalised(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> tuple[list[int], Tensor]:
    """Sample one token for each row of fp32 `logits` [rows, vocabulary]; `logits` is changed by penalties.

    Returns the token ids and the log-probs [rows, vocabulary] of the temperature-scaled distributions.
    """
    for index, row in enumerate(rows):
        if row.is_penalised:
            penalise(logits[index], row)
    if any(row.divisor != 1.0 for row in rows):
        logits = logits / torch.tensor([row.divisor for row in rows]).unsqueeze(1)
    logprobs = torch.log_softmax(logits, dim=-1)  # [rows, vocabulary]
    token_ids = most_likely(logprobs)  # [rows]
    random_rows = [index for index, row in enumerate(rows) if not row.is_greedy]
    if random_rows:
        probabilities = logprobs[torch.tensor(random_rows)].exp()
        for position, index in enumerate(random_rows):
            if rows[index].is_truncated:
                truncate(probabilities[position], rows[index])
        uniforms = torch.tensor([rows[index].uniform for index in random_rows], dtype=torch.float64)
        token_ids[torch.tensor(random_rows)] = invert_cumulative(probabilities, uniforms)
    return token_ids.tolist(), logprobs


def most_likely(logprobs: Tensor) -> Tensor:
    """The first token of the highest log-prob in each row of `logprobs` [rows, vocabulary]. Returns [rows].

    As `argmax`, which torch does not vectorise: here it only sees one maximum per block, then one block.
    """
    rows, vocabulary = logprobs.shape
    blocks = pad(logprobs, (0, -vocabulary % BLOCK_SIZE), value=-torch.inf).view(rows, -1, BLOCK_SIZE)
    block = blocks.amax(dim=-1).argmax(dim=-1)  # [rows]
    return block * BLOCK_SIZE + blocks[torch.arange(rows), block].argmax(dim=-1)


def penalise(logits: Tensor, row: SamplingRow) -> None:
    """Apply the row's penalties to its `logits` [vocabulary] in place."""
    if row.output_ids:
        sampled, counts = torch.tensor(row.output_ids).unique(return_counts=True)
        if row.repetition_penalty != 1.0:
            values = logits[sampled]
            logits[sampled] = torch.where(values > 0, values / row.repetition_penalty, values * row.repetition_penalty)
        logits[sampled] -= row.frequency_penalty * counts + row.presence_penalty


def truncate(probabilities: Tensor, row: SamplingRow) -> None:
    """Zero in place the `probabilities` [vocabulary] that top-k, top-p and min-p exclude; never the top one."""
    vocabulary = probabilities.shape[0]
    candidates, order = probabilities.topk(min(NUM_CANDIDATES, vocabulary))  # [candidates], most likely first
    enough = 0 < row.top_k <= len(candidates) or candidates.sum() >= row.top_p + 1e-6
    if not enough and len(candidates) < vocabulary:
        candidates, order = probabilities.sort(descending=True)
    mass_before = candidates.cumsum(0) - candidates
    kept = (mass_before <= row.top_p) & (candidates >= row.min_p * candidates[0])
    if row.top_k > 0:
        kept[row.top_k :] = False
    kept[0] = True
    probabilities.zero_()
    probabilities[order[kept]] = candidates[kept]


def invert_cumulative(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """The token at which each row's running sum passes its uniform number; never one of probability 0.

    `probabilities` [rows, vocabulary], in any scale; `uniforms` [rows] in [0, 1), float64. Returns [rows].
    """
    rows, vocabulary = probabilities.shape
    blocks = pad(probabilities, (0, -vocabulary % BLOCK_SIZE)).view(rows, -1, BLOCK_SIZE)
    block_sums = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)  # [rows, blocks]
    target = (uniforms * block_sums[:, -1]).unsqueeze(1)  # [rows, 1]
    block = search(block_sums, target)  # [rows, 1]
    before = block_sums.gather(1, (block - 1).clamp(min=0)) * (block > 0)
    inner = blocks[torch.arange(rows), block.squeeze(1)].double().cumsum(dim=-1)  # [rows, BLOCK_SIZE]
    position = search(inner, target - before)
    return (block * BLOCK_SIZE + position).squeeze(1)


def search(sums: Tensor, target: Tensor) -> Tensor:
    """First index whose running sum exceeds `target` [rows, 1]; rounding at the end falls on the last positive step."""
    last = sums[:, -1:]
    below_last = torch.nextafter(last, torch.zeros_like(last))
    return torch.searchsorted(sums, torch.minimum(target, below_last), right=True)
