# pyright: basic
# Reason: fsspec has no type information.
"""Whether every trained batch is still kept as it was trained. The oldest may have been removed by retention."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any, Final

import fsspec

from clawstream import topics
from clawstream.audit.checks import Check, Evidence, Violation
from clawstream.topics import full_name

_CHUNK_BYTES: Final = 1024 * 1024
Checksum = Callable[[str], str | None]
"""A URL's sha256 in hexadecimal, or None when there is no such file."""


def sha256_of_url(url: str) -> str | None:
    """Of the bytes at an fsspec URL; None when it is not there. Raises OSError when it cannot be read."""
    digest = hashlib.sha256()
    try:
        filesystem, path = fsspec.url_to_fs(url)
        with filesystem.open(path, "rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    except FileNotFoundError:
        return None
    return digest.hexdigest()


def archive_check(checksum: Checksum) -> Check:
    """Every batch has its archive, with the right bytes."""

    def find(evidence: Evidence) -> Iterator[Violation]:
        topic = full_name(evidence.namespace, topics.TRAIN_STEPS)
        query = """SELECT lineage, at, step, batch_uri, batch_sha256 FROM steps
                   WHERE batch_uri IS NOT NULL ORDER BY lineage, step DESC"""
        for _, steps in groupby(evidence.memory.ask(query), key=lambda row: row[0]):
            yield from _of_lineage(topic, steps, checksum)

    return Check(
        "batches are kept",
        "every trained batch has its archive, with the right checksum",
        "SELECT count(*) FROM steps WHERE batch_uri IS NOT NULL",
        find,
    )


def _of_lineage(topic: str, newest_first: Iterable[tuple[Any, ...]], checksum: Checksum) -> Iterator[Violation]:
    """Retention removes the oldest: one may be gone only if a newer one is there and every older one is gone too."""
    gone: list[Violation] = []
    newest_is_there = False
    for _, at, step, url, sha256 in newest_first:
        found = checksum(url)
        if found is None:
            lost = Violation(topic, 0, at, f"the batch of step {step} is not at {url}")
            if newest_is_there:
                gone.append(lost)
            else:
                yield lost
            continue
        newest_is_there = True
        yield from gone
        gone.clear()
        if found != sha256:
            yield Violation(topic, 0, at, f"the batch of step {step} at {url} has sha256 {found}, not {sha256}")
