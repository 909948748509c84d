"""The engine's logic that needs no model: text, stop strings, sampling, slots, configs, spans."""

import json
import threading
from collections import Counter
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from clawstream.errors import WeightsError
from services.engine.architecture import parse_architecture, read_architecture, read_stop_token_ids
from services.engine.huge_pages import HugePageMover, huge_pages, page_collapser
from services.engine.linear import make_linear, packing_works
from services.engine.responses import version_spans
from services.engine.rope import rotary_tables
from services.engine.sampling import SamplingRow, invert_cumulative, most_likely, sample, truncate
from services.engine.stops import IncrementalText, StopStrings
from services.engine.tiny_model import build_config, build_tokenizer, write_tiny_model
from services.engine.tokens import TokenCodec
from services.engine.weights import load_weights


@given(st.text(max_size=60))
def test_pieces_of_text_join_to_the_text_and_never_split_a_character(text: str) -> None:
    tokenizer = build_tokenizer(512)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    expected = tokenizer.decode(ids)
    stream = IncrementalText(lambda window: tokenizer.decode(list(window)))
    pieces = [stream.add(token_id) for token_id in ids]
    assert "".join(pieces) + stream.flush() == expected
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_a_character_split_over_tokens_is_emitted_once_when_it_is_whole() -> None:
    tokenizer = build_tokenizer(512)
    ids = tokenizer.encode("🙂!").ids
    stream = IncrementalText(lambda window: tokenizer.decode(list(window)))
    assert [stream.add(token_id) for token_id in ids] == ["", "", "", "🙂", "!"]
    cut = IncrementalText(lambda window: tokenizer.decode(list(window)))
    assert [cut.add(token_id) for token_id in ids[:2]] == ["", ""]
    assert cut.flush() == tokenizer.decode(ids[:2])


@given(st.text("ab<|", max_size=30), st.lists(st.text("ab<|", min_size=1, max_size=4), max_size=3), st.randoms())
def test_stop_strings_cut_at_the_first_match_however_the_text_is_cut(
    text: str, stops: list[str], random: Random
) -> None:
    matcher = StopStrings(stops)
    emitted, matched, rest = "", None, text
    while rest and matched is None:
        length = random.randint(1, 3)
        piece, rest = rest[:length], rest[length:]
        match = matcher.add(piece)
        emitted, matched = emitted + match.text, match.matched
    # The answer ends with the first piece that completes a stop string, before the earliest one in it.
    seen = text[: len(text) - len(rest)]
    found = [seen.find(stop) for stop in stops if stop in seen]
    if found:
        assert matched in stops
        assert emitted == seen[: min(found)]
    else:
        assert matched is None
        assert emitted + matcher.flush() == text


def test_sampling_follows_the_distribution() -> None:
    random = Random(0)
    logits = torch.tensor([[0.0, 1.0, 2.0, -1e9, 0.5] + [-1e9] * 600])
    draws: Counter[int] = Counter()
    count = 4000
    for _ in range(count):
        ids, _ = sample(logits.clone(), [SamplingRow(2.0, -1, 1.0, 0.0, random.random())])
        draws[ids[0]] += 1
    expected = torch.softmax(logits[0] / 2.0, dim=-1)
    assert draws[3] == 0
    for token in (0, 1, 2, 4):
        assert draws[token] / count == pytest.approx(expected[token].item(), abs=0.03)


@given(st.integers(1, 1000), st.floats(0, 1, exclude_max=True), st.integers(0, 2**32))
def test_inverse_sampling_finds_the_token_whose_interval_holds_the_number(
    vocabulary: int, uniform: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    probabilities = torch.rand(1, vocabulary, generator=generator)
    probabilities[probabilities < 0.5] = 0.0
    probabilities[0, seed % vocabulary] = 0.7
    token = int(invert_cumulative(probabilities, torch.tensor([uniform], dtype=torch.float64)).item())
    sums = probabilities[0].double().cumsum(0)
    target = uniform * sums[-1].item()
    assert probabilities[0, token] > 0
    assert sums[token].item() - probabilities[0, token].item() - 1e-6 <= target <= sums[token].item() + 1e-6


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        (SamplingRow(1.0, 2, 1.0, 0.0, 0.0), [1, 3]),
        (SamplingRow(1.0, -1, 0.5, 0.0, 0.0), [1, 3]),
        (SamplingRow(1.0, -1, 0.35, 0.0, 0.0), [1]),
        (SamplingRow(1.0, -1, 1.0, 0.6, 0.0), [1, 3]),
        (SamplingRow(1.0, 3, 0.95, 0.5, 0.0), [0, 1, 3]),
    ],
)
def test_truncation_keeps_the_tokens_it_should(row: SamplingRow, kept: list[int]) -> None:
    probabilities = torch.tensor([0.2, 0.4, 0.1, 0.3])
    truncate(probabilities, row)
    assert probabilities.nonzero().squeeze(1).tolist() == kept


def test_truncation_of_a_flat_distribution_needs_more_than_the_candidates_at_hand() -> None:
    probabilities = torch.full((5000,), 1 / 5000)
    truncate(probabilities, SamplingRow(1.0, -1, 0.9, 0.0, 0.0))
    assert int((probabilities > 0).sum()) == pytest.approx(4500, abs=2)


def test_temperature_next_to_zero_is_greedy_at_temperature_one() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    ids, logprobs = sample(logits.clone(), [SamplingRow(1e-9, -1, 1.0, 0.0, 0.99)])
    assert ids == [1]
    assert torch.equal(logprobs, torch.log_softmax(logits, dim=-1))


def test_llama3_rope_scaling_equals_transformers() -> None:
    config = build_config("llama", 512, 2, 64) | {
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    }
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**config), torch.device("cpu"))
    cosines, sines = rotary_tables(parse_architecture(config), 1000, torch.float32)
    angles = torch.outer(torch.arange(1000).float(), expected)
    torch.testing.assert_close(cosines, angles.cos().repeat(1, 2), atol=1e-4, rtol=0)
    torch.testing.assert_close(sines, torch.cat((-angles.sin(), angles.sin()), dim=-1), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling 'linear'"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "no multiple"),
    ],
    ids=str,
)
def test_models_that_would_be_computed_wrongly_are_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(build_config("llama", 512, 2, 64) | change))
    with pytest.raises(WeightsError, match=message):
        read_architecture(tmp_path)


def test_unknown_tensors_are_refused_rather_than_ignored(tmp_path: Path) -> None:
    qwen3 = write_tiny_model(tmp_path / "model", "qwen3")
    config = json.loads((qwen3 / "config.json").read_text())
    (qwen3 / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    with pytest.raises(WeightsError, match="unknown tensors"):
        load_weights(qwen3, dtype=torch.float32, packed=False)


def test_plain_and_packed_linears_agree() -> None:
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(33, 17, generator=generator), torch.randn(33, generator=generator)
    x = torch.randn(5, 17, generator=generator)
    plain = make_linear(weight, bias, packed=False)(x)
    torch.testing.assert_close(plain, x @ weight.T + bias)
    if packing_works(torch.float32):
        torch.testing.assert_close(make_linear(weight, bias, packed=True)(x), plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_a_linear_layer_adds_to_a_residual_that_stays_as_it_was(packed: bool) -> None:
    weight, bias, x, residual = torch.randn(96, 64), torch.randn(96), torch.randn(7, 64), torch.randn(7, 96)
    before = residual.clone()
    if packed and not packing_works(torch.float32):
        packed = False
    added = make_linear(weight, bias, packed=packed).added_to(residual, x)
    torch.testing.assert_close(added, before + x @ weight.T + bias, atol=1e-5, rtol=1e-5)
    assert torch.equal(residual, before)


def test_huge_pages_cover_all_packed_weights_and_change_no_result() -> None:
    if not packing_works(torch.float32):
        assert huge_pages([make_linear(torch.randn(96, 64), None, packed=False)]) == []
        return
    large = make_linear(torch.randn(4096, 2048), None, packed=True)  # 32 MiB
    x = torch.randn(3, 2048)
    before = large(x)
    numbers = huge_pages([large, make_linear(torch.randn(96, 64), None, packed=False)])
    assert len(numbers) in (16, 17)  # 32 MiB seldom begin at a page
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    tried: list[int] = []
    collapse_page = page_collapser()

    def collapse(number: int) -> bool:
        tried.append(number)
        return collapse_page(number)

    mover = HugePageMover(collapse)
    mover.begin([large])
    while len(tried) < len(numbers):
        assert torch.equal(large(x), before)  # serves meanwhile
    mover.wait()
    assert set(tried) == set(numbers) & set(huge_pages([large]))
    assert torch.equal(large(x), before)


def test_weights_that_serve_no_more_are_not_moved_on() -> None:
    if not packing_works(torch.float32):
        assert huge_pages([make_linear(torch.randn(96, 64), None, packed=False)]) == []
        return
    old, new = (make_linear(torch.randn(4096, 2048), None, packed=True) for _ in range(2))
    tried: list[int] = []
    old_has_begun, new_is_coming = threading.Event(), threading.Event()

    def collapse(number: int) -> bool:
        tried.append(number)
        old_has_begun.set()
        new_is_coming.wait(60.0)
        return True

    mover = HugePageMover(collapse)
    mover.begin([old])
    assert old_has_begun.wait(60.0)
    beginning = threading.Thread(target=mover.begin, args=([new],))
    beginning.start()
    while not mover._no_longer_wanted.is_set():  # pyright: ignore[reportPrivateUsage] - nothing else shows it
        assert beginning.is_alive()
    new_is_coming.set()
    beginning.join()
    mover.wait()
    assert tried == [huge_pages([old])[0], *huge_pages([new])]


@given(st.integers(1, 700), st.integers(0, 2**32 - 1))
def test_the_most_likely_token_is_the_first_of_the_highest_log_prob(vocabulary: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logprobs = torch.randint(-3, 1, (4, vocabulary), generator=generator).float()  # ties
    logprobs[0] = -torch.inf
    logprobs[0, vocabulary // 2] = -5.0
    expected = [row.index(max(row)) for row in logprobs.tolist()]
    assert most_likely(logprobs).tolist() == expected


def test_stop_ids_of_both_configs_count(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert read_stop_token_ids(tmp_path) == {2, 5, 6}


def test_the_codec_equals_transformers(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    codec, tokenizer = TokenCodec(model), AutoTokenizer.from_pretrained(model)
    text = "<|im_start|>user\nHow many legs? 🙂<|im_end|>"
    ids = codec.encode(text)
    assert ids == tokenizer.encode(text)
    assert codec.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids, skip_special_tokens=True)
    assert codec.special_token_id("<|im_end|>") == 2
    assert codec.special_token_id("user") is None


@given(st.lists(st.sampled_from("123")))
def test_version_spans_cover_every_token_once(versions: list[str]) -> None:
    spans = version_spans(versions)
    assert [span["version"] for span in spans for _ in range(span["start"], span["end"])] == versions
    assert all(one["version"] != other["version"] for one, other in pairwise(spans))
