"""The benchmarks' stub model gives as many answers as it is asked for, and no text that it reads changes that."""

import asyncio

import pytest

from benchmarks.stub_judge_model import Connection
from schemas.judge_spec import JudgeSpec
from services.judge.backends.interface import Opinion
from services.judge.backends.openai import OpenAIBackend
from services.judge.prompts import load_prompt
from tests.unit.judge.examples import reply


@pytest.mark.parametrize("delay_seconds", [0.0, 0.001])
async def test_it_gives_what_is_asked_for(delay_seconds: float) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Connection(delay_seconds), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    spec = JudgeSpec(backend="openai", model="stub")
    backend = OpenAIBackend(spec, load_prompt("verdict-1"), base_url=url, api_key=None, timeout_seconds=60.0)
    request = backend.prepare(reply('{"n":7}'))
    for wanted in (1, 3, 5):
        answers = await backend.call(request, wanted)
        assert [backend.interpret(answer.response) for answer in answers] == [Opinion(verdict=1)] * wanted
        assert sum(answer.prompt_tokens for answer in answers) == 400
        assert sum(answer.completion_tokens for answer in answers) == 12 * wanted
    await backend.close()
    server.close()
