"""Completes a judge spec, so that its hash says all that decides a verdict."""

from typing import Final

from clawstream.errors import SettingsError
from schemas.judge_spec import JudgeSpec
from services.judge.prompts import PromptFile, load_prompt

DEFAULT_PROMPTS: Final = {"likelihood": "likelihood-1", "sglang": "verdict-1", "openai": "verdict-1"}
"""Backends that use a model, with the prompt they take when the spec names none."""
DEFAULT_HINT_PROMPT: Final = "hint-1"
"""The prompt of hint votes when the spec names none."""
WRITES_TEXT: Final = ("sglang", "openai")
"""Backends that can be asked for hints."""


def completed(spec: JudgeSpec) -> JudgeSpec:
    """`spec` with everything filled in that its backend implies.

    Judges that always say the same have one vote; those without a model have no prompt; the hint prompt is named
    exactly when there are hint votes. The result completes to itself.

    Raises SettingsError for an unknown backend or prompt, for a model judge without a model's name, for hint votes of a
    backend that writes no text, and when the spec was made with another text of a prompt than this installation has.
    """
    is_own = ":" in spec.backend
    if spec.backend not in DEFAULT_PROMPTS and spec.backend != "rules" and not is_own:
        known = ", ".join(["rules", *DEFAULT_PROMPTS])
        raise SettingsError(
            f"judge backend {spec.backend!r} is none of {known}, nor an import path package.module:name"
        )
    if spec.judge_gives_hints and spec.backend not in WRITES_TEXT and not is_own:
        raise SettingsError(
            f"judge spec: hints = {spec.hints!r} needs a backend that writes text ({', '.join(WRITES_TEXT)}) or a "
            f"judge of your own, not {spec.backend!r}; the user's own words need none: hints = 'user'"
        )
    has_hint_votes = spec.judge_gives_hints and spec.backend in WRITES_TEXT
    hint_prompt = _prompt(spec, spec.hint_prompt or DEFAULT_HINT_PROMPT, spec.hint_prompt_sha256, has_hint_votes)
    spec = spec.model_copy(update={"hint_prompt": hint_prompt.name, "hint_prompt_sha256": hint_prompt.sha256})
    if spec.backend not in DEFAULT_PROMPTS:
        return spec.model_copy(update={"votes": 1, "prompt": "", "prompt_sha256": ""})
    if not spec.model:
        raise SettingsError(f"judge backend {spec.backend!r} needs the name of its model (spec.model)")
    prompt = _prompt(spec, spec.prompt or DEFAULT_PROMPTS[spec.backend], spec.prompt_sha256, is_used=True)
    votes = 1 if spec.backend == "likelihood" else spec.votes
    return spec.model_copy(update={"votes": votes, "prompt": prompt.name, "prompt_sha256": prompt.sha256})


def _prompt(spec: JudgeSpec, name: str, expected_sha256: str, is_used: bool) -> PromptFile:
    if not is_used:
        return PromptFile(name="", text="", sha256="")
    prompt = load_prompt(name)
    if expected_sha256 not in ("", prompt.sha256):
        raise SettingsError(
            f"judge spec {spec.spec_hash} was made with another text of prompt {prompt.name!r} "
            f"({expected_sha256[:12]}, here {prompt.sha256[:12]}): install the version that has it"
        )
    return prompt
