"""How SGLang has to be started, and what clawstream says of one that was started otherwise."""

from clawstream.engine.start_flags import start_flag_warnings
from tests.sglang.conftest import Sglang


async def test_this_server_was_started_as_it_should_be(sglang: Sglang) -> None:
    information = await sglang.client.server_information()
    assert start_flag_warnings(information) == []
    assert information["disable_radix_cache"] is False, "the other tests mean little without it"


async def test_a_missing_flag_is_named(sglang: Sglang) -> None:
    """On the real answer of `/server_info`, in which one value at a time is what it is without the flag."""
    information = await sglang.client.server_information()
    [warning] = start_flag_warnings({**information, "incremental_streaming_output": False})
    assert "--incremental-streaming-output" in warning
    [warning] = start_flag_warnings({**information, "weight_version": "default"})
    assert "--weight-version 0" in warning


async def test_a_chunk_carries_only_what_is_new(sglang: Sglang) -> None:
    body = {
        "input_ids": list(range(10, 40)),
        "sampling_params": {"max_new_tokens": 50, "ignore_eos": True},
        "return_logprob": True,
        "stream": True,
    }
    sizes: list[int] = []
    async with sglang.raw.stream("POST", "/generate", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                sizes.append(len(line))
    assert len(sizes) > 5
    assert max(sizes) < 3 * min(sizes), "a chunk does not grow with the answer"


async def test_the_version_at_start_is_a_number(sglang: Sglang) -> None:
    """`--weight-version 0`: without it SGLang says `default`, and the gate loads version 0 before the first request."""
    assert (await sglang.client.model_information()).weight_version == 0
