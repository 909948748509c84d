"""A complaint becomes a hint, the hint a teacher's log-probs, and both a sample: real broker, engine and processes."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clawstream import topics
from clawstream.engine.client import HttpEngineClient
from clawstream.engine.interface import GenerationRequest
from clawstream.rendering.renderer import PackageRenderer, load_renderer
from schemas.arrays import float32_array, int32_array
from schemas.events import SampleEvent, TurnEvent
from services.teacher.hints import hinted_messages
from tests.fixtures.buses import kafka_bus, read_all
from tests.fixtures.judged_log import JudgedLog, next_state_of, turn_event
from tests.fixtures.service_process import ServiceProcess
from tests.fixtures.system import wait_for
from tests.numerics.engine.reference import Reference

pytestmark = [pytest.mark.kafka, pytest.mark.slow]
StartService = Callable[..., ServiceProcess]
COMPLAINT = "No, that is too long. One short sentence, please."
QUESTIONS = (
    "What is the capital of France?",
    "How many legs does a spider have?",
    "Why is the sky blue?",
    "At what temperature does water boil?",
    "What is the largest planet?",
)
OPEN_QUESTIONS = (
    "Why is the sky blue?",
    "What is a black hole?",
    "How does a bicycle stay upright?",
    "How do plants make food?",
    "Why do we have seasons?",
)
"""SmolLM2 answers them at length."""


@pytest.fixture
def log(broker: str, namespace: str) -> JudgedLog:
    made = JudgedLog(kafka_bus(broker, "tests"), namespace)
    made.create_topics()
    return made


class Bench:
    """An engine, and the judge and teacher that know it."""

    def __init__(
        self, broker: str, namespace: str, port: int, model: Path, start_service: StartService, threads: int
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._start_service = start_service
        self._port = port
        self._model = json.dumps(str(model.resolve()))
        self._threads = threads
        self._kafka = f'[kafka]\nbootstrap_servers = "{broker}"\nnamespace = "{namespace}"\n'
        self.renderer = load_renderer(model)

    def engine(self) -> ServiceProcess:
        text = f"[engine]\nmodel_path = {self._model}\nport = {self._port}\nthreads = {self._threads}\n"
        engine = self._start_service("engine", text + 'max_context_tokens = 1024\nweight_version = "0"\n')
        wait_for(lambda: "serving" in engine.text(), "the engine serves")
        return engine

    def judge(self) -> ServiceProcess:
        spec = '{ backend = "rules", rules = [["thanks", 1], ["No,", -1], ["hm", 0]], hints = "user" }'
        return self._start_service("judge", f"{self._kafka}\n[judge]\nspec = {spec}\n")

    def teacher(self, *, context_tokens: int = 1024, **settings: Any) -> ServiceProcess:
        lines = [f"{name} = {json.dumps(value)}" for name, value in {"mode": "combine", **settings}.items()]
        model = f'{{ urls = ["{self.url}"], name = "frozen", top_k = 3, context_tokens = {context_tokens} }}'
        return self._start_service(
            "teacher",
            f"{self._kafka}\n[teacher]\nmodel_path = {self._model}\nmodel = {model}\n" + "\n".join(lines) + "\n",
        )

    async def answered(self, questions: Sequence[str], *, temperature: float, tokens: int) -> list[TurnEvent]:
        """Turns that the engine really answered, as a gateway records them."""
        client = HttpEngineClient("policy", self.url)

        async def answer(number: int, question: str) -> TurnEvent:
            messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
            prompt = self.renderer.render(messages).token_ids
            ids: list[int] = []
            logprobs: list[float] = []
            sampling = {
                "temperature": temperature,
                "max_new_tokens": tokens,
                "stop_token_ids": self.renderer.stop_token_ids,
                "sampling_seed": number,
            }
            async for chunk in client.generate(GenerationRequest(f"r{number}", prompt, sampling)):
                ids += chunk.token_ids
                logprobs += [value for value in chunk.logprobs if value is not None]
            return turn_event(
                number,
                request_messages=messages,
                response_message={"role": "assistant", "content": self.renderer.decode(ids)},
                prompt_ids=int32_array(prompt),
                response_ids=int32_array(ids),
                response_logprobs=float32_array(logprobs),
                version_spans=[{"weight_version": 0, "start": 0, "end": len(ids)}],
                sampling={"temperature": temperature, "max_new_tokens": tokens},
                tokenizer_fingerprint=self.renderer.tokenizer_fingerprint,
            )

        turns = await asyncio.gather(*(answer(number, text) for number, text in enumerate(questions)))
        await client.close()
        return list(turns)


@pytest.fixture
def bench(
    broker: str, namespace: str, free_tcp_port: int, tiny_model_directory: Path, start_service: StartService
) -> Bench:
    return Bench(broker, namespace, free_tcp_port, tiny_model_directory, start_service, threads=1)


def judged(log: JudgedLog, turns: Sequence[TurnEvent], replies: Sequence[str]) -> None:
    references = log.write_turns(turns)
    log.write_next_states(
        [next_state_of(turn, at, reply) for turn, at, reply in zip(turns, references, replies, strict=True)]
    )


def samples_by_turn(log: JudgedLog) -> Mapping[str, SampleEvent]:
    samples = log.samples()
    found = {sample.turn_id: sample for sample in samples}
    assert len(found) == len(samples), "one sample a turn"
    return found


async def test_a_complaint_becomes_a_sample_with_both_components(
    log: JudgedLog, bench: Bench, tiny_model_directory: Path
) -> None:
    torch.set_num_threads(1)
    engine, judge, teacher = bench.engine(), bench.judge(), bench.teacher()
    turns = await bench.answered(QUESTIONS[:4], temperature=0.6, tokens=24)
    judged(log, turns, [COMPLAINT, "thanks", "hm", COMPLAINT])
    wait_for(lambda: len(log.samples()) == 3, "three samples")
    samples = samples_by_turn(log)
    assert set(samples) == {"turn-0", "turn-1", "turn-3"}, "a neutral verdict without a hint makes no sample"
    assert (samples["turn-1"].reward, samples["turn-1"].teacher) == (1.0, None)
    reference = Reference(tiny_model_directory)
    for number in (0, 3):
        turn, sample = turns[number], samples[f"turn-{number}"]
        assert sample.reward == -1.0
        signal = sample.teacher
        assert signal is not None
        assert (signal.hint, signal.hint_source, signal.model) == (COMPLAINT, "user", "frozen")
        assert sample.response_ids == turn.response_ids
        hinted = bench.renderer.render(hinted_messages(turn.request_messages, COMPLAINT, "last_user_message"))
        response = turn.response_ids.to_numpy().tolist()
        expected = reference.of_output(hinted.token_ids, response, temperature=1.0)
        assert signal.logprobs.to_numpy() == pytest.approx(expected, abs=1e-3)
        assert signal.top_ids is not None
        assert signal.top_ids.shape == [len(response), 3]
    assert read_all(log.bus, log.topic(topics.TEACHER_DLQ)) == []
    # Without its engine the teacher waits, in order, and loses nothing.
    engine.kill()
    more = [turn.model_copy(update={"turn_id": f"late-{turn.turn_id}"}) for turn in turns[:2]]
    judged(log, more, [COMPLAINT, COMPLAINT])
    wait_for(lambda: "cannot handle a record now" in teacher.text(), "the teacher waits for its engine")
    assert len(log.samples()) == 3
    bench.engine()
    wait_for(lambda: len(log.samples()) == 5, "the scores that waited")
    late = samples_by_turn(log)["late-turn-0"]
    first = samples["turn-0"]
    assert late.teacher is not None
    assert first.teacher is not None
    assert late.teacher.logprobs.to_numpy() == pytest.approx(first.teacher.logprobs.to_numpy(), abs=1e-4)
    assert read_all(log.bus, log.topic(topics.TEACHER_DLQ)) == []
    assert teacher.stop() == 0, teacher.text()
    assert judge.stop() == 0, judge.text()


async def test_opd_mode_writes_signals_alone(log: JudgedLog, bench: Bench) -> None:
    bench.engine()
    bench.judge()
    bench.teacher(mode="opd")
    turns = await bench.answered(QUESTIONS[:2], temperature=1.0, tokens=8)
    judged(log, turns, [COMPLAINT, "thanks"])
    wait_for(lambda: len(log.scores()) == 2 and len(log.samples()) == 1, "one sample of two scores")
    (sample,) = log.samples()
    assert (sample.turn_id, sample.reward, sample.teacher is None) == ("turn-0", None, False)


async def test_a_teacher_that_cannot_teach_is_refused_at_start(log: JudgedLog, bench: Bench) -> None:
    bench.engine()
    teacher = bench.teacher(context_tokens=4096)
    assert teacher.process.wait(60) == 2, teacher.text()
    assert "offers 1024 tokens of context, but teacher.model.context_tokens is 4096" in teacher.text()


@pytest.mark.model
@pytest.mark.timeout(900)
async def test_the_users_own_reply_moves_smollm2_toward_ending_after_the_first_sentence(
    log: JudgedLog,
    broker: str,
    namespace: str,
    free_tcp_port: int,
    smollm2_directory: Path,
    start_service: StartService,
) -> None:
    """What makes distillation work here: the log-prob of the end of turn after the first sentence, in nats."""
    bench = Bench(broker, namespace, free_tcp_port, smollm2_directory, start_service, threads=2)
    bench.engine()
    bench.judge()
    bench.teacher()
    turns = await bench.answered(OPEN_QUESTIONS, temperature=0.7, tokens=48)
    judged(log, turns, [COMPLAINT] * len(turns))
    wait_for(lambda: len(log.samples()) == len(turns), "a sample for every complaint", 600)
    samples = samples_by_turn(log)
    gains = await ending_gains(bench, turns)
    assert len(gains) >= 4, "the answers went on after their first sentence"
    # What was seen is in services/teacher/README.md: between +2.9 and +12.1 nats, 7.1 in the mean of seven answers.
    assert min(gains) > 1.0, gains
    assert float(np.mean(gains)) > 4.0, gains
    for turn in turns:
        signal = samples[turn.turn_id].teacher
        assert signal is not None
        assert np.isfinite(signal.logprobs.to_numpy()).all()
        assert signal.logprobs.element_count == turn.response_ids.element_count


async def ending_gains(bench: Bench, turns: Sequence[TurnEvent]) -> list[float]:
    """Nats by which the hint raises the end of turn after the first sentence of each answer that went on after it."""
    client = HttpEngineClient("teacher", bench.url)
    end = bench.renderer.stop_token_ids[0]
    gains: list[float] = []
    for turn in turns:
        response: list[int] = turn.response_ids.to_numpy().tolist()
        sentence = first_sentence(bench.renderer, response)
        if sentence is None or response[len(sentence) :] in ([], [end]):
            continue
        hinted = bench.renderer.render(hinted_messages(turn.request_messages, COMPLAINT, "last_user_message"))
        with_hint = await client.score([*hinted.token_ids, *sentence], [end])
        without = await client.score([*turn.prompt_ids.to_numpy().tolist(), *sentence], [end])
        gains.append(with_hint.logprobs[0] - without.logprobs[0])
    await client.close()
    return gains


def first_sentence(renderer: PackageRenderer, response: list[int]) -> list[int] | None:
    """The ids up to and with the first full stop."""
    for length in range(1, len(response) + 1):
        if renderer.decode(response[:length]).rstrip().endswith((".", "!", "?")):
            return response[:length]
    return None
