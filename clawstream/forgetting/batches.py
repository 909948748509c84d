"""Archived batches that hold forgotten samples: listed, removed, or rewritten without them."""

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from urllib.parse import unquote, urlsplit

from clawstream.durable_files import sha256_of_file, sync_directory
from clawstream.errors import BlobError
from clawstream.forgetting.lineage import SeenStep
from schemas.events.forgotten import BatchFate, ForgottenBatch

BatchRewriter = Callable[[Path, str, frozenset[str]], str]
"""The file, its checksum, the samples that leave it: rewrites the file in place and returns its new checksum."""


class BatchTreatment(StrEnum):
    """What is to become of archived batches that hold forgotten samples."""

    KEEP = "keep"
    """They are only listed: training can be repeated exactly."""
    REMOVE = "remove"
    """The files are removed: those steps cannot be repeated or audited any more."""
    REWRITE = "rewrite"
    """The forgotten samples leave them; what is left no longer gives the weights that the step made."""


def treat_batch(
    step: SeenStep, known: ForgottenBatch | None, treatment: BatchTreatment, rewrite: BatchRewriter | None
) -> ForgottenBatch:
    """Does what is asked with the batch of `step`, which may have been done before (`known`).

    Raises BlobError for a file with neither of the checksums it may have, OSError, and ValueError without a rewriter
    where one is needed.
    """
    file = _local_file(step.batch_uri)
    before = known or ForgottenBatch(
        lineage=step.lineage, step=step.step, uri=step.batch_uri, sha256=step.batch_sha256, fate=BatchFate.KEPT
    )
    if file is None or not file.is_file():
        fate = before.fate if before.fate is BatchFate.REMOVED else BatchFate.ABSENT
        return before.model_copy(update={"fate": fate})
    if treatment is BatchTreatment.KEEP or (treatment is BatchTreatment.REWRITE and before.fate is BatchFate.REWRITTEN):
        return before
    if treatment is BatchTreatment.REMOVE or len(step.sample_ids) == step.num_samples:
        file.unlink()
        sync_directory(file.parent)
        return before.model_copy(update={"fate": BatchFate.REMOVED, "new_sha256": ""})
    if rewrite is None:
        raise ValueError("batches are to be rewritten, but nothing can rewrite them")
    found = sha256_of_file(file)
    expected = before.new_sha256 or before.sha256
    if found != expected:
        raise BlobError(f"archived batch {file} has checksum {found}, not {expected}: it is left as it is")
    new_sha256 = rewrite(file, expected, frozenset(step.sample_ids))
    return before.model_copy(update={"fate": BatchFate.REWRITTEN, "new_sha256": new_sha256})


def _local_file(uri: str) -> Path | None:
    parts = urlsplit(uri)
    return Path(unquote(parts.path)) if parts.scheme == "file" and parts.path else None
