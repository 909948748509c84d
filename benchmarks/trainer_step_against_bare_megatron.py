"""A training step against bare Megatron on the same tokens: what clipping, measuring and bookkeeping cost.

Bare is: the same network on the same packed rows, cross entropy at the same positions, backward, gradient clipping
and torch's fused AdamW. The two alternate, and the ratios of their medians are reported, of wall time and of the
process's CPU time; where others use the machine too only the latter means something. Goal: at most 1.15.

Real tokens are those that a prediction is made from: a sequence's last token is not. The model counts what it computes
at its embedding, so that padding of any kind would show. Goal: at least 0.9 of them are real.

    python -m benchmarks.trainer_step_against_bare_megatron MODEL_DIRECTORY [--samples 8] [--rounds 3] [--threads 2]
"""

import argparse
import json
import resource
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

from services.trainer.algorithms.binary import Binary
from services.trainer.engine import cpu_platform
from services.trainer.engine.bridge import read_config
from services.trainer.engine.model import PolicyModel
from services.trainer.engine.parallel import ParallelLayout
from services.trainer.engine.weights import load_hugging_face
from services.trainer.packing import PackedRow, pack, plan_micro_batches
from services.trainer.policy import PolicyTrainer
from services.trainer.sample import TrainingSample

TOKENS_PER_MICRO_BATCH = 512


def ragged_samples(num_samples: int, vocabulary_size: int) -> list[TrainingSample]:
    """Prompts of 20 to 100 tokens, answers of 10 to 80, rewards +1 and -1 in turn."""
    random = np.random.default_rng(0)
    samples: list[TrainingSample] = []
    for index in range(num_samples):
        response_length = int(random.integers(10, 80))
        samples.append(
            TrainingSample(
                sample_id=str(index),
                prompt_ids=random.integers(0, vocabulary_size, int(random.integers(20, 100))).astype(np.int32),
                response_ids=random.integers(0, vocabulary_size, response_length).astype(np.int32),
                behaviour_log_probs=np.full(response_length, -5.0, dtype=np.float32),
                rl_mask=np.ones(response_length, dtype=np.bool_),
                reward=1.0 if index % 2 else -1.0,
            )
        )
    return samples


def bare_step(model: PolicyModel, optimizer: torch.optim.Optimizer, rows: list[PackedRow]) -> None:
    """Forward, cross entropy, backward, clip, update; nothing else."""
    for row in rows:
        targets = torch.as_tensor(row.target_ids, device=cpu_platform.device())
        torch.nn.functional.cross_entropy(model.logits(row).float(), targets).backward()
    torch.nn.utils.clip_grad_norm_(model.network.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


class ComputedTokens:
    """Counts what goes through a model."""

    def __init__(self, model: PolicyModel) -> None:
        self.count = 0
        model.network.embedding.word_embeddings.register_forward_pre_hook(self._add)

    def _add(self, _module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self.count += inputs[0].numel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_directory", type=Path)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    layout = ParallelLayout.start()
    fast = cpu_platform.enable_fast_exact_matmul()
    policy = PolicyTrainer(layout, Binary(), tokens_per_micro_batch=TOKENS_PER_MICRO_BATCH)
    policy.load(options.model_directory)
    bare = PolicyModel(read_config(str(options.model_directory)))
    load_hugging_face(bare, layout, options.model_directory)
    optimizer = torch.optim.AdamW(bare.network.parameters(), lr=1e-5, betas=(0.9, 0.98), weight_decay=0.1, fused=True)

    samples = ragged_samples(options.samples, policy.model.vocabulary_size)
    lengths = [sample.num_tokens for sample in samples]
    rows = [
        pack([(samples[index].prompt_ids, samples[index].response_ids) for index in micro_batch])
        for micro_batch in plan_micro_batches(lengths, TOKENS_PER_MICRO_BATCH)
    ]
    computed = ComputedTokens(policy.model)
    seconds: dict[str, list[float]] = {"clawstream": [], "bare": []}
    cpu_seconds: dict[str, list[float]] = {"clawstream": [], "bare": []}
    for round_number in range(options.rounds + 1):
        for name in ("clawstream", "bare") if round_number % 2 else ("bare", "clawstream"):
            start, cpu_start = time.perf_counter(), time.process_time()
            if name == "bare":
                bare_step(bare, optimizer, rows)
            else:
                policy.train_step(samples, 1e-5)
            if round_number > 0:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
                cpu_seconds[name].append(time.process_time() - cpu_start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    cpu_medians = {name: statistics.median(values) for name, values in cpu_seconds.items()}
    padded = len(lengths) * max(lengths)
    report = {
        "benchmark": "trainer_step_against_bare_megatron",
        "tokens": sum(lengths),
        "clawstream_seconds": round(medians["clawstream"], 3),
        "bare_seconds": round(medians["bare"], 3),
        "ratio": round(medians["clawstream"] / medians["bare"], 3),
        "clawstream_cpu_seconds": round(cpu_medians["clawstream"], 3),
        "bare_cpu_seconds": round(cpu_medians["bare"], 3),
        "cpu_ratio": round(cpu_medians["clawstream"] / cpu_medians["bare"], 3),
        "goal_ratio": 1.15,
        "real_token_share": round((options.rounds + 1) * sum(length - 1 for length in lengths) / computed.count, 3),
        "goal_real_token_share": 0.9,
        "real_token_share_if_padded": round(sum(lengths) / padded, 3),
        "fast_exact_matmul": fast,
        "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
    }
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    layout.stop()


if __name__ == "__main__":
    main()
