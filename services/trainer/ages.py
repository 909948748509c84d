"""How old tokens are, in weight versions. Decided from absolute versions only, so that a restart changes nothing.

An age counts all that happened between sampling and training: the answer's flight through an engine that was updated
meanwhile, the wait for its next state, the log, the batch, and updates that the trainer has made and not published yet.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from schemas.events.base import VersionSpan


def oldest_version(spans: Sequence[VersionSpan]) -> int:
    """The version of the oldest weights in an answer that an update may have cut in two."""
    return min(span.weight_version for span in spans)


def newest_version(spans: Sequence[VersionSpan]) -> int:
    """The version of the newest weights in the answer."""
    return max(span.weight_version for span in spans)


def age(version: int, current_version: int) -> int:
    """Versions between weights that sampled and the weights that are about to learn."""
    return current_version - version


def is_too_old(version: int, current_version: int, max_age_versions: int | None) -> bool:
    """Whether what `version` sampled must not be trained. None allows any age."""
    return max_age_versions is not None and age(version, current_version) > max_age_versions


def stale_tokens(
    spans: Sequence[VersionSpan], num_tokens: int, current_version: int, max_age_versions: int | None
) -> NDArray[np.bool_]:
    """[num_tokens]: tokens that are too old: an answer that an update cut in two may lose only its older part."""
    stale = np.zeros(num_tokens, np.bool_)
    for span in spans:
        stale[span.start : span.end] = is_too_old(span.weight_version, current_version, max_age_versions)
    return stale


def gap_in(spans: Sequence[VersionSpan], num_tokens: int) -> str | None:
    """Which tokens have no version, or two; None when every one has exactly one."""
    position = 0
    for span in spans:
        if span.start != position or span.end <= span.start:
            return f"version span {span.start}..{span.end} where one from {position} on was expected"
        position = span.end
    return None if position == num_tokens else f"version spans end at {position} of {num_tokens} tokens"
