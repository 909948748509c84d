"""Random ragged batches with logits, so that losses can be checked from the logits on."""

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from services.trainer.algorithms.base import Algorithm, AlgorithmLoss, GivenIds, TokenBatch
from services.trainer.algorithms.options import IdSource
from services.trainer.engine.log_probabilities import VocabularyShard, log_probabilities, log_probabilities_at

VOCABULARY = 7


@dataclass
class Answer:
    """One answer. Logits are [tokens, vocabulary] at temperature 1."""

    ids: np.ndarray
    proximal: np.ndarray
    current: np.ndarray
    reference: np.ndarray
    behaviour: np.ndarray
    """[tokens] log-probs."""
    temperature: float
    advantage: float
    rl_mask: np.ndarray
    opd_mask: np.ndarray
    teacher: np.ndarray
    """Logits."""
    rollout: int
    top_ids: np.ndarray = field(default_factory=lambda: np.empty(0))
    """[tokens, k] of the teacher's likeliest; -1 pads."""
    support_ids: np.ndarray = field(default_factory=lambda: np.empty(0))
    """[tokens, k] of the policy's likeliest when it sampled; -1 pads."""


def log_softmax(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    scaled = logits / temperature
    largest = scaled.max(-1, keepdims=True)
    return scaled - largest - np.log(np.exp(scaled - largest).sum(-1, keepdims=True))


def random_answers(seed: int, *, largest_batch: int = 5, moved: float = 0.4, stale: float = 0.4) -> list[Answer]:
    """Every kind: with reward, with teacher, both, neither, partly masked. `moved` and `stale` are in logits."""
    random = np.random.default_rng(seed)
    answers = []
    for _ in range(random.integers(1, largest_batch + 1)):
        tokens = int(random.integers(1, 5))
        shape = (tokens, VOCABULARY)
        proximal = random.normal(0, 1.5, shape)
        temperature = float(random.choice([0.6, 1.0, 1.3]))
        sampled_from = log_softmax(proximal + stale * random.normal(0, 1, shape), temperature)
        ids = random.integers(0, VOCABULARY, tokens)
        teacher = random.normal(0, 1.5, shape)
        top = np.argsort(-teacher, axis=1)[:, :3]
        support = np.argsort(-sampled_from, axis=1)[:, :3]
        if random.random() < 0.3:
            top[:, 2] = support[:, 2] = -1
        answers.append(
            Answer(
                ids=ids,
                proximal=proximal,
                current=proximal + moved * random.normal(0, 1, shape),
                reference=random.normal(0, 1.5, shape),
                behaviour=sampled_from[np.arange(tokens), ids],
                temperature=temperature,
                advantage=float(random.choice([-1.0, 0.0, 0.5, 1.0])),
                rl_mask=(random.random(tokens) < 0.8) & (random.random() < 0.7),
                opd_mask=(random.random(tokens) < 0.8) & (random.random() < 0.7),
                teacher=teacher,
                rollout=int(random.integers(0, 3)),
                top_ids=top,
                support_ids=support,
            )
        )
    return answers


def ids_of(answer: Answer, source: IdSource, count: int | None) -> list[list[int]]:
    """The ids of every token that a loss looks at, in order."""
    chosen: list[list[int]] = []
    for token in range(len(answer.ids)):
        top = [int(i) for i in answer.top_ids[token] if i >= 0]
        support = [int(i) for i in answer.support_ids[token] if i >= 0]
        lists = {
            IdSource.NONE: [],
            IdSource.TEACHER_TOP: top,
            IdSource.STUDENT_TOP: support,
            IdSource.OVERLAP: [i for i in support if i in top],
        }
        chosen.append(lists[source][:count] if answer.opd_mask[token] else [])
    return chosen


def leaking(constant: torch.Tensor, current: torch.Tensor, times: float = 1.0) -> torch.Tensor:
    """The same numbers with so many times the gradient of `current`: a loss that does not treat them as constant shows
    it. Numbers that are subtracted from one another leak differently, or it would cancel."""
    return constant + times * (current - current.detach())


def token_batch(answers: list[Answer], logits: torch.Tensor, algorithm: Algorithm) -> TokenBatch:
    """The batch for `algorithm`, in float64, from `logits` [tokens, vocabulary] of the current policy."""
    needs = algorithm.needs
    lengths = [len(answer.ids) for answer in answers]
    ids = torch.as_tensor(np.concatenate([answer.ids for answer in answers]))
    temperatures = torch.as_tensor(np.repeat([answer.temperature for answer in answers], lengths))
    units = torch.ones_like(temperatures)
    shard = VocabularyShard(0, VOCABULARY, None)

    def stacked(name: str) -> torch.Tensor:
        return torch.as_tensor(np.concatenate([getattr(answer, name) for answer in answers]))

    log_probs, entropies = log_probabilities(logits, ids, temperatures, shard)
    given = None
    if needs.ids is not IdSource.NONE:
        chosen = [each for answer in answers for each in ids_of(answer, needs.ids, needs.ids_per_token)]
        widest = max(1, *(len(each) for each in chosen))
        padded = torch.tensor([each + [-1] * (widest - len(each)) for each in chosen])
        current = log_probabilities_at(logits, padded, units, shard)[0]
        given = GivenIds(
            log_probs=current,
            proximal_log_probs=leaking(log_probabilities_at(stacked("proximal"), padded, units, shard)[0], current),
            teacher_log_probs=leaking(log_probabilities_at(stacked("teacher"), padded, units, shard)[0], current, 3.0),
            mask=padded >= 0,
        )
    opd_mask = stacked("opd_mask")
    teacher = log_probabilities(stacked("teacher"), ids, units, shard)[0]
    unit = log_probabilities(logits, ids, units, shard)[0]
    return TokenBatch(
        log_probs=log_probs,
        proximal_log_probs=leaking(log_probabilities(stacked("proximal"), ids, temperatures, shard)[0], log_probs),
        behaviour_log_probs=leaking(stacked("behaviour"), log_probs, 2.0),
        sample_of_token=torch.as_tensor(np.repeat(np.arange(len(answers)), lengths)),
        advantages=torch.tensor([answer.advantage for answer in answers], dtype=torch.float64),
        rl_mask=stacked("rl_mask"),
        opd_mask=opd_mask,
        rollout_of_sample=torch.tensor([answer.rollout for answer in answers]),
        teacher_log_probs=leaking(torch.where(opd_mask, teacher, 0.0), unit, 3.0),
        unit_log_probs=unit,
        unit_proximal_log_probs=leaking(log_probabilities(stacked("proximal"), ids, units, shard)[0], unit),
        entropies=entropies,
        reference_log_probs=leaking(log_probabilities(stacked("reference"), ids, temperatures, shard)[0], log_probs),
        given=given,
    )


def current_logits(answers: list[Answer]) -> torch.Tensor:
    """[tokens, vocabulary], a leaf."""
    return torch.tensor(np.concatenate([answer.current for answer in answers]), requires_grad=True)


def with_current(answers: list[Answer], logits: np.ndarray) -> list[Answer]:
    """The same answers under other logits."""
    ends = np.cumsum([len(answer.ids) for answer in answers])[:-1]
    return [replace(answer, current=part) for answer, part in zip(answers, np.split(logits, ends), strict=True)]


def loss_and_gradient(
    answers: list[Answer], algorithm: Algorithm, cuts: list[list[int]] | None = None
) -> tuple[float, np.ndarray, list[AlgorithmLoss]]:
    """(loss, gradient [tokens, vocabulary] by the current logits, parts): whole, or in the micro-batches `cuts`."""
    whole = token_batch(answers, current_logits(answers), algorithm)
    weights = algorithm.sample_weights(whole)
    total, parts = 0.0, []
    gradients: list[np.ndarray] = [np.zeros_like(answer.current) for answer in answers]
    for cut in cuts if cuts is not None else [list(range(len(answers)))]:
        chosen = [answers[index] for index in cut]
        logits = current_logits(chosen)
        loss = algorithm.loss(
            token_batch(chosen, logits, algorithm), {name: each[cut] for name, each in weights.items()}
        )
        loss.per_sample.sum().backward()
        assert logits.grad is not None
        total += float(loss.per_sample.detach().sum())
        parts.append(loss)
        ends = np.cumsum([len(answer.ids) for answer in chosen])[:-1]
        for index, gradient in zip(cut, np.split(logits.grad.numpy(), ends), strict=True):
            gradients[index] = gradient
    return total, np.concatenate(gradients), parts
