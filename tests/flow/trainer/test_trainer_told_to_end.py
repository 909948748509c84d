"""The trainer as a process, told to end in the middle of a step: it ends at once, and keeps nothing of the step."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clawstream import topics
from clawstream.bus.kafka import KafkaBus
from clawstream.topics import full_name
from tests.fixtures.configuration import small_trainer_toml
from tests.fixtures.samples import make_sample
from tests.flow.trainer.gated_loss import FOLDER_VARIABLE
from tests.flow.trainer.test_trainer_killed import TrainerProcess, bus, committed, put
from tests.numerics.trainer.tiny_models import save_tiny_model

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)]
__all__ = ["bus"]


@pytest.fixture
def trainer(tmp_path: Path, broker: str, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainerProcess]:
    """A step is three samples of seven tokens, each a micro-batch of its own."""
    model = save_tiny_model("qwen3", tmp_path / "model")
    config = tmp_path / "clawstream.toml"
    config.write_text(
        small_trainer_toml(Path("data"), broker, namespace, model)
        + """\
max_sample_tokens = 8
tokens_per_micro_batch = 8
algorithm = { factory = "tests.flow.trainer.gated_loss:GatedBinary" }
[[processes]]
name = "trainer"
service = "trainer"
"""
    )
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    process = TrainerProcess(config, tmp_path / "trainer.log")
    yield process
    process.close()


def test_a_step_is_given_up_and_made_whole_by_the_next_trainer(
    bus: KafkaBus, trainer: TrainerProcess, broker: str, namespace: str, tmp_path: Path
) -> None:
    samples = [
        make_sample(f"turn-{number}", reward=reward, prompt_ids=[3, 7, 9], response_ids=[10 + number, 12, 14, 5])
        for number, reward in enumerate([1.0, -1.0, 1.0])
    ]
    put(bus, namespace, samples)
    entered = tmp_path / "entered"

    def steps() -> list[dict[str, Any]]:
        return [value for _, value in committed(broker, full_name(namespace, topics.TRAIN_STEPS)) if value]

    trainer.start()
    trainer.wait_for("its first micro-batch", entered.exists)
    trainer.tell_to_end()
    (tmp_path / "go").touch()
    assert trainer.exit_code() == 0
    assert entered.read_text().splitlines() == ["micro-batch"], "it went on with the step"
    assert steps() == []
    trainer.start()
    trainer.wait_for("the step", lambda: len(steps()) == 1)
    assert trainer.stop() == 0
    (step,) = steps()
    assert [each["sample_id"] for each in step["samples"]] == [sample.sample_id for sample in samples]
    assert (step["step"], step["weight_version"], step["drops"]) == (1, 1, [])
    assert len(entered.read_text().splitlines()) == 1 + len(samples)
