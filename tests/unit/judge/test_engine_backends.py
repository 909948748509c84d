"""The backends that speak to engines, with a scripted engine and a character tokenizer."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from clawstream.engine.interface import EngineClient, ScoredTokens
from clawstream.engine.pool import EnginePool
from clawstream.errors import EngineUnavailable
from clawstream.rendering.interface import ChatRenderer, RenderedPrompt
from schemas.events.base import Message
from schemas.judge_spec import JudgeSpec
from services.judge.backends.interface import Abstention, Opinion
from services.judge.backends.likelihood import LikelihoodBackend
from services.judge.backends.sglang import SglangBackend
from services.judge.prompts import LikelihoodPrompt, PromptFile, load_likelihood_prompt
from tests.unit.judge.examples import reply


class CharacterRenderer:
    """One id per character; a chat is the text of its messages in brackets."""

    def __init__(self) -> None:
        self.stop_token_ids = [0]

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def render(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> RenderedPrompt:
        return RenderedPrompt(self.encode("".join(f"[{message['content']}]" for message in messages)))


class ScriptedEngine:
    """Scores every token of a response at -1 nat, but for the words that it likes; writes what it is told to."""

    def __init__(self, likes: Mapping[str, float] | None = None, text: str = "", meta: Any = None) -> None:
        self.likes = dict(likes or {})
        self.text = text
        self.meta: Mapping[str, Any] = meta or {}
        self.prompts: list[str] = []
        self.sampling: Mapping[str, Any] = {}
        self.is_down = False
        self.closed = False

    async def score(self, prompt_ids: Sequence[int], response_ids: Sequence[int], **_: Any) -> ScoredTokens:
        if self.is_down:
            raise EngineUnavailable("down")
        self.prompts.append("".join(map(chr, prompt_ids)))
        word = "".join(map(chr, response_ids))
        total = self.likes.get(word, -float(len(word)))
        return ScoredTokens(list(response_ids), [total / len(word)] * len(word), None, None, None)

    async def generate_texts(
        self, input_ids: Sequence[int], sampling_parameters: Mapping[str, Any], *, answers: int = 1
    ) -> list[tuple[str, Mapping[str, Any]]]:
        if self.is_down:
            raise EngineUnavailable("down")
        self.prompts.append("".join(map(chr, input_ids)))
        self.sampling = sampling_parameters
        return [(self.text, self.meta)] * answers

    async def close(self) -> None:
        self.closed = True


def pool(*engines: ScriptedEngine) -> EnginePool:
    return EnginePool(cast("list[EngineClient]", list(engines)))


RENDERER = cast("ChatRenderer", CharacterRenderer())
PROMPT = LikelihoodPrompt(words={" yes": 1, " no": -1, " maybe": 0}, text="{following}\nSatisfied:\n")
LIKELIHOOD = JudgeSpec(backend="likelihood", model="small", votes=1)


async def likelihood(prompt: LikelihoodPrompt, **likes: float) -> Opinion:
    engine = ScriptedEngine({f" {word}": nats for word, nats in likes.items()})
    backend = LikelihoodBackend(LIKELIHOOD, prompt, pool(engine), RENDERER)
    (answer,) = await backend.call(backend.prepare(reply("Thanks")))
    assert set(engine.prompts) == {"user: Thanks\nSatisfied:"}
    return backend.interpret(answer.response)


async def test_the_likeliest_word_is_the_verdict() -> None:
    assert await likelihood(PROMPT, yes=-0.5, no=-2, maybe=-3) == Opinion(verdict=1)
    assert await likelihood(PROMPT, yes=-2.5, no=-2, maybe=-3) == Opinion(verdict=-1)
    assert await likelihood(PROMPT, yes=-2.5, no=-2, maybe=-1) == Opinion(verdict=0)


async def test_offsets_correct_what_the_model_prefers() -> None:
    corrected = PROMPT.model_copy(update={"offsets_nats": {" no": 1.0}})
    assert await likelihood(corrected, yes=-1.5, no=-2, maybe=-9) == Opinion(verdict=-1)


async def test_too_close_to_call_is_neutral() -> None:
    careful = PROMPT.model_copy(update={"neutral_within_nats": 0.5})
    assert await likelihood(careful, yes=-1.0, no=-1.4, maybe=-9) == Opinion(verdict=0)
    assert await likelihood(careful, yes=-1.0, no=-1.5, maybe=-9) == Opinion(verdict=1)


async def test_several_words_for_one_verdict_do_not_compete_with_each_other() -> None:
    two = LikelihoodPrompt(words={" yes": 1, " sure": 1, " no": -1}, text="{following}", neutral_within_nats=0.5)
    engine = ScriptedEngine({" yes": -1.0, " sure": -1.1, " no": -2.0})
    backend = LikelihoodBackend(LIKELIHOOD, two, pool(engine), RENDERER)
    (answer,) = await backend.call(backend.prepare(reply("Thanks")))
    assert backend.interpret(answer.response) == Opinion(verdict=1)


def test_a_ledger_entry_without_the_words_abstains() -> None:
    backend = LikelihoodBackend(LIKELIHOOD, PROMPT, pool(ScriptedEngine()), RENDERER)
    assert backend.interpret({" yes": -1.0}) == Opinion(abstention=Abstention.ERROR)
    assert backend.interpret("text") == Opinion(abstention=Abstention.ERROR)


def test_the_shipped_few_shot_prompt_has_all_three_verdicts_and_ends_where_the_word_follows() -> None:
    prompt = load_likelihood_prompt("likelihood-1")
    assert sorted(prompt.words.values()) == [-1, 0, 1]
    for word, _ in prompt.words.items():
        assert f"Satisfied:{word}\n" in prompt.text
    assert prompt.text.rstrip().endswith("{following}\nSatisfied:")


async def test_an_engine_writes_and_the_boxed_verdict_counts() -> None:
    engine = ScriptedEngine(
        text=r"<think>hm \boxed{1}</think>\boxed{-1}",
        meta={"finish_reason": {"type": "stop", "matched": 0}, "prompt_tokens": 12, "completion_tokens": 5},
    )
    spec = JudgeSpec(backend="sglang", model="big", temperature=0.6, max_new_tokens=77)
    prompt = PromptFile(name="p", text="Judge: {answer} | {following}", sha256="")
    backend = SglangBackend(spec, prompt, pool(engine), RENDERER)
    (answer,) = await backend.call(backend.prepare(reply("No.")))
    assert backend.interpret(answer.response) == Opinion(verdict=-1)
    assert (answer.prompt_tokens, answer.completion_tokens) == (12, 5)
    assert engine.prompts == ["[Judge: assistant: Canberra. | user: No.]"]
    assert engine.sampling == {"temperature": 0.6, "max_new_tokens": 77, "stop_token_ids": [0]}


async def test_one_call_to_an_engine_samples_all_votes() -> None:
    engine = ScriptedEngine(text=r"\boxed{1}", meta={"prompt_tokens": 12, "completion_tokens": 5})
    spec = JudgeSpec(backend="sglang", model="big")
    backend = SglangBackend(spec, PromptFile(name="p", text="{answer}", sha256=""), pool(engine), RENDERER)
    answers = await backend.call(backend.prepare(reply("No.")), 3)
    assert len(engine.prompts) == 1
    assert [backend.interpret(answer.response) for answer in answers] == [Opinion(verdict=1)] * 3
    assert [(answer.prompt_tokens, answer.completion_tokens) for answer in answers] == [(12, 5)] * 3


async def test_likelihood_says_it_once() -> None:
    backend = LikelihoodBackend(LIKELIHOOD, PROMPT, pool(ScriptedEngine({" yes": -0.5})), RENDERER)
    assert len(await backend.call(backend.prepare(reply("Thanks")), 3)) == 1


async def test_a_generation_that_was_cut_off_abstains() -> None:
    engine = ScriptedEngine(text=r"\boxed{1}", meta={"finish_reason": {"type": "length", "length": 77}})
    spec = JudgeSpec(backend="sglang", model="big")
    backend = SglangBackend(spec, PromptFile(name="p", text="{answer}", sha256=""), pool(engine), RENDERER)
    (answer,) = await backend.call(backend.prepare(reply("No.")))
    assert backend.interpret(answer.response) == Opinion(abstention=Abstention.TRUNCATED)


async def test_engines_take_turns_and_stand_in_for_each_other() -> None:
    first, second = ScriptedEngine(), ScriptedEngine()
    both = pool(first, second)
    for _ in range(4):
        await both.score([1], [2])
    assert (len(first.prompts), len(second.prompts)) == (2, 2)
    first.is_down = True
    for _ in range(4):
        await both.score([1], [2])
    assert (len(first.prompts), len(second.prompts)) == (2, 6)
    second.is_down = True
    with pytest.raises(EngineUnavailable):
        await both.score([1], [2])
    await both.close()
    assert first.closed
    assert second.closed
