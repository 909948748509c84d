# pyright: basic
# Reason: starts torch and Megatron, which are untyped.
"""`python -m services.trainer --config clawstream.toml --process trainer`, alone or as a rank."""

import argparse
import fcntl
import os
import signal
import sys
import threading
import uuid
from pathlib import Path

import torch

from clawstream.clock import SystemClock
from clawstream.crash_points import crash_point, with_bus_crash
from clawstream.disk_patience import DiskPatience
from clawstream.encryption.bus import open_bus
from clawstream.errors import (
    BusError,
    ClawstreamError,
    DirectoryInUse,
    FatalBusError,
    Fenced,
    SettingsError,
    WeightsError,
)
from clawstream.log import Logger, configure_logging
from clawstream.metrics import Metrics
from clawstream.operations_server import OperationsServer
from clawstream.settings import EXIT_CODE_WRONG_SETTINGS, load_settings
from clawstream.weights.manifest import verify
from services.trainer.assembly import Surroundings, Trainer, trainer_history
from services.trainer.batch_archive import BatchArchive
from services.trainer.checkpoint import Checkpoint, CheckpointStore
from services.trainer.crashing_store import with_store_crash
from services.trainer.disk_store import DiskStore
from services.trainer.engine import cpu_platform
from services.trainer.engine.adapter_weights import CONFIG_NAME
from services.trainer.engine.parallel import ParallelLayout
from services.trainer.history import History
from services.trainer.ledger_file import LedgerFile
from services.trainer.patient_disk import PatientArchive, PatientStore
from services.trainer.progress import Progress
from services.trainer.progress_report import ProgressReport
from services.trainer.publish import WeightStore
from services.trainer.ranks import RankChannel, RankedPolicy, follow
from services.trainer.resume import first_progress
from services.trainer.settings import TrainerSettings
from services.trainer.wiring import new_policy, weight_store

_RETRY_SECONDS = 3.0


def main() -> int:
    """Returns the process's exit status."""
    parser = argparse.ArgumentParser(prog="python -m services.trainer", description="Trains the policy from samples.")
    parser.add_argument("--config", type=Path, default=None, help="the TOML file")
    parser.add_argument("--process", default=None, help="entry of [[processes]] that this is")
    arguments = parser.parse_args()
    try:
        settings = load_settings(
            TrainerSettings,
            section="trainer",
            file=arguments.config,
            process=arguments.process,
            environment=os.environ,
        )
    except SettingsError as error:
        sys.stderr.write(f"trainer: {error}\n")
        return EXIT_CODE_WRONG_SETTINGS
    logger = configure_logging(settings.log, process=settings.name)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        run(settings, stop, logger)
    except SettingsError as error:
        logger.error("the trainer ends: its settings are wrong", error=str(error))
        return EXIT_CODE_WRONG_SETTINGS
    except ClawstreamError as error:
        logger.error("the trainer ends", error=str(error), kind=type(error).__name__)
        return 1
    return 0


def run(settings: TrainerSettings, stop: threading.Event, logger: Logger) -> None:
    """Trains until `stop`. Raises SettingsError for what a restart cannot mend, else ClawstreamError."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    layout = ParallelLayout.start(tensor_parallel_size=settings.tensor_parallel_size, seed=settings.seed)
    cpu_platform.enable_fast_exact_matmul()
    policy_trainer = new_policy(settings, layout, stop.is_set)
    channel = RankChannel(layout)
    try:
        if layout.rank == 0:
            policy = RankedPolicy(policy_trainer, channel)
            lead(settings, policy, stop, logger)
            policy.close()
        else:
            follow(policy_trainer, channel)
    finally:
        ParallelLayout.stop()


def lead(settings: TrainerSettings, policy: RankedPolicy, stop: threading.Event, logger: Logger) -> None:
    """The first rank: the only one that knows of Kafka."""
    root = settings.data_directory / "trainer" / settings.policy
    root.mkdir(parents=True, exist_ok=True)
    metrics = Metrics()
    report = ProgressReport(
        need=settings.batch_size, interval_seconds=settings.progress_seconds, metrics=metrics, logger=logger
    )
    is_ready = threading.Event()
    operations = OperationsServer(
        settings.operations_host,
        settings.operations_port,
        metrics=metrics,
        ready=is_ready.is_set,
        status=report.status,
    )
    with (root / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DirectoryInUse(
                f"another trainer uses {root}; two of them would train the same samples twice: stop one"
            ) from error
        logger.info("starts", operations_port=operations.port, data=str(root))
        crash = crash_point(os.environ)
        bus = with_bus_crash(open_bus(settings.kafka, client_id=settings.name), crash)
        around = Surroundings(bus, SystemClock(), metrics, logger, report, stop)
        checkpoints = CheckpointStore(
            root / "checkpoints",
            keep=settings.checkpoints_keep,
            on_rejected=lambda directory, reason: logger.error("a checkpoint is passed over", reason=reason),
            on_not_removed=lambda error: logger.error("an old checkpoint cannot be removed", error=str(error)),
        )
        turns = LedgerFile(root / "turn-ledger.sqlite")
        weights = weight_store(settings)
        patience = DiskPatience(stop, logger, waits="training waits")
        store = PatientStore(DiskStore(checkpoints, turns, weights, settings.model), patience)
        trainer = Trainer(
            settings,
            around,
            policy=policy,
            store=with_store_crash(store, crash),
            archive=PatientArchive(
                BatchArchive(
                    root / "batches",
                    keep=settings.batches_keep,
                    on_not_removed=lambda error: logger.error("an old batch cannot be removed", error=str(error)),
                ),
                patience,
            ),
        )
        history = _history_when_there_is_a_broker(settings, around)
        if history is None:
            return
        checkpoint = checkpoints.latest_good(lambda found: turns.check(_progress(found).turns))
        if history.pointer.rollback is not None:
            logger.warning(
                "a rollback holds: what is trained now goes into service after `clawstream weights release`",
                version=history.pointer_version,
            )
        if checkpoint is not None:
            policy.open(settings.model, checkpoint=checkpoint.directory)
            progress = _progress(checkpoint)
            logger.info("resumes", step=progress.step, weight_version=progress.weight_version)
        else:
            start_version, directory = _weights_to_start_from(settings, history, weights, logger)
            _open(policy, settings, directory, start_version)
            progress = first_progress(
                history, weights.versions(), lineage=str(uuid.uuid4()), start_version=start_version
            )
        try:
            if not stop.is_set():  # Reading a model takes long, and what follows writes one.
                loop = trainer.begin(progress, is_new=checkpoint is None)
                is_ready.set()
                loop.run(stop)
                trainer.check()
        finally:
            trainer.close()
            turns.close()
            operations.close()
    logger.info("ended")


def _progress(checkpoint: Checkpoint) -> Progress:
    """Raises SettingsError for a checkpoint of another format."""
    try:
        return Progress.from_document(checkpoint.progress)
    except SettingsError as error:
        raise SettingsError(f"{checkpoint.directory}: {error}") from error


def _open(policy: RankedPolicy, settings: TrainerSettings, directory: Path, start_version: int) -> None:
    """Loads what training starts from. Raises SettingsError when that is a base model that cannot be loaded."""
    try:
        if settings.lora is None:
            policy.open(directory)
        else:
            policy.open(settings.model, adapters=directory if start_version else None)
    except WeightsError as error:
        if start_version:
            raise
        raise SettingsError(f"trainer.model: {error}") from error


def _history_when_there_is_a_broker(settings: TrainerSettings, around: Surroundings) -> History | None:
    """Waits, with a line every few seconds; None when the process is to end."""
    while not around.stop.is_set():
        try:
            return trainer_history(settings, around.bus)
        except (Fenced, FatalBusError):
            raise
        except BusError as error:
            around.logger.warning("waits for the broker", error=str(error), servers=settings.kafka.bootstrap_servers)
            around.stop.wait(_RETRY_SECONDS)
    return None


def _weights_to_start_from(
    settings: TrainerSettings, history: History, weights: WeightStore, logger: Logger
) -> tuple[int, Path]:
    """Without a checkpoint: the version in service if its files are whole, else the base model."""
    version = history.pointer_version
    event = history.versions.get(version) if version else None
    if version and event is not None:
        directory = weights.directory_of(version)
        if (directory / CONFIG_NAME).exists() != (settings.lora is not None):
            raise SettingsError(
                f"trainer.lora is {'set' if settings.lora else 'not set'}, but version {version} of policy "
                f"{settings.policy!r} ({directory}) is {'a whole model' if settings.lora else 'adapters'}: begin "
                "another policy, or set trainer.lora as it was"
            )
        try:
            verify(directory, event.manifest_sha256)
        except ClawstreamError as error:
            logger.error("the version in service cannot be trained on; starting from the base model", error=str(error))
        else:
            logger.warning("no checkpoint: training goes on from the version in service", version=version)
            return version, directory
    return 0, settings.model


if __name__ == "__main__":
    sys.exit(main())
