"""Moves the large number arrays of a turn out of its event: a long turn must pass through the log."""

import asyncio

from clawstream.blobs import BlobStore
from clawstream.errors import BlobError
from clawstream.log import Logger
from clawstream.metrics import Metrics
from schemas.arrays import MAX_INLINE_BYTES, NumberArray
from schemas.events import TurnEvent


class TurnBlobs:
    """Packs turns. Safe to use from many tasks."""

    def __init__(self, store: BlobStore, metrics: Metrics, logger: Logger) -> None:
        self._store = store
        self._metrics = metrics
        self._logger = logger

    async def packed(self, turn: TurnEvent) -> TurnEvent:
        """The turn with every array over the inline limit in a blob, which is durable when this returns.

        When the store refuses, the arrays stay inline: the log takes most turns even so.
        """
        if all(array.size_bytes <= MAX_INLINE_BYTES for array in _arrays(turn).values()):
            return turn
        try:
            return await asyncio.to_thread(with_blobs, turn, self._store)
        except BlobError as error:
            self._metrics.increment("blob_errors_total")
            self._logger.error("a turn's arrays stay inside its event", turn_id=turn.turn_id, error=str(error))
            return turn


def with_blobs(turn: TurnEvent, store: BlobStore) -> TurnEvent:
    """Writes the large arrays of `turn` to `store` and returns the turn that refers to them. Raises BlobError."""
    return turn.model_copy(
        update={
            name: store.pack(array.to_numpy())
            for name, array in _arrays(turn).items()
            if array.blob is None and array.size_bytes > MAX_INLINE_BYTES
        }
    )


def _arrays(turn: TurnEvent) -> dict[str, NumberArray]:
    return {
        "prompt_ids": turn.prompt_ids,
        "response_ids": turn.response_ids,
        "response_logprobs": turn.response_logprobs,
    }
