"""Every loss once more, from the formulas: plain Python over tokens, float64, no code of the trainer.

An answer is `loss_cases.Answer`; options are a plain dictionary with the names that the settings use.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.numerics.trainer.loss_cases import Answer, log_softmax

Options = dict[str, Any]
Token = tuple[int, int]
"""(answer, token)."""


def members(answers: list[Answer], mask: str) -> list[Token]:
    chosen = {
        "rl": lambda a, t: a.rl_mask[t],
        "opd": lambda a, t: a.opd_mask[t],
        "either": lambda a, t: a.rl_mask[t] or a.opd_mask[t],
    }[mask]
    return [(i, t) for i, a in enumerate(answers) for t in range(len(a.ids)) if chosen(a, t)]


def weighted(answers: list[Answer], mask: str, options: Options, value: Callable[[int, int], float]) -> float:
    """The aggregate of value(answer, token) over a component's tokens."""
    tokens = members(answers, mask)
    if not tokens:
        return 0.0
    samples = sorted({i for i, _ in tokens})
    sums = {i: sum(value(i, t) for j, t in tokens if j == i) for i in samples}
    counts = {i: sum(j == i for j, _ in tokens) for i in samples}
    match options.get("aggregation", "sample_mean"):
        case "sample_mean":
            return sum(sums[i] / counts[i] for i in samples) / len(samples)
        case "token_mean":
            return sum(sums.values()) / len(tokens)
        case "sample_sum":
            return sum(sums.values()) / len(samples)
        case "sample_sum_norm":
            return sum(sums.values()) / len(samples) / options["aggregation_norm_tokens"]
        case "rollout_mean":
            rollouts = sorted({answers[i].rollout for i in samples})
            means = []
            for rollout in rollouts:
                inside = [i for i in samples if answers[i].rollout == rollout]
                means.append(sum(sums[i] for i in inside) / sum(counts[i] for i in inside))
            return sum(means) / len(rollouts)
    raise AssertionError(options)


class Numbers:
    """Log-probs of an answer's own ids."""

    def __init__(self, answer: Answer) -> None:
        place = (np.arange(len(answer.ids)), answer.ids)
        self.now = log_softmax(answer.current, answer.temperature)[place]
        self.start = log_softmax(answer.proximal, answer.temperature)[place]
        self.now1 = log_softmax(answer.current)[place]
        self.start1 = log_softmax(answer.proximal)[place]
        self.mu = answer.behaviour
        self.teacher = log_softmax(answer.teacher)[place]
        self.reference = log_softmax(answer.reference, answer.temperature)[place]
        whole = log_softmax(answer.current, answer.temperature)
        self.entropy = -(np.exp(whole) * whole).sum(1)


def surrogate(advantage: float, rho: float, weight: float, options: Options) -> float:
    low, high = options.get("clip_low", 0.2), options.get("clip_high", 0.28)
    loss = max(-rho * advantage, -min(max(rho, 1 - low), 1 + high) * advantage)
    ceiling = options.get("dual_clip")
    if ceiling is not None and advantage < 0:
        loss = min(loss, -ceiling * advantage)
    return weight * loss


def is_kept(answers: list[Answer], mask: str, token: Token, advantage: float, options: Options) -> bool:
    i, t = token
    numbers = Numbers(answers[i])
    own = [u for j, u in members(answers, mask) if j == i]
    stale = math.exp(numbers.start[t] - numbers.mu[t])
    if not options.get("icepop_low", 0.0) <= stale <= options.get("icepop_high", math.inf):
        return False
    delta = options.get("opsm_delta")
    if delta is not None and advantage < 0 and np.mean([numbers.mu[u] - numbers.now[u] for u in own]) > delta:
        return False
    kind = options.get("sequence_rejection")
    if kind is not None:
        distances = [numbers.start[u] - numbers.mu[u] for u in own]
        ratio = math.exp(sum(distances) if kind == "sum" else sum(distances) / len(distances))
        return options.get("sequence_rejection_low", 0.0) <= ratio <= options.get("sequence_rejection_high", math.inf)
    return True


def policy_gradient(
    answers: list[Answer],
    mask: str,
    options: Options,
    advantage: Callable[[int, int], float],
    *,
    unit_temperature: bool,
) -> float:
    def value(i: int, t: int) -> float:
        numbers = Numbers(answers[i])
        now, start = (numbers.now1, numbers.start1) if unit_temperature else (numbers.now, numbers.start)
        own = [t]
        if options.get("ratio_level") == "sequence":
            own = [u for j, u in members(answers, mask) if j == i]

        def ratio(above: np.ndarray, below: np.ndarray) -> float:
            return math.exp(sum(above[u] - below[u] for u in own) / len(own))

        mode = options.get("ratio", "decoupled")
        rho = ratio(now, numbers.mu if mode == "behaviour" else start)
        weight = min(ratio(start, numbers.mu), options.get("behaviour_weight_cap", 2.0)) if mode == "decoupled" else 1.0
        if not is_kept(answers, mask, (i, t), advantage(i, t), options):
            return 0.0
        return surrogate(advantage(i, t), rho, weight, options)

    return weighted(answers, mask, options, value)


def cut(value: float, limit: float | None) -> float:
    return value if limit is None else min(max(value, -limit), limit)


def regularisation(answers: list[Answer], mask: str, options: Options) -> float:
    def value(i: int, t: int) -> float:
        numbers = Numbers(answers[i])
        base = options.get("kl_reference", "base") == "base"
        d = numbers.now[t] - (numbers.reference[t] if base else numbers.start[t])
        match options.get("kl_estimator", "low_var"):
            case "k1":
                kl = d
            case "k2":
                kl = d * d / 2
            case "k3":
                kl = math.exp(-d) - 1 + d
            case _:
                d = cut(d, 20.0)
                kl = cut(math.exp(-d) - 1 + d, 10.0)
        return options.get("kl_coefficient", 0.0) * kl - options.get("entropy_coefficient", 0.0) * numbers.entropy[t]

    return weighted(answers, mask, options, value)


def rl(answers: list[Answer], options: Options) -> float:
    return policy_gradient(answers, "rl", options, lambda i, t: answers[i].advantage, unit_temperature=False)


def opd(answers: list[Answer], options: Options) -> float:
    def advantage(i: int, t: int) -> float:
        numbers = Numbers(answers[i])
        return cut(numbers.teacher[t] - numbers.start1[t], options.get("advantage_clip"))

    return policy_gradient(answers, "opd", options, advantage, unit_temperature=True)


def summed(answers: list[Answer], options: Options) -> float:
    def advantage(i: int, t: int) -> float:
        numbers, answer = Numbers(answers[i]), answers[i]
        distance = cut(numbers.teacher[t] - numbers.start[t], options.get("advantage_clip"))
        return options.get("rl_coefficient", 1.0) * (answer.advantage if answer.rl_mask[t] else 0.0) + options.get(
            "opd_coefficient", 1.0
        ) * (distance if answer.opd_mask[t] else 0.0)

    return policy_gradient(answers, "either", options, advantage, unit_temperature=False)


def topk(answers: list[Answer], options: Options) -> float:
    def value(i: int, t: int) -> float:
        policy, teacher = np.exp(log_softmax(answers[i].current[t])), np.exp(log_softmax(answers[i].teacher[t]))
        inside = [v for v in answers[i].top_ids[t] if v >= 0]
        outside = [v for v in range(len(policy)) if v not in inside]
        bins = [(policy[v], teacher[v]) for v in inside] + [(policy[outside].sum(), teacher[outside].sum())]
        return float(sum(p * (math.log(p) - math.log(q)) for p, q in bins))

    return weighted(answers, "opd", options, value)


def support(answer: Answer, token: int, options: Options) -> list[int]:
    top, student = ([int(v) for v in ids[token] if v >= 0] for ids in (answer.top_ids, answer.support_ids))
    match options.get("support", "student"):
        case "teacher":
            chosen = top
        case "overlap":
            chosen = [v for v in student if v in top]
        case _:
            chosen = student
    return chosen[: options.get("support_size", 4)]


def hybrid_distillation(answers: list[Answer], options: Options) -> float:
    def parts(i: int, t: int) -> list[tuple[float, float]]:
        answer = answers[i]
        now, start, teacher = (log_softmax(x[t]) for x in (answer.current, answer.proximal, answer.teacher))
        ids = support(answer, t, options)
        mass = sum(math.exp(start[v]) for v in ids)
        limit = options.get("advantage_clip", 1.0)
        return [
            (math.exp(start[v]) / mass * cut(teacher[v] - start[v], limit), math.exp(now[v] - start[v])) for v in ids
        ]

    def value(i: int, t: int) -> float:
        each = parts(i, t)
        if not is_kept(answers, "opd", (i, t), sum(a for a, _ in each), options):
            return 0.0
        return sum(surrogate(advantage, rho, 1.0, options) for advantage, rho in each)

    return weighted(answers, "opd", options, value)


def reference_loss(name: str, answers: list[Answer], options: Options) -> float:
    """The loss `name` of a whole batch."""
    c_rl, c_opd = options.get("rl_coefficient", 1.0), options.get("opd_coefficient", 1.0)
    match name:
        case "binary":
            return rl(answers, options) + regularisation(answers, "rl", options)
        case "opd":
            return opd(answers, options) + regularisation(answers, "opd", options)
        case "combine" if options.get("summed"):
            return summed(answers, options) + regularisation(answers, "either", options)
        case "combine":
            both = c_rl * rl(answers, options) + c_opd * opd(answers, options)
            return both + regularisation(answers, "either", options)
        case "topk":
            return topk(answers, options) + regularisation(answers, "opd", options)
        case "hybrid":
            both = c_rl * rl(answers, options) + c_opd * hybrid_distillation(answers, options)
            return both + regularisation(answers, "either", options)
    raise AssertionError(name)
