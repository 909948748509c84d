# pyright: basic
# Reason: torch.distributed is untyped.
"""One policy on several ranks: the first decides, the others follow.

The first rank broadcasts what comes next as JSON (nothing is pickled). A batch travels by its archive, which every
rank sees on the shared file system and checks by its sha256, so all train on the same bytes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import torch
import torch.distributed as distributed

from services.trainer.batch_archive import ArchivedBatch, read_batch
from services.trainer.checkpoint import read_checkpoint
from services.trainer.engine import cpu_platform
from services.trainer.engine.parallel import ParallelLayout
from services.trainer.policy import PolicySnapshot, PolicyTrainer
from services.trainer.sample import StepResult, TrainingSample


class RankChannel:
    """Documents from the first rank to all others. Every `send` needs a `receive` on each of them."""

    def __init__(self, layout: ParallelLayout) -> None:
        self._layout = layout

    def send(self, document: Mapping[str, Any]) -> None:
        """On the first rank."""
        if self._layout.world_size == 1:
            return
        payload = torch.frombuffer(bytearray(orjson.dumps(document)), dtype=torch.uint8).to(cpu_platform.device())
        distributed.broadcast(torch.tensor([payload.numel()], device=cpu_platform.device()), src=0)
        distributed.broadcast(payload, src=0)

    def receive(self) -> dict[str, Any]:
        """On the others."""
        size = torch.zeros(1, dtype=torch.int64, device=cpu_platform.device())
        distributed.broadcast(size, src=0)
        payload = torch.empty(int(size.item()), dtype=torch.uint8, device=cpu_platform.device())
        distributed.broadcast(payload, src=0)
        return orjson.loads(payload.cpu().numpy().tobytes())


class RankedPolicy:
    """`services.trainer.ports.Policy`: says to all ranks what to do, and does its own part."""

    def __init__(self, trainer: PolicyTrainer, channel: RankChannel) -> None:
        self._trainer = trainer
        self._channel = channel

    @property
    def num_updates(self) -> int:
        return self._trainer.optimizer.num_updates

    @property
    def vocabulary_size(self) -> int:
        return self._trainer.model.vocabulary_size

    def open(self, model_directory: Path, checkpoint_directory: Path | None) -> None:
        """Loads the model, and puts a checkpoint's state over it."""
        directory = None if checkpoint_directory is None else str(checkpoint_directory)
        self._channel.send({"do": "open", "model": str(model_directory), "checkpoint": directory})
        open_policy(self._trainer, model_directory, checkpoint_directory)

    def train_step(
        self, samples: Sequence[TrainingSample], archived: ArchivedBatch, learning_rate: float
    ) -> StepResult:
        self._channel.send(
            {"do": "train", "path": str(archived.path), "sha256": archived.sha256, "learning_rate": learning_rate}
        )
        return self._trainer.train_step(samples, learning_rate)

    def snapshot(self) -> PolicySnapshot:
        self._channel.send({"do": "snapshot"})
        snapshot = self._trainer.snapshot()
        assert snapshot is not None  # the first rank gets it
        return snapshot

    def keep_alive(self) -> None:
        self._channel.send({"do": "wait"})

    def close(self) -> None:
        """Lets the other ranks end."""
        self._channel.send({"do": "end"})


def open_policy(trainer: PolicyTrainer, model_directory: Path, checkpoint_directory: Path | None) -> None:
    """One rank's part of `RankedPolicy.open`."""
    trainer.load(model_directory)
    if checkpoint_directory is not None:
        read_checkpoint(checkpoint_directory).restore(trainer)


def follow(trainer: PolicyTrainer, channel: RankChannel) -> None:
    """The life of every rank but the first. Returns when the first one ends."""
    while True:
        order = channel.receive()
        match order["do"]:
            case "open":
                checkpoint = order["checkpoint"]
                open_policy(trainer, Path(order["model"]), None if checkpoint is None else Path(checkpoint))
            case "train":
                samples = read_batch(Path(order["path"]), order["sha256"])
                trainer.train_step(samples, order["learning_rate"])
            case "snapshot":
                trainer.snapshot()
            case "wait":
                pass
            case "end":
                return
            case unknown:
                raise RuntimeError(f"rank 0 ordered {unknown!r}; all ranks must run the same version")
