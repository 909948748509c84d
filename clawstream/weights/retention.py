"""Which published versions may be removed. A pure function, so that every case can be tried."""

from collections.abc import Collection, Mapping


def deletable(
    versions: Collection[int],
    applied_by_engines: Mapping[str, int | None],
    keep: int,
    in_flight: Collection[int] = (),
) -> list[int]:
    """Versions that nobody may still load, ascending.

    Kept are the newest `keep` (at least one), every version that an engine serves, and those `in_flight`: targets
    of running updates, what the pointer names, what an audit or a retraining holds. An engine whose version is
    unknown (None) may be sent back to any version, so while there is one nothing may go; engines that have expired
    are not to be passed. Raises ValueError when `keep` is below 1.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}: the newest version is always needed")
    serving = set(applied_by_engines.values())
    if None in serving:
        return []
    newest = sorted(set(versions))[-keep:]
    return sorted(set(versions) - set(newest) - serving - set(in_flight))
