"""Which row of a step the logits are of: they come in the order in which they were asked for."""

from itertools import permutations
from pathlib import Path

import pytest
import torch

from services.engine.architecture import read_architecture
from services.engine.tiny_model import write_tiny_model
from services.engine.transformer import Chunk, Transformer
from services.engine.weights import load_weights


@pytest.mark.parametrize("rows", [rows for count in (1, 2, 3) for rows in permutations(range(3), count)], ids=str)
def test_logits_come_in_the_order_that_was_asked_for(rows: tuple[int, ...], tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    architecture = read_architecture(tmp_path)
    weights = load_weights(tmp_path, dtype=torch.float32, packed=False)
    chunks = [Chunk(0, 0, [5]), Chunk(1, 0, [6, 7])]

    def step(logit_rows: tuple[int, ...]) -> torch.Tensor:
        transformer = Transformer(architecture, slots=2, context_tokens=16, dtype=torch.float32)
        with torch.inference_mode():
            return transformer.step(weights, chunks, logit_rows)  # [len(logit_rows), vocabulary]

    every_row = step((0, 1, 2))
    assert not torch.allclose(every_row[0], every_row[1])
    torch.testing.assert_close(step(rows), every_row[list(rows)])
