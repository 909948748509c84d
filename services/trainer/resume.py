"""Where a trainer starts: from its newest good checkpoint, or anew; and under which lineage and numbers. Pure.

A version's number is never used again for other weights. So the next number is above everything that the log, the
disk and the checkpoint know; and a run that goes on from an older checkpoint than it had reached (the newest one was
torn, say) becomes a lineage of its own, since the lost steps' ids are on the log already.
"""

from collections.abc import Sequence

from clawstream import ids
from services.trainer.history import History
from services.trainer.progress import Progress


def first_progress(history: History, versions_on_disk: Sequence[int], *, lineage: str, start_version: int) -> Progress:
    """A run without a checkpoint, from the weights of `start_version` (0: the base model)."""
    newest = max([start_version, history.newest_number, *versions_on_disk])
    return Progress(
        lineage=lineage,
        weight_version=start_version,
        newest_version=newest,
        base_version=start_version if start_version else None,
    )


def resumed_progress(checkpoint: Progress, history: History, versions_on_disk: Sequence[int]) -> Progress:
    """A run that goes on from `checkpoint`."""
    newest = max([checkpoint.newest_version, history.newest_number, *versions_on_disk])
    progress = checkpoint.model_copy(update={"newest_version": newest})
    if history.is_ahead_of(checkpoint.lineage, checkpoint.step, checkpoint.newest_version):
        lineage = ids.derive("lineage", checkpoint.lineage, checkpoint.step, newest)
        return progress.announced().model_copy(update={"lineage": lineage})
    published = history.versions.get(checkpoint.weight_version)
    makers = [event for event in checkpoint.unannounced if event.weight_version == checkpoint.weight_version]
    if makers and published is not None and published.train_step_id != makers[-1].train_step_id:
        # Another run took the number between this checkpoint and its publication.
        number = newest + 1
        events = [
            event.model_copy(update={"weight_version": number}) if event in makers else event
            for event in checkpoint.unannounced
        ]
        return progress.model_copy(update={"weight_version": number, "newest_version": number, "unannounced": events})
    return progress
