# pyright: basic
# Reason: torch and safetensors are untyped.
"""The checkpoint atom: weights, optimizer, random state and progress, all of one moment, or nothing.

    root/step-00000012/
        weights.safetensors  exp_avg.safetensors  exp_avg_sq.safetensors   Hugging Face names, whole tensors, fp32
        random.safetensors                                                 generator states
        state.json                                                         updates made, and the progress document
        manifest.json                                                      length and sha256 of every file above

The progress document (offsets, counters, which turns left) is opaque here: whoever owns it puts in what must move
together with the weights. Because both are one rename, a sample is trained at most once with respect to weights.
Nothing is pickled. Tensors are whole, so a checkpoint can be resumed with another tensor-parallel size.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from clawstream.durable_files import (
    PARTIAL_PREFIX,
    remove_directory,
    sha256_of_file,
    sync_file,
    whole_directory,
    write_file,
)
from clawstream.errors import ClawstreamError, TurnLedgerError
from services.trainer.engine.optimizer import MOMENTS
from services.trainer.engine.weights import SafetensorsDirectory
from services.trainer.policy import PolicyTrainer
from services.trainer.policy_snapshot import PolicySnapshot

_STATE = "state.json"
_MANIFEST = "manifest.json"
_WEIGHTS = "weights.safetensors"
_RANDOM = "random.safetensors"


class CheckpointError(ClawstreamError):
    """A checkpoint could not be written, or one that is needed is torn. Names the file."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint."""

    directory: Path
    """Where it is."""
    step: int
    """Training steps made, with or without a change of weights."""
    num_updates: int
    """Optimizer updates made."""
    progress: Mapping[str, Any]
    """The owner's document."""

    def restore(self, policy: PolicyTrainer) -> None:
        """Puts weights, optimizer and random state back. Every rank calls it. `policy` must have loaded its model."""
        directory = self.directory
        policy.restore(
            SafetensorsDirectory(directory, [_WEIGHTS]).read,
            {name: SafetensorsDirectory(directory, [f"{name}.safetensors"]).read for name in MOMENTS},
            load_file(directory / _RANDOM),
            self.num_updates,
        )


class CheckpointStore:
    """The checkpoints of one training run, on a file system that all ranks see.

    `save` runs on any one thread at a time: it reads a snapshot, never the model.
    """

    def __init__(
        self,
        root: Path,
        *,
        keep: int = 2,
        on_rejected: Callable[[Path, str], None] | None = None,
        on_not_removed: Callable[[OSError], None] | None = None,
    ) -> None:
        """`keep` newest ones stay (at least 2, so that a torn newest one has a predecessor).

        `on_rejected(directory, reason)` is told of every checkpoint that `latest_good` passes over, `on_not_removed`
        of an old one that the disk does not let go: the next `save` tries again.
        Raises ValueError when `keep` is below 2.
        """
        if keep < 2:
            raise ValueError(f"keep must be at least 2, not {keep}: a torn newest checkpoint needs a predecessor")
        self._root = root
        self._keep = keep
        self._on_rejected = on_rejected
        self._on_not_removed = on_not_removed

    def save(self, snapshot: PolicySnapshot, progress: Mapping[str, Any], step: int) -> Path:
        """Writes a checkpoint, then removes those beyond `keep`.

        Raises CheckpointError when it cannot be written (disk full, say); earlier checkpoints are as they were.
        """
        final = self._root / f"step-{step:08d}"
        try:
            with whole_directory(final) as partial:
                files = {
                    _WEIGHTS: snapshot.weights,
                    _RANDOM: snapshot.random_state,
                    **{f"{name}.safetensors": tensors for name, tensors in snapshot.moments.items()},
                }
                for name, tensors in files.items():
                    save_file(tensors, partial / name, metadata={"format": "pt"})
                    sync_file(partial / name)
                state = {"step": step, "num_updates": snapshot.num_updates, "progress": progress}
                write_file(partial / _STATE, orjson.dumps(state, option=orjson.OPT_INDENT_2))
                manifest = {
                    name: {"size_bytes": (partial / name).stat().st_size, "sha256": sha256_of_file(partial / name)}
                    for name in (*files, _STATE)
                }
                write_file(partial / _MANIFEST, orjson.dumps(manifest, option=orjson.OPT_INDENT_2))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"checkpoint {final} could not be written: {error}; earlier checkpoints are untouched"
            ) from error
        try:
            self._remove_surplus()
        except OSError as error:  # The new one is whole: only space is lost.
            if self._on_not_removed is not None:
                self._on_not_removed(error)
        return final

    def latest_good(self, check: Callable[[Checkpoint], None] = lambda checkpoint: None) -> Checkpoint | None:
        """The newest checkpoint whose every byte is as written; None when there is none.

        `check` raises TurnLedgerError for one whose turns are not remembered any more: it is passed over too.

        Torn or damaged newer ones are passed over (and left where they are, for people to look at).
        """
        for directory in reversed(self._directories()):
            try:
                checkpoint = read_checkpoint(directory)
                check(checkpoint)
                return checkpoint
            except (CheckpointError, TurnLedgerError) as error:
                if self._on_rejected is not None:
                    self._on_rejected(directory, str(error))
        return None

    def _directories(self) -> list[Path]:
        return sorted(self._root.glob("step-*")) if self._root.is_dir() else []

    def _remove_surplus(self) -> None:
        # By time, not by step: a run that found no good one begins at step 0 beside the torn ones of higher numbers.
        by_age = sorted(self._directories(), key=lambda each: (each.stat().st_mtime_ns, each.name))
        for directory in by_age[: -self._keep]:
            remove_directory(directory)
        for leftover in self._root.glob(f"{PARTIAL_PREFIX}*step-*"):  # of a killed process; this one has none open
            remove_directory(leftover)


def read_checkpoint(directory: Path) -> Checkpoint:
    """Verifies every file of a checkpoint. Raises CheckpointError naming the first that is not as written."""
    try:
        manifest = orjson.loads((directory / _MANIFEST).read_bytes())
        for name, expected in manifest.items():
            path = directory / name
            size_bytes = path.stat().st_size
            if size_bytes != expected["size_bytes"]:
                raise CheckpointError(f"{path} has {size_bytes} bytes, but was written with {expected['size_bytes']}")
            if sha256_of_file(path) != expected["sha256"]:
                raise CheckpointError(f"{path} has another checksum than when it was written")
        if missing := {_STATE, _WEIGHTS, _RANDOM, *(f"{name}.safetensors" for name in MOMENTS)} - set(manifest):
            raise CheckpointError(f"{directory} lacks {sorted(missing)}")
        state = orjson.loads((directory / _STATE).read_bytes())
        return Checkpoint(directory, state["step"], state["num_updates"], state["progress"])
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{directory} is not a complete checkpoint: {error}") from error
