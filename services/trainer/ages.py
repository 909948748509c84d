"""How old a sample is, in weight versions. Decided from absolute versions only, so that a restart changes nothing."""

from collections.abc import Sequence

from schemas.events.base import VersionSpan


def oldest_version(spans: Sequence[VersionSpan]) -> int:
    """The version of the oldest weights in an answer that an update may have cut in two."""
    return min(span.weight_version for span in spans)


def newest_version(spans: Sequence[VersionSpan]) -> int:
    """The version of the newest weights in the answer."""
    return max(span.weight_version for span in spans)


def age(spans_oldest_version: int, current_version: int) -> int:
    """Versions between an answer's oldest token and the weights that are about to learn from it."""
    return current_version - spans_oldest_version


def is_too_old(spans_oldest_version: int, current_version: int, max_age_versions: int | None) -> bool:
    """Whether the sample must be dropped. None allows any age."""
    return max_age_versions is not None and age(spans_oldest_version, current_version) > max_age_versions
