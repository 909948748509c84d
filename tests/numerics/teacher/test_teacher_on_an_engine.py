"""The teacher through the real CPU engine: aligned, at temperature 1, and refused when it cannot teach this policy."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch

from clawstream.engine.client import HttpEngineClient
from clawstream.engine.interface import EngineClient, GenerationRequest
from clawstream.engine.pool import EnginePool
from clawstream.errors import EngineUnavailable, TeacherUnfit
from clawstream.log import get_logger
from clawstream.rendering.renderer import PackageRenderer, load_renderer
from schemas.arrays import float32_array, int32_array
from schemas.events import TurnEvent
from schemas.events.base import Message
from schemas.events.sample import TeacherSignal
from schemas.events.score import Hint
from services.engine.tiny_model import write_tiny_model
from services.teacher.probe import probe_teacher, same_vocabulary
from services.teacher.settings import HintSettings, TeacherModelSettings
from services.teacher.signals import EngineSignals, HintedPrompt, HintedPrompts
from tests.fixtures.judged_log import turn_event
from tests.fixtures.stub_engine import StubEngine
from tests.numerics.engine.conftest import running_engine
from tests.numerics.engine.reference import Reference

MESSAGES: list[Message] = [{"role": "user", "content": "What is the capital of France?"}]
HINT = Hint(text="Answer in one short sentence.", source="user")


@pytest.fixture(scope="module")
def renderer(tiny_model_directory: Path) -> PackageRenderer:
    return load_renderer(tiny_model_directory)


@pytest.fixture
async def engine(tiny_model_directory: Path) -> AsyncIterator[HttpEngineClient]:
    torch.set_num_threads(1)
    async with running_engine(tiny_model_directory) as running:
        client = HttpEngineClient("teacher-0", str(running.client.base_url))
        yield client
        await client.close()


async def sampled_turn(engine: EngineClient, renderer: PackageRenderer, temperature: float, tokens: int) -> TurnEvent:
    """A turn that the engine really answered."""
    prompt = renderer.render(MESSAGES).token_ids
    ids: list[int] = []
    logprobs: list[float] = []
    sampling = {"temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True, "sampling_seed": 5}
    async for chunk in engine.generate(GenerationRequest("r", prompt, sampling)):
        ids += chunk.token_ids
        logprobs += [value for value in chunk.logprobs if value is not None]
    return turn_event(
        1,
        request_messages=MESSAGES,
        prompt_ids=int32_array(prompt),
        response_ids=int32_array(ids),
        response_logprobs=float32_array(logprobs),
        version_spans=[{"weight_version": 0, "start": 0, "end": len(ids)}],
        sampling={"temperature": temperature, "max_new_tokens": tokens},
        tokenizer_fingerprint=renderer.tokenizer_fingerprint,
    )


class UnhintedPrompts(HintedPrompts):
    """A teacher without a hint: the turn's own prompt."""

    def of(self, turn: TurnEvent, hints: object, response_tokens: int) -> list[HintedPrompt]:
        return [HintedPrompt(HINT, turn.prompt_ids.to_numpy().tolist())]


def signals_of(
    engine: EngineClient, prompts: HintedPrompts, hint: HintSettings | None = None, **model: int
) -> EngineSignals:
    settings = TeacherModelSettings.model_validate({"name": "frozen", **model})
    hint = hint or HintSettings()
    return EngineSignals(prompts, EnginePool([engine]), None, hint=hint, model=settings, logger=get_logger())


async def made(signals: EngineSignals, turn: TurnEvent, *hints: Hint) -> TeacherSignal:
    signal = await signals.make(turn, hints or [HINT])
    assert isinstance(signal, TeacherSignal)
    return signal


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
async def test_an_identical_teacher_without_a_hint_has_no_advantage_on_any_token(
    engine: HttpEngineClient, renderer: PackageRenderer, tiny_model_directory: Path, temperature: float
) -> None:
    """A_t = l_T - l1_prox, both at temperature 1, whatever the answer was sampled at."""
    turn = await sampled_turn(engine, renderer, temperature, 60)
    prompts = UnhintedPrompts(renderer, HintSettings(), context_tokens=512)
    signal = await made(signals_of(engine, prompts), turn)
    reference = Reference(tiny_model_directory)
    prompt, response = turn.prompt_ids.to_numpy().tolist(), turn.response_ids.to_numpy().tolist()
    student = np.array(reference.of_output(prompt, response, temperature=1.0))
    advantage = signal.logprobs.to_numpy() - student
    assert np.abs(advantage).max() < 1e-3
    # The original subtracts log-probs of two temperatures (and of token 0 none): that is no small error.
    mixed = np.abs(signal.logprobs.to_numpy() - turn.response_logprobs.to_numpy())
    assert (mixed.max() < 1e-3) == (temperature == 1.0)


async def test_the_hinted_prompt_is_all_that_differs(
    engine: HttpEngineClient, renderer: PackageRenderer, tiny_model_directory: Path
) -> None:
    turn = await sampled_turn(engine, renderer, 1.0, 40)
    prompts = HintedPrompts(renderer, HintSettings(), context_tokens=512)
    signal = await made(signals_of(engine, prompts, top_k=5, support_k=4), turn)
    (hinted,) = prompts.of(turn, [HINT], 40)  # type: ignore[misc] - it fits
    response = turn.response_ids.to_numpy().tolist()
    reference = Reference(tiny_model_directory)
    rows = reference.logprobs(hinted.prompt_ids + response)[len(hinted.prompt_ids) - 1 : -1]  # [tokens, vocabulary]
    expected = rows.gather(1, torch.tensor(response).unsqueeze(1)).squeeze(1)
    assert signal.logprobs.to_numpy() == pytest.approx(expected.numpy(), abs=1e-3)
    assert signal.top_ids is not None
    assert signal.top_logprobs is not None
    assert signal.top_ids.to_numpy().tolist() == rows.topk(5).indices.tolist()
    assert signal.top_logprobs.to_numpy() == pytest.approx(rows.topk(5).values.numpy(), abs=1e-3)
    student = reference.logprobs(turn.prompt_ids.to_numpy().tolist() + response)[turn.prompt_ids.element_count - 1 : -1]
    assert signal.support_ids is not None
    assert signal.support_logprobs is not None
    assert signal.support_ids.to_numpy().tolist() == student.topk(4).indices.tolist()
    at_support = rows.gather(1, torch.tensor(signal.support_ids.to_numpy().tolist()))
    assert signal.support_logprobs.to_numpy() == pytest.approx(at_support.numpy(), abs=1e-3)


@pytest.mark.parametrize("selection", ["token_optimal", "sequence_optimal"])
async def test_optimal_selections_on_a_real_engine(
    engine: HttpEngineClient, renderer: PackageRenderer, selection: str
) -> None:
    turn = await sampled_turn(engine, renderer, 1.0, 30)
    hint = HintSettings(selection=selection, overlap_k=8)
    signals = signals_of(engine, HintedPrompts(renderer, hint, context_tokens=512), hint)
    hints = [HINT, Hint(text="Brief.", source="judge"), Hint(text="The sky is blue.", source="judge")]
    signal = await made(signals, turn, *hints)
    assert np.isfinite(signal.logprobs.to_numpy()).all()
    singles = [
        (await made(signals_of(engine, HintedPrompts(renderer, HintSettings(), context_tokens=512)), turn, each))
        for each in sorted(hints, key=lambda each: len(each.text))
    ]
    chosen = (
        signal.hint_of_token.to_numpy()
        if signal.hint_of_token is not None
        else np.full(30, [each.hint for each in singles].index(signal.hint))
    )
    expected = np.array([each.logprobs.to_numpy() for each in singles])[chosen, np.arange(30)]
    assert signal.logprobs.to_numpy() == pytest.approx(expected, abs=1e-4)


async def test_the_policys_own_model_is_accepted(engine: HttpEngineClient, renderer: PackageRenderer) -> None:
    await probe_teacher(engine, renderer, context_tokens=512)


async def test_a_teacher_with_too_short_a_context_is_refused(
    engine: HttpEngineClient, renderer: PackageRenderer
) -> None:
    with pytest.raises(TeacherUnfit, match=r"offers 512 tokens of context, but teacher.model.context_tokens is 513"):
        await probe_teacher(engine, renderer, context_tokens=513)


async def test_a_teacher_with_another_vocabulary_is_refused(renderer: PackageRenderer, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", vocabulary_size=600)
    async with running_engine(other) as running:
        client = HttpEngineClient("teacher-0", str(running.client.base_url))
        smaller, larger = renderer, load_renderer(other)
        await probe_teacher(client, larger, context_tokens=512)
        same_vocabulary(smaller, smaller)
        with pytest.raises(TeacherUnfit, match="tokenizer"):
            same_vocabulary(smaller, larger)
        await client.close()
    shuffled = write_tiny_model(tmp_path / "shuffled")
    swap_two_tokens(shuffled / "tokenizer.json", "e", "a")
    async with running_engine(shuffled) as running:
        client = HttpEngineClient("teacher-0", str(running.client.base_url))
        with pytest.raises(TeacherUnfit, match="another vocabulary than the policy: id"):
            await probe_teacher(client, renderer, context_tokens=512)
        await client.close()


def swap_two_tokens(file: Path, first: str, second: str) -> None:

    document = json.loads(file.read_text())
    vocabulary = document["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(document))


async def test_an_engine_without_log_probs_of_prompts_is_refused(renderer: PackageRenderer) -> None:
    async with StubEngine(max_context_tokens=None) as stub:
        stub.scores = lambda ids: [float("nan")] * len(ids)
        client = HttpEngineClient("teacher-0", stub.base_url)
        with pytest.raises(TeacherUnfit, match="gives no log-probs of prompt tokens"):
            await probe_teacher(client, renderer, context_tokens=512)
        await client.close()


async def test_an_engine_that_is_not_there_yet_is_waited_for(renderer: PackageRenderer) -> None:
    client = HttpEngineClient("teacher-0", "http://127.0.0.1:9")
    with pytest.raises(EngineUnavailable):
        await probe_teacher(client, renderer, context_tokens=512)
    await client.close()
