"""New weights in the real SGLang while answers run, in each pause mode, with its radix cache on.

`retract` with a flush is what the gate uses. The other modes are here as the reasons why: when one of these tests
fails after an upgrade, SGLang has changed, and the choice may be made anew.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from clawstream.engine.interface import GenerationChunk, PauseMode
from clawstream.errors import EngineRejected
from services.gateway.gate.settings import GateDeadlines
from services.gateway.gate.update import EngineUpdate, LoadableVersion, UpdateResult
from tests.numerics.engine.reference import Reference
from tests.sglang.conftest import TOLERANCE, Answer, Sglang, assemble

PROMPT = [3 + index * 7 % 500 for index in range(120)]
TOKENS = 200


async def answer_across(sglang: Sglang, change: Callable[[], Awaitable[object]]) -> Answer:
    """An answer whose weights change after its tenth token."""
    request = sglang.request(PROMPT, temperature=1.0, max_new_tokens=TOKENS, ignore_eos=True)
    chunks: list[GenerationChunk] = []
    seen = 0
    changing: asyncio.Future[object] | None = None
    async for chunk in sglang.client.generate(request):
        chunks.append(chunk)
        seen += len(chunk.token_ids)
        if seen >= 10 and changing is None:
            changing = asyncio.ensure_future(change())
    assert changing is not None
    await changing
    return assemble(chunks)


def update(sglang: Sglang, version: int, mode: PauseMode, *, flush: bool) -> Callable[[], Awaitable[None]]:
    async def change() -> None:
        await sglang.client.pause(mode)
        try:
            await sglang.client.load_weights(str(sglang.models[version]), version, flush_cache=flush)
        finally:
            await sglang.client.resume()

    return change


def gate_update(
    sglang: Sglang, target: tuple[int, Path], fallback: tuple[int, Path], *, serving: int | None = 0
) -> Callable[[], Awaitable[UpdateResult]]:
    """What the weight gate does to move the engine."""

    def loadable(version: int, directory: Path) -> LoadableVersion:
        async def whole() -> str:
            return str(directory)

        return LoadableVersion(version, whole)

    async def nobody_else_is_told(_version: int) -> None:
        return None

    engine_update = EngineUpdate(
        sglang.client,
        serving=serving,
        loads_beside=False,
        deadlines=GateDeadlines(),
        take_out_of_service=nobody_else_is_told,
        longest_wait_seconds=lambda: None,
        may_still_command=lambda: True,
    )
    return lambda: engine_update.run(loadable(*target), [loadable(*fallback)])


def switch_of(answer: Answer) -> int:
    """The token at which version 0 became version 1."""
    assert [span.weight_version for span in answer.spans] == [0, 1]
    switch = answer.spans[0].end
    assert 10 <= switch < TOKENS
    assert len(answer.token_ids) == TOKENS
    return switch


async def assert_serves(sglang: Sglang, version: int, reference: Reference) -> None:
    """A new answer to the same prompt is of `version` alone, cached prefix and all."""
    answer = await sglang.ask(PROMPT, temperature=1.0, max_new_tokens=20, ignore_eos=True)
    assert [span.weight_version for span in answer.spans] == [version]
    assert answer.logprobs == pytest.approx(reference.of_output(PROMPT, answer.token_ids), abs=TOLERANCE)


async def test_retract_and_flush_make_every_span_mean_what_it_says(sglang: Sglang, references: list[Reference]) -> None:
    answer = await answer_across(sglang, update(sglang, 1, PauseMode.RETRACT, flush=True))
    switch = switch_of(answer)
    before = references[0].of_output(PROMPT, answer.token_ids)
    after = references[1].of_output(PROMPT, answer.token_ids)
    assert answer.logprobs == pytest.approx(before[:switch] + after[switch:], abs=TOLERANCE)
    await assert_serves(sglang, 1, references[1])


async def test_in_place_goes_on_from_old_keys_and_leaves_a_stale_prefix(
    sglang: Sglang, references: list[Reference]
) -> None:
    answer = await answer_across(sglang, update(sglang, 1, PauseMode.IN_PLACE, flush=False))
    switch = switch_of(answer)
    expected = references[0].in_place_logprobs(references[1], PROMPT, answer.token_ids, switch)
    assert answer.logprobs == pytest.approx(expected, abs=TOLERANCE)
    later = await sglang.ask(PROMPT, temperature=1.0, max_new_tokens=20, ignore_eos=True)
    new = references[1].of_output(PROMPT, later.token_ids)
    assert later.cached_tokens > 0
    assert max(abs(a - b) for a, b in zip(later.logprobs, new, strict=True)) > 10 * TOLERANCE


async def test_in_place_with_a_flush_fails_and_an_explicit_load_mends_it(
    sglang: Sglang, references: list[Reference]
) -> None:
    failures: list[str] = []

    async def change() -> None:
        with pytest.raises(EngineRejected) as caught:
            await update(sglang, 1, PauseMode.IN_PLACE, flush=True)()
        failures.append(str(caught.value))

    answer = await answer_across(sglang, change)
    assert "flush" in failures[0]
    assert answer.finish_reason == "length", "the client of the running answer sees nothing of it"
    await sglang.serve(2, sglang.models[2])
    await assert_serves(sglang, 2, references[2])


async def test_abort_ends_running_answers(sglang: Sglang, references: list[Reference]) -> None:
    answer = await answer_across(sglang, update(sglang, 1, PauseMode.ABORT, flush=True))
    assert answer.finish_reason == "abort"
    assert 10 <= len(answer.token_ids) < TOKENS
    assert {span.weight_version for span in answer.spans} == {0}
    await assert_serves(sglang, 1, references[1])


async def test_requests_sent_while_paused_wait_and_end_under_the_new_weights(
    sglang: Sglang, references: list[Reference]
) -> None:
    await sglang.client.pause(PauseMode.RETRACT)
    assert await sglang.client.is_healthy()
    assert not await sglang.client.accepts_requests()
    waiting = asyncio.create_task(sglang.ask(PROMPT, temperature=0.0, max_new_tokens=8))
    await sglang.client.load_weights(str(sglang.models[1]), 1, flush_cache=True)
    assert not waiting.done()
    await sglang.client.resume()
    answer = await waiting
    assert answer.token_ids == references[1].greedy(PROMPT, 8)
    assert [span.weight_version for span in answer.spans] == [1]
    assert await sglang.client.accepts_requests()


async def test_the_gates_update_is_not_noticed_by_anybody_under_load(
    sglang: Sglang, references: list[Reference]
) -> None:
    """No request ever meets a prefix cached under other weights: every log-prob is checked against its version."""
    answers: list[tuple[list[int], Answer]] = []
    finished = asyncio.Event()

    async def user(number: int) -> None:
        rounds = 0
        while not finished.is_set():
            rounds += 1
            prompt = [*PROMPT, number + 3, rounds + 3]  # a long prefix that all share, and some of their own
            answers.append((prompt, await sglang.ask(prompt, temperature=1.0, max_new_tokens=40, ignore_eos=True)))

    async with asyncio.TaskGroup() as users:
        for number in range(4):
            users.create_task(user(number))
        for version, before in ((1, 0), (2, 1)):
            enough = len(answers) + 6
            while len(answers) < enough:
                await asyncio.sleep(0.01)
            change = gate_update(
                sglang, (version, sglang.models[version]), (before, sglang.models[before]), serving=before
            )
            result = await change()
            assert (result.weight_version, result.error) == (version, "")
        enough = len(answers) + 6
        while len(answers) < enough:
            await asyncio.sleep(0.01)
        finished.set()
    assert any(answer.cached_tokens > 0 for _, answer in answers), "the prefix cache was at work"
    assert {span.weight_version for _, answer in answers for span in answer.spans} == {0, 1, 2}
    for prompt, answer in answers:
        assert len(answer.token_ids) == 40
        for span in answer.spans:
            expected = references[span.weight_version].of_output(prompt, answer.token_ids)
            assert answer.logprobs[span.start : span.end] == pytest.approx(
                expected[span.start : span.end], abs=TOLERANCE
            )


async def test_a_load_that_fails_puts_the_old_version_back(
    sglang: Sglang, references: list[Reference], tmp_path: Path
) -> None:
    """Files that are not there. Those that are torn, or of another shape, never get so far: the gate reads them first
    (SGLang 0.5.23 would end: its own way back reads the same files again)."""
    results: list[UpdateResult] = []

    async def change() -> None:
        results.append(await gate_update(sglang, (7, tmp_path / "absent"), (0, sglang.models[0]))())

    answer = await answer_across(sglang, change)
    [result] = results
    assert result.weight_version == 0
    assert "version 7 was not loaded" in result.error
    assert not result.may_be_paused
    assert answer.finish_reason == "length"
    assert answer.logprobs == pytest.approx(references[0].of_output(PROMPT, answer.token_ids), abs=TOLERANCE)
    assert (await sglang.client.model_information()).weight_version == 0
    await assert_serves(sglang, 0, references[0])
