"""Samples that cannot be trained on are refused when they are made."""

import numpy as np
import pytest

from tests.fixtures.training_samples import random_samples, replace_sample


@pytest.mark.parametrize(
    "change",
    [
        {"behaviour_log_probs": np.zeros(1, dtype=np.float32)},
        {"prompt_ids": np.zeros(0, dtype=np.int32)},
        {"sampling_temperature": 0.0},
    ],
)
def test_a_malformed_sample_is_named(change: dict[str, object]) -> None:
    sample = replace_sample(random_samples([1.0])[0], sample_id="the-one")
    with pytest.raises(ValueError, match="the-one"):
        replace_sample(sample, **change)
