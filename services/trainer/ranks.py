# pyright: basic
# Reason: torch.distributed is untyped.
"""One policy on several ranks: the first decides, the others follow.

The first rank broadcasts what comes next as JSON (nothing is pickled). A batch travels by its archive, which every
rank sees on the shared file system and checks by its sha256, so all train on the same bytes. Questions for the
trainer's own teacher travel in the order itself: its answers are part of what is archived.

torch.distributed gives up on a broadcast that does not come in time. Whatever keeps the first rank (no samples, a slow
disk, a broker that is away), a thread of its own tells the others to go on waiting.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson
import torch
import torch.distributed as distributed

from clawstream.errors import RankLost, StepInterrupted
from services.trainer.batch_archive import ArchivedBatch, read_batch
from services.trainer.checkpoint import read_checkpoint
from services.trainer.engine import cpu_platform
from services.trainer.engine.parallel import ParallelLayout
from services.trainer.guards.controls import StepControls
from services.trainer.policy import PolicyTrainer
from services.trainer.policy_snapshot import PolicySnapshot
from services.trainer.questions import question_as_document, question_from_document
from services.trainer.sample import StepResult, TrainingSample

_KEEP_ALIVE_SECONDS = 30.0
"""Far below the time after which torch.distributed gives up."""


class RankChannel:
    """Documents from the first rank to all others. Every `send` needs a `receive` on each of them."""

    def __init__(self, layout: ParallelLayout) -> None:
        self._layout = layout

    @property
    def has_others(self) -> bool:
        """Whether there is anybody to talk to."""
        return self._layout.world_size > 1

    def send(self, document: Mapping[str, Any]) -> None:
        """On the first rank. Raises RankLost when another one does not answer."""
        if not self.has_others:
            return
        payload = torch.frombuffer(bytearray(orjson.dumps(document)), dtype=torch.uint8).to(cpu_platform.device())
        self._broadcast(torch.tensor([payload.numel()], device=cpu_platform.device()))
        self._broadcast(payload)

    def receive(self) -> dict[str, Any]:
        """On the others. Raises RankLost when the first one has gone."""
        size = torch.zeros(1, dtype=torch.int64, device=cpu_platform.device())
        self._broadcast(size)
        payload = torch.empty(int(size.item()), dtype=torch.uint8, device=cpu_platform.device())
        self._broadcast(payload)
        return orjson.loads(payload.cpu().numpy().tobytes())

    def _broadcast(self, tensor: torch.Tensor) -> None:
        try:
            distributed.broadcast(tensor, src=0)
        except RuntimeError as error:  # torch has no narrower class for a peer that went away
            raise RankLost(
                f"rank {self._layout.rank} of {self._layout.world_size} lost its peers: {error}; all ranks end, and "
                "start again together from the newest checkpoint"
            ) from error


class RankedPolicy:
    """`services.trainer.ports.Policy`: says to all ranks what to do, and does its own part. Used by one thread."""

    def __init__(
        self, trainer: PolicyTrainer, channel: RankChannel, *, keep_alive_seconds: float = _KEEP_ALIVE_SECONDS
    ) -> None:
        self._trainer = trainer
        self._channel = channel
        self._keep_alive_seconds = keep_alive_seconds
        self._turn = threading.Lock()
        """Held from an order to the end of its collectives: nothing may be broadcast in between."""
        self._closed = threading.Event()
        self._lost: RankLost | None = None
        if channel.has_others:
            threading.Thread(target=self._keep_alive, name="rank-keep-alive", daemon=True).start()

    def _keep_alive(self) -> None:
        while not self._closed.wait(self._keep_alive_seconds):
            with self._turn:
                if self._closed.is_set():
                    return
                try:
                    self._channel.send({"do": "wait"})
                except RankLost as error:  # raised by the next order, on the thread that can end the process
                    self._lost = error
                    return

    @contextmanager
    def _order(self, document: Mapping[str, Any]) -> Iterator[None]:
        with self._turn:
            if self._lost is not None:
                raise self._lost
            self._channel.send(document)
            yield

    @property
    def num_updates(self) -> int:
        return self._trainer.optimizer.num_updates

    @property
    def vocabulary_size(self) -> int:
        return self._trainer.model.vocabulary_size

    def open(self, model_directory: Path, *, checkpoint: Path | None = None, adapters: Path | None = None) -> None:
        """Loads the model, and puts a checkpoint's state or published adapters over it."""
        order = {"do": "open", "model": str(model_directory)}
        order |= {"checkpoint": str(checkpoint)} if checkpoint else {}
        order |= {"adapters": str(adapters)} if adapters else {}
        with self._order(order):
            open_policy(self._trainer, order)

    def train_step(
        self,
        samples: Sequence[TrainingSample],
        archived: ArchivedBatch,
        learning_rate: float,
        controls: StepControls,
    ) -> StepResult:
        order = {"do": "train", "path": str(archived.path), "sha256": archived.sha256, "learning_rate": learning_rate}
        with self._order(order | {"controls": controls.as_document()}):
            return self._trainer.train_step(samples, learning_rate, controls)

    def taught(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        # There is no archive yet: it is to hold what the teacher says.
        asking = [question_as_document(sample) for sample in samples if sample.asked_prompt_ids is not None]
        if not asking:
            return list(samples)
        with self._order({"do": "teach", "questions": asking}):
            return self._trainer.taught(samples)

    def snapshot(self) -> PolicySnapshot:
        with self._order({"do": "snapshot"}):
            snapshot = self._trainer.snapshot()
        assert snapshot is not None  # the first rank gets it
        return snapshot

    def close(self) -> None:
        """Lets the other ranks end. Nothing can be ordered afterwards."""
        with self._order({"do": "end"}):
            self._closed.set()


def open_policy(trainer: PolicyTrainer, order: Mapping[str, str]) -> None:
    """One rank's part of `RankedPolicy.open`."""
    trainer.load(Path(order["model"]))
    if "checkpoint" in order:
        read_checkpoint(Path(order["checkpoint"])).restore(trainer)
    elif "adapters" in order:
        trainer.load_published_adapters(Path(order["adapters"]))


def follow(trainer: PolicyTrainer, channel: RankChannel) -> None:
    """The life of every rank but the first. Returns when the first one ends."""
    while True:
        order = channel.receive()
        match order["do"]:
            case "open":
                open_policy(trainer, order)
            case "train":
                samples = read_batch(Path(order["path"]), order["sha256"])
                with suppress(StepInterrupted):  # on all ranks: the first says what follows
                    trainer.train_step(samples, order["learning_rate"], StepControls.from_document(order["controls"]))
            case "teach":
                with suppress(StepInterrupted):
                    trainer.taught([question_from_document(question) for question in order["questions"]])
            case "snapshot":
                trainer.snapshot()
            case "wait":
                pass
            case "end":
                return
            case unknown:
                raise RuntimeError(f"rank 0 ordered {unknown!r}; all ranks must run the same version")
