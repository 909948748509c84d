"""At which ids, beside the sampled ones, policy and teacher are compared. Plain arrays."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.trainer.algorithms.options import IdSource
from services.trainer.sample import IdTargets, TeacherTargets, TrainingSample


@dataclass(frozen=True, slots=True)
class GivenIdsOfRow:
    """The ids of the answers of one packed row, end to end."""

    ids: NDArray[np.int64]
    """[response_tokens, k]; -1 where a token has fewer."""
    teacher_log_probs: NDArray[np.float32]
    """[response_tokens, k] in nats, at temperature 1; 0 where there is no id."""


def has_ids(teacher: TeacherTargets, source: IdSource) -> bool:
    """Whether a teacher's signal has the ids of `source`."""
    if source is IdSource.NONE:
        return True
    wanted = {
        IdSource.TEACHER_TOP: (teacher.top,),
        IdSource.STUDENT_TOP: (teacher.support,),
        IdSource.OVERLAP: (teacher.top, teacher.support),
    }
    return all(targets is not None for targets in wanted[source])


def given_ids(samples: Sequence[TrainingSample], source: IdSource, ids_per_token: int | None) -> GivenIdsOfRow:
    """The ids of `source` for every token of `samples`, at most `ids_per_token` a token; none for masked tokens.

    Of the teacher's ids the likeliest stay; of the student's, which come in the engine's order, the first.
    """
    parts = [_of_sample(sample, source, ids_per_token) for sample in samples]
    widest = max([1, *(part.ids.shape[1] for part in parts)])
    ids = np.full((sum(len(part.ids) for part in parts), widest), -1, np.int64)
    log_probs = np.zeros(ids.shape, np.float32)
    start = 0
    for part in parts:
        place = (slice(start, start + len(part.ids)), slice(0, part.ids.shape[1]))
        ids[place] = part.ids
        log_probs[place] = np.where(part.ids >= 0, part.log_probs, 0.0)
        start += len(part.ids)
    return GivenIdsOfRow(ids, log_probs)


def _of_sample(sample: TrainingSample, source: IdSource, ids_per_token: int | None) -> IdTargets:
    teacher, tokens = sample.teacher, sample.response_ids.size
    if teacher is None or not has_ids(teacher, source):
        return IdTargets(np.full((tokens, 1), -1, np.int32), np.zeros((tokens, 1), np.float32))
    targets = teacher.top if source is IdSource.TEACHER_TOP else teacher.support
    assert targets is not None
    ids, log_probs = targets.ids, targets.log_probs
    exists = (ids >= 0) & teacher.mask[:, None]
    if source is IdSource.OVERLAP:
        assert teacher.top is not None
        exists &= (ids[:, :, None] == teacher.top.ids[:, None, :]).any(2)
    # Existing ids first; the teacher's by falling log-prob, whatever order it gave them in.
    order = np.zeros(ids.shape, np.float32)  # a stable sort leaves equal ones in the order they came
    if source is IdSource.TEACHER_TOP:
        order = -log_probs
    ranks = np.argsort(np.where(exists, order, np.inf), axis=1, kind="stable")[:, :ids_per_token]
    ids = np.take_along_axis(np.where(exists, ids, -1), ranks, axis=1)
    return IdTargets(ids, np.take_along_axis(log_probs, ranks, axis=1))
