# pyright: basic
# Reason: transformers' generate is untyped.
"""Tokens per second of the CPU engine against Hugging Face `generate`: the same prompts, dtype and threads, in one run.

    OMP_WAIT_POLICY=passive python benchmarks/engine_against_transformers.py --model-path models/smollm2

Greedy, prompts of mixed length, end tokens ignored, prefill included. Alternates between the two so that a busy machine
slows both, and takes each one's best round. Prints one JSON object; `ratio` is the goal of at least 2 at batch 16, and
`cpu_ratio` compares processor seconds, which other processes disturb less.
"""

import asyncio
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM

from clawstream.log import configure_logging
from clawstream.settings import LogSettings
from services.engine.engine import DTYPES, Engine
from services.engine.requests import GenerateBody, SamplingParameters
from services.engine.settings import EngineSettings

PROMPT_TOKENS = range(60, 140, 5)
"""Lengths of the prompts: 100 on average."""


def make_prompts(batch: int, vocabulary_size: int) -> list[list[int]]:
    """[batch] prompts of random ids; no two begin alike, so that a prefix cache cannot help."""
    generator = torch.Generator().manual_seed(0)
    lengths = [PROMPT_TOKENS[index % len(PROMPT_TOKENS)] for index in range(batch)]
    return [torch.randint(3, vocabulary_size, (length,), generator=generator).tolist() for length in lengths]


def run_transformers(model, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """[batch, new_tokens] ids of Hugging Face's `generate` on the left-padded batch."""
    longest = max(map(len, prompts))
    input_ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    attention_mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    output = model.generate(
        input_ids=input_ids, attention_mask=attention_mask, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0
    )
    return output[:, longest:].tolist()


def run_engine(engine: Engine, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """[batch, new_tokens] ids of the engine's answers to concurrent requests."""
    parameters = SamplingParameters(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)

    async def answer(prompt: list[int]) -> list[int]:
        body = GenerateBody(input_ids=prompt, sampling_params=parameters, return_logprob=True)
        responses: list[dict[str, Any]] = [part async for part in engine.generate(body, engine.check(body))]
        return responses[-1]["output_ids"]

    async def answer_all() -> list[list[int]]:
        outputs = await asyncio.gather(*(answer(prompt) for prompt in prompts))
        await engine.forget_prefixes()
        return outputs

    return asyncio.run(answer_all())


@dataclass
class Stopwatch:
    """The best of several rounds."""

    seconds: float = math.inf
    """By the wall clock"""
    cpu_seconds: float = math.inf
    """Of all threads of this process"""

    def time(self, function: Callable[[], list[list[int]]]) -> list[list[int]]:
        """Run one round and return its result."""
        start, cpu_start = time.perf_counter(), time.process_time()
        result = function()
        self.cpu_seconds = min(self.cpu_seconds, time.process_time() - cpu_start)
        self.seconds = min(self.seconds, time.perf_counter() - start)
        return result


def main(
    model_path: Annotated[Path, typer.Option(help="A Hugging Face directory.")] = Path("models/smollm2"),
    batch: Annotated[int, typer.Option(help="Concurrent requests.")] = 16,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 64,
    threads: Annotated[int, typer.Option(help="Threads of both.")] = 2,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, of both.")] = "float32",
    rounds: Annotated[int, typer.Option(help="Measured rounds; the best counts.")] = 3,
) -> None:
    """Measure both and print the ratio."""
    torch.set_num_threads(threads)
    log = configure_logging(LogSettings(level="warning"), process="benchmark")
    settings = EngineSettings.model_validate(
        {"model_path": model_path, "dtype": dtype, "threads": threads, "max_slots": batch, "max_context_tokens": 1024}
    )
    engine = Engine(settings, log=log, on_failure=lambda: sys.exit("the engine failed"))
    engine.worker.start()
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=DTYPES[dtype]).eval()
    model.generation_config.eos_token_id = None
    prompts = make_prompts(batch, engine.architecture.vocabulary_size)

    run_transformers(model, prompts, 4)
    run_engine(engine, prompts, 4)
    theirs, ours = Stopwatch(), Stopwatch()
    expected, outputs = [], []
    for _ in range(rounds):
        outputs = ours.time(lambda: run_engine(engine, prompts, new_tokens))
        expected = theirs.time(lambda: run_transformers(model, prompts, new_tokens))
    engine.worker.stop()

    total = batch * new_tokens
    result = {
        "model": str(model_path),
        "dtype": dtype,
        "batch": batch,
        "threads": threads,
        "new_tokens": new_tokens,
        "transformers_tokens_per_second": round(total / theirs.seconds, 1),
        "engine_tokens_per_second": round(total / ours.seconds, 1),
        "ratio": round(theirs.seconds / ours.seconds, 2),
        "cpu_ratio": round(theirs.cpu_seconds / ours.cpu_seconds, 2),
        "answers_equal": sum(one == other for one, other in zip(outputs, expected, strict=True)),
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    typer.run(main)
