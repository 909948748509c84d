# pyright: basic
"""A tokenizer for prompts: it gives up as soon as one cannot fit, and remembers what conversations repeat.

Basic type checking: transformers' classes are untyped here.
"""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import BatchEncoding, PreTrainedTokenizerFast

from clawstream.errors import PromptTooLong
from clawstream.rendering.segment_cache import SegmentCache
from clawstream.rendering.token_count_bound import LeastTokenCount


@dataclass(slots=True)
class _Budget:
    """Of one prompt that is being rendered."""

    max_tokens: int | None
    encoded_tokens: int = 0
    """So far, over all pieces."""


class BoundedTokenizer(PreTrainedTokenizerFast):
    """Hugging Face's fast tokenizer; `at_most` is in force while a prompt is rendered. Thread-safe: limits are per
    thread."""

    @contextmanager
    def at_most(self, max_tokens: int | None) -> Generator[None]:
        """Whatever this thread encodes inside is one prompt; PromptTooLong is raised once it cannot fit any more.

        None is no limit.
        """
        self._budgets.of_thread = _Budget(max_tokens)
        try:
            yield
        finally:
            self._budgets.of_thread = None

    def encode(self, text: Any, *arguments: Any, **keywords: Any) -> list[int]:
        """See transformers."""
        if (ids := self._prompt_ids(text, arguments, keywords)) is not None:
            return ids
        return super().encode(text, *arguments, **keywords)

    def __call__(self, text: Any = None, *arguments: Any, **keywords: Any) -> Any:
        """See transformers."""
        if (ids := self._prompt_ids(text, arguments, keywords)) is not None:
            return BatchEncoding({"input_ids": ids, "attention_mask": [1] * len(ids)})
        return super().__call__(text, *arguments, **keywords)

    def _prompt_ids(self, text: Any, arguments: Any, keywords: Any) -> list[int] | None:
        """Ids of a piece of the prompt that this thread renders; None for what is more than that."""
        budget: _Budget | None = getattr(self._budgets, "of_thread", None)
        if budget is None or not isinstance(text, str):
            return None
        self._check(text, budget)
        wants_ids_only = not arguments and keywords.get("add_special_tokens") is False and not any(keywords.values())
        ids = self._segments.encode(text) if wants_ids_only else None
        # An unknown number of tokens is left out: the limit is checked again when the prompt is there.
        budget.encoded_tokens += len(ids or ())
        return ids

    def _check(self, text: str, budget: _Budget) -> None:
        if budget.max_tokens is None:
            return
        # A text of fewer characters than tokens may be is only bounded together with what came before it.
        least = self._least_token_count.of(text) if len(text) > budget.max_tokens else 0
        # Renderers put pieces together. One may encode a piece twice, to see whose its tokens are: so half is certain.
        least = max(least, budget.encoded_tokens // 2)
        if least > budget.max_tokens:
            raise PromptTooLong(
                f"the prompt has at least {least} tokens, more than {budget.max_tokens}", least_tokens=least
            )

    @cached_property
    def _budgets(self) -> threading.local:
        return threading.local()

    @cached_property
    def _least_token_count(self) -> LeastTokenCount:
        return LeastTokenCount(self.backend_tokenizer)

    @cached_property
    def _segments(self) -> SegmentCache:
        return SegmentCache(self.backend_tokenizer)
