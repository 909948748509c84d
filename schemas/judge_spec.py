"""A judge spec: all that decides what a judge would say. Its hash names it everywhere."""

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

_ADDED_FIELDS: Final = ("hint_votes", "hint_prompt", "hint_prompt_sha256")
"""Fields that came after the first release: no part of the hash while they say what was so before they came."""


class JudgeSpec(BaseModel):
    """Backend, model, prompt, sampling and votes."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    backend: str = "rules"
    """`rules`, `likelihood`, `sglang`, `openai`, or an import path `package.module:name` of your own."""
    model: str = ""
    """Name of the judge model; empty for rules."""
    votes: int = Field(default=3, ge=1, le=99)
    """Number of verdict votes. Judges that always say the same (rules, likelihood, your own code) have one."""
    temperature: float = Field(default=0.6, ge=0)
    """Sampling temperature of the votes."""
    max_new_tokens: int = Field(default=4096, ge=1)
    """Cap on a vote's tokens."""
    prompt: str = ""
    """Name of the prompt file in the judge's `prompts` folder; empty for the backend's default."""
    prompt_sha256: str = ""
    """Checksum of the prompt's text, filled in when the judge starts: another text is another spec."""
    max_prompt_characters: int = Field(default=48_000, ge=256)
    """Longer evidence is cut in the middle, with a marker."""
    hints: Literal["none", "user", "judge", "both"] = "none"
    """Where hints come from: nowhere, the user's own words, the judge, or both. Words of explicit feedback are always
    kept. A judge gives hints by hint votes (`sglang`, `openai`), or as part of what your own returns."""
    hint_votes: int = Field(default=3, ge=1, le=99)
    """Number of hint votes, when the judge gives hints."""
    hint_prompt: str = ""
    """Name of the hint prompt's file in the judge's `prompts` folder; empty for the default, or without hint votes."""
    hint_prompt_sha256: str = ""
    """Checksum of that text, filled in when the judge starts."""
    rules: list[tuple[str, int]] = Field(default=[])
    """For the `rules` backend: pairs of a regular expression on the following text and a verdict; first match."""

    @property
    def judge_gives_hints(self) -> bool:
        """Whether the judge itself is a source of hints."""
        return self.hints in ("judge", "both")

    @property
    def user_gives_hints(self) -> bool:
        """Whether what the user wrote next is one."""
        return self.hints in ("user", "both")

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As pydantic's. A copy has a hash of its own."""
        copied = super().model_copy(update=update, deep=deep)
        vars(copied).pop("spec_hash", None)
        return copied

    @cached_property
    def spec_hash(self) -> str:
        """The first 16 hexadecimal digits of the sha256 over the canonical JSON."""
        fields = self.model_dump(mode="json")
        for name in _ADDED_FIELDS:
            if fields[name] == type(self).model_fields[name].default:
                del fields[name]
        canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]
