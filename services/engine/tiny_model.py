"""The tests' model: tiny and random, with a real tokenizer, made in a second without network, torch or transformers.

Two layers, 64 hidden, 4 query heads on 2 key-value heads (so tensor parallelism of 2 divides everything), a byte-level
BPE vocabulary of 512 tokens with ChatML's special tokens, and a chat template that also renders tools and tool calls.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer
from numpy.typing import NDArray
from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType] - PathLike of anything
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

Architecture = Literal["llama", "qwen2", "qwen3"]

END_OF_TEXT, MESSAGE_START, MESSAGE_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, MESSAGE_START, MESSAGE_END)
"""Ids 0, 1 and 2, as in SmolLM2."""
MAX_CONTEXT_TOKENS = 2048

CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif -%}
{%- for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] if message['content'] is string else '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How words are cut before merging. transformers gives every qwen2 directory this pattern."""

CORPUS = (
    "What is the capital of France? The capital of France is Paris.",
    "You are a helpful assistant. Please answer in one short sentence, thanks, exactly.",
    "system user assistant tool message answer question reply short long sentence",
    "The sky is blue because the air scatters blue light more than red light.",
    "How many legs does a spider have? A spider has eight legs.",
    '{"name": "get_weather", "arguments": {"city": "Berlin"}}',
    "one two three four five six seven eight nine ten 0 1 2 3 4 5 6 7 8 9",
    "good bad correct wrong yes no too long perfect thank you that is not what I asked",
    "roses are red, violets are blue, snow is white and coal is black",
    "water boils at one hundred degrees and freezes at zero degrees",
)
"""What the merges are learnt from: enough for words to be tokens and for rare text to fall back to bytes."""


def build_tokenizer(vocabulary_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer: any text round-trips, characters outside the corpus are split into bytes."""
    tokenizer = Tokenizer(models.BPE())
    # The wrappers of tokenizers are untyped around these attributes.
    split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def build_config(architecture: Architecture, vocabulary_size: int, layers: int, hidden_size: int) -> dict[str, Any]:
    """The config.json: Llama ties its embeddings as SmolLM2 does, Qwen2 does not, Qwen3 has wider heads."""
    names = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    config: dict[str, Any] = {
        "architectures": [names[architecture]],
        "model_type": architecture,
        "vocab_size": vocabulary_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden_size // 2 if architecture == "qwen3" else hidden_size // 4,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_CONTEXT_TOKENS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": architecture != "qwen2",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "dtype": "float32",
        "use_cache": True,
    }
    if architecture == "llama":
        config["mlp_bias"] = False
    if architecture == "qwen2":
        del config["head_dim"]  # Qwen2 derives it
    if architecture != "llama":
        config |= {"use_sliding_window": False, "sliding_window": None, "max_window_layers": layers}
    return config


def build_weights(config: dict[str, Any], seed: int) -> dict[str, NDArray[np.float32]]:
    """Random values for every parameter, norms and biases too, so that an ignored one shows in the logits.

    The spread (0.3) is large: the next-token distribution is then far from uniform and log-probs tell models apart.
    """
    generator = np.random.default_rng(seed)
    hidden, intermediate, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    query_size = config["num_attention_heads"] * head_dim
    key_value_size = config["num_key_value_heads"] * head_dim

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return generator.normal(0.0, 0.3, (rows, columns)).astype(np.float32)

    def vector(size: int, low: float, high: float) -> NDArray[np.float32]:
        return generator.uniform(low, high, size).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(vocabulary, hidden), "model.norm.weight": vector(hidden, 0.5, 1.5)}
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(vocabulary, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.self_attn.q_proj.weight": matrix(query_size, hidden),
            f"{prefix}.self_attn.k_proj.weight": matrix(key_value_size, hidden),
            f"{prefix}.self_attn.v_proj.weight": matrix(key_value_size, hidden),
            f"{prefix}.self_attn.o_proj.weight": matrix(hidden, query_size),
            f"{prefix}.mlp.gate_proj.weight": matrix(intermediate, hidden),
            f"{prefix}.mlp.up_proj.weight": matrix(intermediate, hidden),
            f"{prefix}.mlp.down_proj.weight": matrix(hidden, intermediate),
            f"{prefix}.input_layernorm.weight": vector(hidden, 0.5, 1.5),
            f"{prefix}.post_attention_layernorm.weight": vector(hidden, 0.5, 1.5),
        }
        if config["model_type"] == "qwen2":
            for name, size in (("q", query_size), ("k", key_value_size), ("v", key_value_size)):
                weights[f"{prefix}.self_attn.{name}_proj.bias"] = vector(size, -1.0, 1.0)
        if config["model_type"] == "qwen3":
            for name in ("q", "k"):
                weights[f"{prefix}.self_attn.{name}_norm.weight"] = vector(head_dim, 0.5, 1.5)
    return weights


def write_tiny_model(
    directory: Path,
    architecture: Architecture = "llama",
    seed: int = 0,
    *,
    layers: int = 2,
    hidden_size: int = 64,
    vocabulary_size: int = 512,
) -> Path:
    """Write a random model to `directory` (made if absent) and return it. The same arguments give the same bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(vocabulary_size)
    config = build_config(architecture, tokenizer.get_vocab_size(), layers, hidden_size)
    save_file(build_weights(config, seed), directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": MESSAGE_START,
        "eos_token": MESSAGE_END,
        "pad_token": MESSAGE_END,
        "unk_token": END_OF_TEXT,
        "model_max_length": MAX_CONTEXT_TOKENS,
        "clean_up_tokenization_spaces": False,
    }
    generation_config = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    for name, value in (
        ("config.json", config),
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", generation_config),
    ):
        (directory / name).write_text(json.dumps(value, indent=2) + "\n")
    return directory


def main(
    directory: Annotated[Path, typer.Option(help="Where to write the model.")],
    architecture: Annotated[str, typer.Option(help="llama, qwen2 or qwen3.")] = "llama",
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
) -> None:
    """Write a tiny random model for tests."""
    if architecture not in ("llama", "qwen2", "qwen3"):
        raise typer.BadParameter(f"{architecture!r} is none of llama, qwen2, qwen3", param_hint="--architecture")
    write_tiny_model(directory, architecture, seed)


if __name__ == "__main__":
    typer.run(main)
