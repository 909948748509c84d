# pyright: basic
"""A tokenizer that gives up as soon as it is certain that a prompt does not fit.

Basic type checking: transformers' classes are untyped here.
"""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerFast

from clawstream.errors import PromptTooLong
from clawstream.rendering.token_count_bound import LeastTokenCount


@dataclass(slots=True)
class _Budget:
    """Of one prompt that is being rendered."""

    max_tokens: int
    encoded_tokens: int = 0
    """So far, over all pieces."""


class BoundedTokenizer(PreTrainedTokenizerFast):
    """Hugging Face's fast tokenizer, with a limit while `at_most` is in force. Thread-safe: limits are per thread."""

    @contextmanager
    def at_most(self, max_tokens: int | None) -> Generator[None]:
        """Whatever this thread encodes inside is one prompt; PromptTooLong is raised once it cannot fit any more.

        None is no limit.
        """
        self._budgets.of_thread = None if max_tokens is None else _Budget(max_tokens)
        try:
            yield
        finally:
            self._budgets.of_thread = None

    def encode(self, text: Any, *arguments: Any, **keywords: Any) -> list[int]:
        """See transformers."""
        return self._spend(text, super().encode, arguments, keywords)

    def __call__(self, text: Any = None, *arguments: Any, **keywords: Any) -> Any:
        """See transformers."""
        return self._spend(text, super().__call__, arguments, keywords)

    def _spend(self, text: Any, encode: Any, arguments: Any, keywords: Any) -> Any:
        budget: _Budget | None = getattr(self._budgets, "of_thread", None)
        if budget is None or not isinstance(text, str):
            return encode(text, *arguments, **keywords)
        # A text of fewer characters than tokens may be is only bounded together with what came before it.
        least = self._least_token_count.of(text) if len(text) > budget.max_tokens else 0
        # Renderers put pieces together. One may encode a piece twice, to see whose its tokens are: so half is certain.
        least = max(least, budget.encoded_tokens // 2)
        if least > budget.max_tokens:
            raise PromptTooLong(
                f"the prompt has at least {least} tokens, more than {budget.max_tokens}", least_tokens=least
            )
        encoded = encode(text, *arguments, **keywords)
        budget.encoded_tokens += len(encoded if isinstance(encoded, list) else encoded["input_ids"])
        return encoded

    @cached_property
    def _budgets(self) -> threading.local:
        return threading.local()

    @cached_property
    def _least_token_count(self) -> LeastTokenCount:
        return LeastTokenCount(self.backend_tokenizer)
