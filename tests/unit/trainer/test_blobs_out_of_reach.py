"""Samples whose arrays lie in a blob: a store that is away is waited for, a blob that is gone is a dead letter."""

from pathlib import Path

import pytest

from clawstream.blobs import BlobStore
from schemas.arrays import BlobReference, NumberArray, int32_array
from schemas.events import SampleEvent
from tests.fixtures.samples import make_sample
from tests.unit.trainer.test_trainer_loop import World, dead_letters, settle

IDS = [1, 2, 3]


class Mount:
    """A blob store whose disk comes and goes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "store"
        self._elsewhere = directory / "elsewhere"
        self._store = BlobStore(str(self._directory))

    def sample(self, turn: str) -> SampleEvent:
        array = int32_array([*IDS, len(turn)])
        reference = self._store.write(array.to_numpy().tobytes())
        in_blob = NumberArray(dtype="int32", shape=array.shape, blob=reference)
        return make_sample(turn).model_copy(update={"prompt_ids": in_blob})

    def away(self) -> None:
        self._directory.rename(self._elsewhere)

    def back(self) -> None:
        self._elsewhere.rename(self._directory)

    def lose(self, sample: SampleEvent) -> None:
        assert sample.prompt_ids.blob is not None
        Path(sample.prompt_ids.blob.uri.removeprefix("file://")).unlink()


def trained(world: World) -> list[str]:
    return sorted(sample.turn_id for step in world.steps() for sample in step.samples)


@pytest.fixture
def mount(tmp_path: Path) -> Mount:
    return Mount(tmp_path)


def test_a_store_that_is_away_for_a_while_costs_nothing(mount: Mount) -> None:
    world = World(batch_size=2)
    world.put(make_sample("inline-1"), mount.sample("in-a-blob"), make_sample("inline-2"), make_sample("inline-3"))
    mount.away()
    loop = world.start()
    for _ in range(5):
        world.clock.advance(5.0)
        loop.advance()
    assert trained(world) == []
    assert dead_letters(world) == {}
    mount.back()
    settle(loop, world)
    assert trained(world) == ["in-a-blob", "inline-1", "inline-2", "inline-3"]
    assert dead_letters(world) == {}


def test_a_restart_meanwhile_loses_nothing_and_doubles_nothing(mount: Mount) -> None:
    world = World(batch_size=3)
    world.put(make_sample("inline-1"), mount.sample("waits"), make_sample("inline-2"))
    loop = world.start()
    loop.advance()
    settle(loop, world)  # "waits" was read: at the next start it is behind the positions of a checkpoint
    world.put(make_sample("inline-3"), mount.sample("new-in-a-blob"), make_sample("inline-4"))
    mount.away()
    for _ in range(3):
        loop = world.start()
        for _ in range(3):
            world.clock.advance(5.0)
            loop.advance()
    mount.back()
    settle(world.start(), world)
    assert trained(world) == ["inline-1", "inline-2", "inline-3", "inline-4", "new-in-a-blob", "waits"]
    assert dead_letters(world) == {}


def test_a_sample_that_waits_in_a_checkpoint_is_not_taken_for_vanished(mount: Mount) -> None:
    world = World(batch_size=2, max_batch_age_seconds=1000.0)
    world.put(make_sample("a"), make_sample("b"), mount.sample("waits"))
    loop = world.start()
    while not loop.advance():
        pass
    loop._finisher.join()  # pyright: ignore[reportPrivateUsage] - as at a stop
    assert trained(world) == ["a", "b"]
    mount.away()
    loop = world.start()
    for _ in range(4):
        world.clock.advance(5.0)
        loop.advance()
    mount.back()
    settle(loop, world)
    assert trained(world) == ["a", "b", "waits"]
    assert not any(step.drops for step in world.steps())


def test_a_blob_that_is_gone_is_a_dead_letter_at_once(mount: Mount) -> None:
    world = World(batch_size=1)
    lost = mount.sample("lost")
    mount.sample("another, so that the store is there")
    mount.lose(lost)
    world.put(lost, make_sample("good"))
    settle(world.start(), world)
    assert trained(world) == ["good"]
    assert "cannot be read" in dead_letters(world)["lost"]


def test_patience_ends(mount: Mount) -> None:
    world = World(batch_size=1, blob_patience_seconds=100.0)
    world.put(mount.sample("given-up"), make_sample("good"))
    mount.away()
    loop = world.start()
    while not trained(world):
        world.clock.advance(20.0)
        loop.advance()
        loop._finisher.join()  # pyright: ignore[reportPrivateUsage]
    assert "given up after 100 seconds" in dead_letters(world)["given-up"]
    assert trained(world) == ["good"]


def test_an_unreadable_object_waits_and_an_unknown_store_does_not(tmp_path: Path) -> None:
    world = World(batch_size=1)
    nowhere = BlobReference(uri="nosuch://bucket/x", sha256="0" * 64, size_bytes=12)
    in_blob = NumberArray(dtype="int32", shape=[3], blob=nowhere)
    directory = BlobReference(uri=f"file://{tmp_path}", sha256="0" * 64, size_bytes=12)
    as_directory = NumberArray(dtype="int32", shape=[3], blob=directory)
    world.put(
        make_sample("unknown-store").model_copy(update={"prompt_ids": in_blob}),
        make_sample("a-directory").model_copy(update={"prompt_ids": as_directory}),
    )
    loop = world.start()
    for _ in range(5):
        world.clock.advance(world.settings.max_batch_age_seconds)
        loop.advance()
    loop._finisher.join()  # pyright: ignore[reportPrivateUsage]
    assert set(dead_letters(world)) == {"unknown-store"}
