"""The tokenizer of a model directory: text to ids and back. No chat template: callers render their own prompts."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from clawstream.errors import WeightsError


class TokenCodec:
    """Thread-safe."""

    def __init__(self, directory: Path) -> None:
        """Raises `WeightsError` without a readable tokenizer.json."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise WeightsError(f"{path}: no such file; save the tokenizer in the `tokenizers` format")
        self._tokenizer = Tokenizer.from_file(str(path))
        self._special = {
            token.content: token_id
            for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        }

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, with whatever the tokenizer puts around a prompt."""
        return self._tokenizer.encode(text).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of ids; ids outside the vocabulary have none."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def special_token_id(self, text: str) -> int | None:
        """The id when `text` is exactly one special token."""
        return self._special.get(text)
