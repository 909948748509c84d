"""Completes a judge spec, so that its hash says all that decides a verdict."""

from typing import Final

from clawstream.errors import SettingsError
from schemas.judge_spec import JudgeSpec
from services.judge.prompts import load_prompt

DEFAULT_PROMPTS: Final = {"likelihood": "likelihood-1", "sglang": "verdict-1", "openai": "verdict-1"}
"""Backends that use a model, with the prompt they take when the spec names none."""


def completed(spec: JudgeSpec) -> JudgeSpec:
    """`spec` with everything filled in that its backend implies.

    Judges that always say the same have one vote; those without a model have no prompt. The result completes to itself.

    Raises SettingsError for an unknown backend or prompt, for a model judge without a model's name, and when the spec
    was made with another text of the prompt than this installation has.
    """
    if spec.backend not in DEFAULT_PROMPTS:
        if spec.backend != "rules" and ":" not in spec.backend:
            known = ", ".join(["rules", *DEFAULT_PROMPTS])
            raise SettingsError(
                f"judge backend {spec.backend!r} is none of {known}, nor an import path package.module:name"
            )
        return spec.model_copy(update={"votes": 1, "prompt": "", "prompt_sha256": ""})
    if not spec.model:
        raise SettingsError(f"judge backend {spec.backend!r} needs the name of its model (spec.model)")
    prompt = load_prompt(spec.prompt or DEFAULT_PROMPTS[spec.backend])
    if spec.prompt_sha256 not in ("", prompt.sha256):
        raise SettingsError(
            f"judge spec {spec.spec_hash} was made with another text of prompt {prompt.name!r} "
            f"({spec.prompt_sha256[:12]}, here {prompt.sha256[:12]}): install the version that has it"
        )
    votes = 1 if spec.backend == "likelihood" else spec.votes
    return spec.model_copy(update={"votes": votes, "prompt": prompt.name, "prompt_sha256": prompt.sha256})
