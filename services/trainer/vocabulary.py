# pyright: basic
# Reason: reads documents of no fixed form.
"""Whether token ids fit a model, and whether two models mean the same by them, as far as their folders tell."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clawstream.errors import SettingsError
from services.trainer.engine.model import PolicyModel
from services.trainer.sample import TrainingSample


def check_token_ids(samples: Sequence[TrainingSample], vocabulary_size: int) -> None:
    """Raises ValueError, naming the sample, for an id that a model of so many ids does not have."""
    for sample in samples:
        teacher = sample.teacher
        targets = [] if teacher is None else [each.ids for each in (teacher.top, teacher.support) if each]
        texts = [sample.prompt_ids, sample.response_ids]
        if sample.asked_prompt_ids is not None:
            texts.append(sample.asked_prompt_ids)
        for lowest, ids in (*((0, each) for each in texts), *((-1, each) for each in targets)):  # -1: no id
            if ids.size and (ids.min() < lowest or ids.max() >= vocabulary_size):
                raise ValueError(
                    f"sample {sample.sample_id}: token ids {ids.min()}..{ids.max()} do not fit "
                    f"the model's vocabulary of {vocabulary_size}; it was made with another tokenizer"
                )


def check_shares_vocabulary(directory: Path, policy_directory: Path, teacher: PolicyModel, policy: PolicyModel) -> None:
    """Raises SettingsError when the teacher in `directory` cannot score this policy's answers: another number of ids,
    other tokens under them, or less room than the policy has."""
    problems: list[str] = []
    if teacher.vocabulary_size != policy.vocabulary_size:
        problems.append(f"it has {teacher.vocabulary_size} token ids, the policy {policy.vocabulary_size}")
    elif _tokens(directory) != _tokens(policy_directory):
        problems.append(f"its tokenizer.json has other tokens than that of {policy_directory}")
    room, needed = (each.hugging_face_config.max_position_embeddings for each in (teacher, policy))
    if room < needed:
        problems.append(f"its context is {room} tokens, the policy's {needed}")
    if problems:
        raise SettingsError(
            f"trainer.own_teacher: the model in {directory} cannot teach this policy: {'; '.join(problems)}; name "
            "another model, or none for the base model"
        )


def _tokens(directory: Path) -> Any:
    """Tokens and ids of `tokenizer.json`; None without one."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        return None
    document = json.loads(file.read_text(encoding="utf-8"))
    added = [(each["id"], each["content"]) for each in document.get("added_tokens", ())]
    return document.get("model", {}).get("vocab"), sorted(added)
