"""No id outside the vocabulary reaches an engine."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from clawstream.engine.client import HttpEngineClient
from clawstream.engine.interface import GenerationRequest
from clawstream.engine.token_ids import check_token_ids
from clawstream.errors import TokenIdRefused
from tests.fixtures.stub_engine import StubEngine

SIZE = 100


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input_ids": [5, 99, 100]}, r"input_ids\[2\] is 100.*\[0, 100\)"),
        ({"input_ids": [5, -1, 6]}, r"input_ids\[1\] is -1"),
        ({"input_ids": [1], "token_ids_logprob": [0, 1 << 40]}, r"token_ids_logprob\[1\]"),
        ({"input_ids": [1], "sampling_params": {"stop_token_ids": [2, 151_643]}}, r"stop_token_ids\[1\] is 151643"),
        ({"input_ids": [1], "sampling_params": {"logit_bias": {"5": 1, "100": -1}}}, r"logit_bias\[1\] is 100"),
        ({"input_ids": [1], "sampling_params": {"logit_bias": {"-2": 1}}}, r"logit_bias\[0\] is -2"),
        ({"input_ids": [1], "sampling_params": {"logit_bias": {"a": 1}}}, "key 'a'"),
    ],
)
def test_an_id_that_is_no_token_is_named(body: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenIdRefused, match=message) as caught:
        check_token_ids(body, vocabulary_size=SIZE, engine="one")
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "body",
    [
        {"text": "hi"},
        {"input_ids": [0, 99]},
        {
            "input_ids": [0],
            "token_ids_logprob": [99],
            "sampling_params": {"stop_token_ids": [99], "logit_bias": {"0": 1}},
        },
        {"input_ids": [0], "token_ids_logprob": None, "sampling_params": {"stop_token_ids": None, "logit_bias": None}},
    ],
)
def test_every_token_may_be_sent(body: dict[str, Any]) -> None:
    check_token_ids(body, vocabulary_size=SIZE, engine="one")


def test_without_a_known_size_negative_ids_are_found() -> None:
    check_token_ids({"input_ids": [1 << 30]}, vocabulary_size=None, engine="one")
    with pytest.raises(TokenIdRefused):
        check_token_ids({"input_ids": [-1]}, vocabulary_size=None, engine="one")


@pytest.fixture
async def engine() -> AsyncIterator[StubEngine]:
    async with StubEngine() as stub:
        yield stub


async def test_every_way_to_the_engine_is_guarded(engine: StubEngine) -> None:
    client = HttpEngineClient("one", engine.base_url, vocabulary_size=SIZE)
    with pytest.raises(TokenIdRefused):
        await anext(client.generate(GenerationRequest("r", [1, SIZE], {})))
    with pytest.raises(TokenIdRefused):
        await anext(client.generate(GenerationRequest("r", [1], {"logit_bias": {str(SIZE): 1}})))
    with pytest.raises(TokenIdRefused):
        await client.generate_texts([SIZE], {})
    with pytest.raises(TokenIdRefused):
        await client.score([1], [SIZE])
    with pytest.raises(TokenIdRefused):
        await client.score([1], [2], given_ids=[SIZE])
    with pytest.raises(TokenIdRefused):
        await client.token_texts([SIZE])
    assert engine.requests == []
    assert (await client.score([1], [SIZE - 1])).token_ids == [SIZE - 1]
    await client.close()
