# pyright: basic
"""A model directory's tokenizer, without network and without torch.

Basic type checking: transformers' and tokenizers' classes are untyped here.
"""

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clawstream.errors import ContractError
from clawstream.rendering.detokenizer import IncrementalDetokenizer, byte_token_ids


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """A fast tokenizer and what is needed of it."""

    hugging_face: Any
    """A `BoundedTokenizer`, which is transformers' PreTrainedTokenizerFast: chat template, encode."""
    fingerprint: str
    """sha256 in hexadecimal over vocabulary, special tokens and chat template."""
    vocabulary_fingerprint: str
    """The same over vocabulary and special tokens alone: models that share it mean the same by the same ids."""
    model_type: str
    """`model_type` of config.json, or ""."""
    max_position_embeddings: int | None
    """Longest sequence that the model was made for, as config.json says."""
    vocabulary_size: int
    """How many ids the model knows: rows of its embedding as config.json says, else what the tokenizer has."""
    end_of_sequence_ids: list[int]
    """The tokenizer's end token and those of generation_config.json."""
    byte_ids: frozenset[int] = field(repr=False)
    special_ids: frozenset[int] = field(repr=False)

    def encode(self, text: str) -> list[int]:
        """Plain text to ids, without special tokens around it."""
        return self.hugging_face.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Ids to text, special tokens left out. No cleaning up: every character counts."""
        return self.hugging_face.backend_tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def detokenizer(self) -> IncrementalDetokenizer:
        """A new incremental detokenizer, equal in sum to `decode`."""
        return IncrementalDetokenizer(
            self.hugging_face.backend_tokenizer, byte_ids=self.byte_ids, special_ids=self.special_ids
        )

    def single_token(self, text: str) -> int | None:
        """The id of the token that is exactly `text`, if there is one."""
        return self.hugging_face.get_vocab().get(text)


def load_tokenizer(directory: Path) -> LoadedTokenizer:
    """Reads `tokenizer.json`, `tokenizer_config.json` and the chat template of a Hugging Face directory.

    Raises ContractError when the directory has no tokenizer.json or no chat template.
    """
    # AutoTokenizer would import torch where it is installed; this class does not.
    from clawstream.rendering.bounded_tokenizer import BoundedTokenizer

    if not (directory / "tokenizer.json").is_file():
        raise ContractError(
            f"{directory}: no tokenizer.json; a Hugging Face model directory with a fast tokenizer is needed"
        )
    tokenizer = BoundedTokenizer.from_pretrained(str(directory), local_files_only=True)
    # Our callers check lengths and say what to do; transformers would only warn on standard error.
    tokenizer.model_max_length = sys.maxsize
    if not tokenizer.chat_template:
        raise ContractError(f"{directory}: the tokenizer has no chat template")
    config = _read_json(directory / "config.json")
    generation_config = _read_json(directory / "generation_config.json")
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    special_ids = frozenset(
        number for number, token in tokenizer.backend_tokenizer.get_added_tokens_decoder().items() if token.special
    )
    ends = generation_config.get("eos_token_id", config.get("eos_token_id"))
    listed = ends if isinstance(ends, list) else [ends] if isinstance(ends, int) else []
    own = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    return LoadedTokenizer(
        hugging_face=tokenizer,
        fingerprint=_fingerprint(vocabulary, special_ids, tokenizer.chat_template),
        vocabulary_fingerprint=_fingerprint(vocabulary, special_ids, None),
        model_type=str(config.get("model_type", "")),
        max_position_embeddings=config.get("max_position_embeddings"),
        vocabulary_size=_vocabulary_size(config) or max(vocabulary.values(), default=-1) + 1,
        end_of_sequence_ids=list(dict.fromkeys([*own, *listed])),
        byte_ids=byte_token_ids(vocabulary),
        special_ids=special_ids,
    )


def _vocabulary_size(config: dict[str, Any]) -> int | None:
    """Also of models that read more than text: they keep it in `text_config`."""
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    return size if isinstance(size, int) else None


def _fingerprint(vocabulary: dict[str, int], special_ids: frozenset[int], chat_template: Any) -> str:
    canonical = json.dumps(
        {"vocabulary": vocabulary, "special_ids": sorted(special_ids), "chat_template": chat_template},
        sort_keys=True,
        ensure_ascii=True,
        separators=(",", ":"),
    )
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
