"""SmolLM2-135M as a judge by likelihood, through the real engine: it tells replies apart that it never saw."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from clawstream.engine.client import HttpEngineClient
from clawstream.engine.pool import EnginePool
from clawstream.rendering.renderer import load_renderer
from schemas.judge_spec import JudgeSpec
from services.judge.backends.likelihood import LikelihoodBackend
from services.judge.prompts import load_likelihood_prompt
from services.judge.specs import completed
from tests.fixtures.service_process import ServiceProcess
from tests.fixtures.system import wait_for
from tests.flow.judge.replies import HELD_OUT, TUNED
from tests.unit.judge.examples import reply

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture
def model_directory(smollm2_directory: Path) -> Path:
    """Absolute, since the engine's settings file is elsewhere."""
    return smollm2_directory.resolve()


async def verdicts(backend: LikelihoodBackend, replies: Sequence[tuple[str, int]]) -> list[tuple[str, int, int | None]]:
    """Text, what was meant, and what the judge says."""
    found: list[tuple[str, int, int | None]] = []
    for text, meant in replies:
        (answer,) = await backend.call(backend.prepare(reply(text)))
        found.append((text, meant, backend.interpret(answer.response).verdict))
    return found


async def test_a_135m_model_tells_praise_from_complaint(
    model_directory: Path, free_tcp_port: int, start_service: Callable[..., ServiceProcess]
) -> None:
    engine = start_service(
        "engine", f'[engine]\nmodel_path = "{model_directory}"\nport = {free_tcp_port}\nthreads = 2\n'
    )
    wait_for(lambda: "serving" in engine.text(), "the engine serves")
    spec = completed(JudgeSpec(backend="likelihood", model="smollm2"))
    client = HttpEngineClient("judge", f"http://127.0.0.1:{free_tcp_port}")
    backend = LikelihoodBackend(
        spec, load_likelihood_prompt(spec.prompt), EnginePool([client]), load_renderer(model_directory)
    )
    tuned, held_out = await verdicts(backend, TUNED), await verdicts(backend, HELD_OUT)
    await backend.close()
    wrong_tuned = [each for each in tuned if each[1] != each[2]]
    wrong_held_out = [each for each in held_out if each[1] != each[2]]
    # Measured in fp32: 27 of 28 (all 24 with a sign), and 27 of 30 (23 of 24 with a sign).
    assert [each for each in wrong_tuned if each[1] != 0] == []
    assert len(wrong_tuned) <= 1, wrong_tuned
    assert len([each for each in wrong_held_out if each[1] != 0]) <= 1, wrong_held_out
    assert len(wrong_held_out) <= 3, wrong_held_out
