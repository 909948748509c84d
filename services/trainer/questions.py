"""What the trainer's own teacher is asked, as JSON for the other ranks: prompts and answers, no rewards."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from schemas.arrays import NumberArray
from services.trainer.sample import TeacherTargets, TrainingSample


def question_as_document(sample: TrainingSample) -> dict[str, Any]:
    """Of a sample that asks."""
    assert sample.asked_prompt_ids is not None
    arrays = {
        "prompt_ids": sample.prompt_ids,
        "hinted_prompt_ids": sample.asked_prompt_ids,
        "response_ids": sample.response_ids,
    }
    packed = {name: NumberArray.from_numpy(ids).model_dump(mode="json") for name, ids in arrays.items()}
    return {"sample_id": sample.sample_id, **packed}


def question_from_document(document: Mapping[str, Any]) -> TrainingSample:
    """A sample that asks the same; it cannot be trained."""
    prompt, hinted, response = (
        NumberArray.model_validate(document[name]).to_numpy().astype(np.int32)
        for name in ("prompt_ids", "hinted_prompt_ids", "response_ids")
    )
    return TrainingSample(
        sample_id=document["sample_id"],
        prompt_ids=prompt,
        response_ids=response,
        behaviour_log_probs=np.full(response.size, np.nan, np.float32),
        rl_mask=np.zeros(response.size, np.bool_),
        teacher=TeacherTargets.asked(hinted, response.size),
    )
