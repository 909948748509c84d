# pyright: basic
# Reason: transformers' GGUF loader is untyped.
"""Turn a GGUF file into a plain Hugging Face directory (fp32 safetensors, config, tokenizer).

`python -m services.engine.convert_gguf --gguf FILE --directory DIR`. It needs torch, and therefore lives with the
engine; `clawstream.models.fetch` runs it as a subprocess. The directory appears whole or not at all (written beside,
then renamed), and carries a marker with the GGUF's checksum: a second call with the same file does nothing.
"""

import json
import shutil
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from clawstream.models.marker import file_sha256, is_complete, write_marker

UNWANTED_CONFIG_KEYS = (
    "quantization_config",
    "_name_or_path",
    "_model_name_or_path",
    "id2label",
    "label2id",
    "problem_type",
)
"""Keys of the GGUF's config that say nothing about the model written here: its weights are plain fp32."""


def write_json(path: Path, value: dict[str, object]) -> None:
    """Write `value` as indented JSON with sorted keys."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def convert_gguf(gguf: Path, directory: Path) -> Path:
    """Dequantise `gguf` to fp32 and write it as a Hugging Face model to `directory`; returns `directory`.

    transformers refuses `save_pretrained` for a model that came from GGUF, so the weights are written directly:
    every tensor of the state dict, without the output projection where it is tied to the embedding.
    """
    source_sha256 = file_sha256(gguf)
    if is_complete(directory, source_sha256):
        return directory
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)

    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tied = bool(model.config.tie_word_embeddings)
    weights = {
        name: tensor.detach().contiguous()
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})

    (partial / "model.safetensors").chmod(0o644)  # safetensors creates it readable by its owner only
    config = {key: value for key, value in model.config.to_dict().items() if key not in UNWANTED_CONFIG_KEYS}
    config["architectures"] = [type(model).__name__]
    config["rope_theta"] = config["rope_parameters"][
        "rope_theta"
    ]  # where readers older than transformers 5 look for it
    write_json(partial / "config.json", config)
    model.generation_config.save_pretrained(partial)

    tokenizer.save_pretrained(partial)
    tokenizer_config = json.loads((partial / "tokenizer_config.json").read_text())
    tokenizer_config |= {
        "tokenizer_class": "PreTrainedTokenizerFast",  # every version of transformers knows this name
        "model_max_length": model.config.max_position_embeddings,
    }
    for key in ("is_local", "local_files_only", "backend"):
        tokenizer_config.pop(key, None)  # how it was loaded here, nobody else's concern
    write_json(partial / "tokenizer_config.json", tokenizer_config)
    write_marker(partial, source=gguf.name, source_sha256=source_sha256)

    if directory.exists():
        shutil.rmtree(directory)
    partial.rename(directory)
    return directory


def main(
    gguf: Annotated[Path, typer.Option(help="The GGUF file to convert.", exists=True, dir_okay=False)],
    directory: Annotated[Path, typer.Option(help="Where to write the Hugging Face directory.")],
) -> None:
    """Convert one GGUF file to a Hugging Face directory."""
    convert_gguf(gguf, directory)


if __name__ == "__main__":
    typer.run(main)
