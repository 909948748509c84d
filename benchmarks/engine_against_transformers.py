# pyright: basic
# Reason: transformers' generate is untyped.
"""Tokens per second of the CPU engine against Hugging Face `generate`: the same prompts, dtype and threads, in one run.

    OMP_WAIT_POLICY=passive python benchmarks/engine_against_transformers.py --model-path models/smollm2

Greedy, prompts of mixed length, end tokens ignored, prefill included. The two alternate round by round, so that a busy
machine slows both. Prints one JSON object. Each figure is a median over the rounds, with the least and the most beside
it; a ratio is that of two neighbouring rounds. `ratio` is the goal of at least 2 at batch 16; `cpu_ratio` compares
processor seconds of all threads, which other processes disturb less. The greedy ids must be Hugging Face's, and so must
the log-probs, to which its model alone gives the reference.
"""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from transformers import AutoModelForCausalLM

from clawstream.log import configure_logging
from clawstream.settings import LogSettings
from services.engine.engine import DTYPES, Engine
from services.engine.requests import GenerateBody, SamplingParameters
from services.engine.settings import EngineSettings

Result = TypeVar("Result")

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


def run_engine(engine: Engine, prompts: list[list[int]], new_tokens: int) -> list[dict[str, Any]]:
    """[batch] the engine's answers to concurrent requests."""
    parameters = SamplingParameters(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)

    async def answer(prompt: list[int]) -> dict[str, Any]:
        body = GenerateBody(input_ids=prompt, sampling_params=parameters, return_logprob=True)
        responses: list[dict[str, Any]] = [part async for part in engine.generate(body, engine.check(body))]
        return responses[-1]

    async def answer_all() -> list[dict[str, Any]]:
        outputs = await asyncio.gather(*(answer(prompt) for prompt in prompts))
        await engine.forget_prefixes()
        return outputs

    return asyncio.run(answer_all())


@dataclass
class Stopwatch:
    """Several rounds of one side."""

    seconds: list[float] = field(default_factory=list[float])
    """[rounds] by the wall clock"""
    cpu_seconds: list[float] = field(default_factory=list[float])
    """[rounds] of all threads of this process"""

    def time(self, function: Callable[[], Result]) -> Result:
        """Run one round and return its result."""
        start, cpu_start = time.perf_counter(), time.process_time()
        result = function()
        self.cpu_seconds.append(time.process_time() - cpu_start)
        self.seconds.append(time.perf_counter() - start)
        return result


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    figures = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    return {name: round(value, 2) for name, value in figures.items()}


def largest_logprob_error(model, prompts: list[list[int]], answers: list[dict[str, Any]]) -> float:
    """Largest difference in nats between the answers' log-probs and those of Hugging Face's model for the same ids."""
    errors: list[float] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        output = torch.tensor(answer["output_ids"])  # [new_tokens]
        with torch.inference_mode():
            ids = torch.tensor([prompt + answer["output_ids"]])
            logits = model(ids, use_cache=False, logits_to_keep=len(output) + 1).logits[0, :-1]
        expected = torch.log_softmax(logits.float(), dim=-1).gather(1, output.unsqueeze(1)).squeeze(1)
        ours = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
        errors.append(float((ours - expected).abs().max()))
    return max(errors)


def main(
    model_path: Annotated[Path, typer.Option(help="A Hugging Face directory.")] = Path("models/smollm2"),
    batch: Annotated[int, typer.Option(help="Concurrent requests.")] = 16,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 64,
    threads: Annotated[int, typer.Option(help="Threads of both.")] = 2,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, of both.")] = "float32",
    rounds: Annotated[int, typer.Option(help="Measured rounds of each, in turn.")] = 5,
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
    expected, answers = [], []
    for _ in range(rounds):
        expected = theirs.time(lambda: run_transformers(model, prompts, new_tokens))
        answers = ours.time(lambda: run_engine(engine, prompts, new_tokens))
    engine.worker.stop()

    total = batch * new_tokens
    result = {
        "model": str(model_path),
        "dtype": dtype,
        "batch": batch,
        "threads": threads,
        "new_tokens": new_tokens,
        "rounds": rounds,
        "transformers_tokens_per_second": spread([total / seconds for seconds in theirs.seconds]),
        "engine_tokens_per_second": spread([total / seconds for seconds in ours.seconds]),
        "ratio": spread([one / other for one, other in zip(theirs.seconds, ours.seconds, strict=True)]),
        "transformers_cpu_seconds": spread(theirs.cpu_seconds),
        "engine_cpu_seconds": spread(ours.cpu_seconds),
        "cpu_ratio": spread([one / other for one, other in zip(theirs.cpu_seconds, ours.cpu_seconds, strict=True)]),
        "answers_equal": sum(one["output_ids"] == other for one, other in zip(answers, expected, strict=True)),
        "largest_logprob_error": round(largest_logprob_error(model, prompts, answers), 6),
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    typer.run(main)
