"""The real process: started by flags or from TOML, asked by clawstream's own client, stopped by SIGTERM."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from clawstream.engine.client import HttpEngineClient
from clawstream.engine.interface import GenerationRequest, PauseMode
from clawstream.errors import EngineRejected
from services.engine.__main__ import main
from tests.numerics.engine.conftest import ModelMaker, ReferenceMaker

PROMPT = list(range(10, 30))
REPOSITORY = Path(__file__).resolve().parents[3]


@asynccontextmanager
async def engine_process(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A serving engine and its URL, ended by SIGTERM."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.engine",
        *arguments,
        stderr=asyncio.subprocess.PIPE,
        cwd=REPOSITORY,
        env=os.environ | {"OMP_WAIT_POLICY": "passive", "PYTHONPATH": str(REPOSITORY)},
    )
    assert process.stderr is not None
    try:
        url = None
        log: list[str] = []
        while url is None:
            line = (await process.stderr.readline()).decode()
            assert line, "the engine ended: " + "".join(log)
            log.append(line)
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
            url = found.group() if found else None
        yield process, url
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.communicate()


@pytest.mark.parametrize("by_file", [False, True])
async def test_a_served_model_answers_scores_and_changes_its_weights(
    by_file: bool, tmp_path: Path, make_model: ModelMaker, reference: ReferenceMaker
) -> None:
    old, new = make_model("llama", 1), make_model("llama", 2)
    if by_file:  # another section than the default one, cumulative streams
        config = tmp_path / "clawstream.toml"
        values = f'model_path = "{old}"\nport = 0\nweight_version = "3"\nmax_context_tokens = 256'
        config.write_text(f"[judge-engine]\n{values}\n")
        arguments = ["--config", str(config), "--section", "judge-engine"]
    else:
        arguments = ["--model-path", str(old), "--port", "0", "--weight-version", "3", "--max-context-tokens", "256"]
        arguments.append("--incremental-streaming-output")
    async with engine_process(*arguments) as (process, url):
        client = HttpEngineClient("one", url)
        try:
            request = GenerationRequest("r", PROMPT, {"temperature": 0.0, "max_new_tokens": 12})
            chunks = [chunk async for chunk in client.generate(request)]
            ids = [token for chunk in chunks for token in chunk.token_ids]
            assert ids == reference(old).greedy(PROMPT, 12)
            logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
            assert logprobs == pytest.approx(reference(old).of_output(PROMPT, ids), abs=1e-4)
            [span] = chunks[-1].version_spans
            assert (span.weight_version, span.start, span.end) == (3, 0, len(ids))

            scores = await client.score(PROMPT, ids, top_k=2)
            assert scores.logprobs == pytest.approx(logprobs, abs=1e-4)
            assert scores.weight_version == 3

            await client.pause(PauseMode.RETRACT)
            await client.load_weights(str(new), 4, flush_cache=True)
            await client.resume()
            information = await client.model_information()
            assert (information.weight_version, information.max_context_tokens) == (4, 256)
            scores = await client.score(PROMPT, ids)
            assert scores.logprobs == pytest.approx(reference(new).of_output(PROMPT, ids), abs=1e-4)
            with pytest.raises(EngineRejected, match="absent"):
                await client.load_weights(str(new / "absent"), 5, flush_cache=True)
            assert await client.is_healthy()
        finally:
            await client.close()
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


def test_a_process_that_cannot_start_says_why(
    make_model: ModelMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(model_path=make_model("llama", 1), port=99999, dtype="int8")
    said = capsys.readouterr().err
    assert said.index("engine.port") < said.index("engine.dtype")
    with pytest.raises(SystemExit, match=r"^2$"):
        main(model_path=tmp_path / "absent", port=0)
    assert "engine.model_path: " in (said := capsys.readouterr().err)
    assert "absent: no such directory" in said
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(SystemExit, match=r"^2$"):
        main(model_path=tmp_path, port=0)
    assert "model_type 'gpt2'" in capsys.readouterr().err


def test_a_setting_that_does_not_exist_is_named_and_not_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "clawstream.toml"
    file.write_text("[engine]\nno_such_field = 1\n")
    with pytest.raises(SystemExit, match=r"^2$"):
        main(config=file, process=None, section="engine")
    assert "engine.no_such_field" in capsys.readouterr().err
