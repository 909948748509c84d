"""The judge's prompts: one file each, never changed once used, since the text is part of the judge spec.

A `.txt` file is a prompt for boxed verdicts, a `.yaml` file one for verdict words by likelihood. Placeholders are
`{mark}`, `{request}`, `{answer}` and `{following}`; any other brace is text.
"""

import hashlib
import re
from dataclasses import dataclass
from importlib import resources
from typing import Final

import yaml
from pydantic import BaseModel, ConfigDict, Field

from clawstream.errors import SettingsError
from services.judge.evidence import Evidence

_SUFFIXES: Final = (".txt", ".yaml")
_PLACEHOLDER: Final = re.compile(r"\{(?:mark|request|answer|following)\}")


class LikelihoodPrompt(BaseModel):
    """A few-shot prompt and the words that may follow it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    words: dict[str, int] = Field(min_length=2)
    """Text that may continue the prompt, with its verdict. Leading spaces count."""
    offsets_nats: dict[str, float] = {}
    """Added to a word's log-prob: corrects what the model prefers whatever it reads. Zero when absent."""
    neutral_within_nats: float = Field(default=0.0, ge=0)
    """When the best word leads the best word of another verdict by less, the verdict is 0."""
    text: str = Field(min_length=1)
    """The prompt, ending where the word is to follow."""


@dataclass(frozen=True, slots=True)
class PromptFile:
    """A prompt as it is on disk."""

    name: str
    text: str
    """The file's whole text."""
    sha256: str
    """Checksum of the text in hexadecimal."""


def load_prompt(name: str) -> PromptFile:
    """The prompt file `name` (without suffix). Raises SettingsError, which lists those that exist."""
    folder = resources.files(__name__)
    files = {file.name: file for file in folder.iterdir() if file.name.endswith(_SUFFIXES)}
    for suffix in _SUFFIXES:
        file = files.get(name + suffix)
        if file is not None:
            text = file.read_text(encoding="utf-8")
            return PromptFile(name=name, text=text, sha256=hashlib.sha256(text.encode()).hexdigest())
    known = ", ".join(sorted(found.rsplit(".", 1)[0] for found in files))
    raise SettingsError(f"judge prompt {name!r} does not exist; there are: {known}")


def load_likelihood_prompt(name: str) -> LikelihoodPrompt:
    """The few-shot prompt `name`. Raises SettingsError when it does not exist or is of another kind."""
    document: object = yaml.safe_load(load_prompt(name).text)
    if not isinstance(document, dict):
        raise SettingsError(f"judge prompt {name!r} has no verdict words: the likelihood backend needs a .yaml prompt")
    return LikelihoodPrompt.model_validate(document)


def filled(template: str, evidence: Evidence) -> str:
    """`template` with the evidence in its places, in one pass: a placeholder inside the evidence stays text."""
    values = {
        "{mark}": evidence.mark,
        "{request}": evidence.request,
        "{answer}": evidence.answer,
        "{following}": evidence.following,
    }
    return _PLACEHOLDER.sub(lambda found: values[found[0]], template)
