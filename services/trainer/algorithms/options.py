"""Options of the losses that ship, validated when settings are parsed. No torch: settings are read without it.

A field says what it does; the formulas are in the file of the function that uses it. Limits that contradict one
another are refused here, with the two of them named.
"""

from enum import StrEnum
from typing import Literal, Self

from pydantic import Field, model_validator

from clawstream.settings import Section


class RatioMode(StrEnum):
    """Against which policy the ratio rho is taken, and what corrects for stale data. See `ratio`."""

    DECOUPLED = "decoupled"
    """rho against the policy at the start of the batch, times a truncated weight against the one that sampled."""
    BEHAVIOUR = "behaviour"
    """rho against the policy that sampled; no weight."""
    RECOMPUTED = "recomputed"
    """rho against a second forward pass at the start of the batch; no weight. OpenClaw-RL's: blind to stale data."""


class Level(StrEnum):
    """Over what a ratio is taken."""

    TOKEN = "token"
    """Each token by itself."""
    SEQUENCE = "sequence"
    """The geometric mean over an answer's tokens, as in GSPO."""


class SequenceBound(StrEnum):
    """What is bounded when whole answers are rejected."""

    GEOMETRIC = "geometric"
    """exp of the mean of l_prox - mu over the answer."""
    SUM = "sum"
    """exp of the sum of l_prox - mu over the answer: the ratio of the answers' probabilities."""


class AggregationMode(StrEnum):
    """How token losses become a batch's loss. Formulas in `aggregation`; verl's names in brackets."""

    SAMPLE_MEAN = "sample_mean"
    """Mean over samples of token means (seq-mean-token-mean)."""
    TOKEN_MEAN = "token_mean"
    """Mean over all tokens of the batch (token-mean)."""
    SAMPLE_SUM = "sample_sum"
    """Mean over samples of token sums (seq-mean-token-sum)."""
    SAMPLE_SUM_NORM = "sample_sum_norm"
    """The same divided by a constant (seq-mean-token-sum-norm; Dr. GRPO)."""
    ROLLOUT_MEAN = "rollout_mean"
    """Mean over rollouts of the mean over all tokens of the rollout's turns (agent-lightning)."""


class KlEstimator(StrEnum):
    """Estimators of a KL divergence. Formulas in `kl`."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"
    LOW_VAR = "low_var"


class IdSource(StrEnum):
    """At which further ids a loss needs the policy's log-probs."""

    NONE = "none"
    """Only at the sampled ids."""
    TEACHER_TOP = "teacher"
    """The teacher's likeliest ids."""
    STUDENT_TOP = "student"
    """The likeliest ids of the policy that sampled, with the teacher's log-probs there."""
    OVERLAP = "overlap"
    """Those of the student's that are among the teacher's too."""


class AggregationOptions(Section):
    """What every loss has: aggregation, and terms that hold the policy back."""

    aggregation: AggregationMode = AggregationMode.SAMPLE_MEAN
    """How token losses become a batch's loss."""
    aggregation_norm_tokens: int | None = Field(default=None, ge=1)
    """The constant of `sample_sum_norm`, for example the longest answer that is allowed."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the reference; 0 is off."""
    kl_estimator: KlEstimator = KlEstimator.LOW_VAR
    """How it is estimated from the sampled tokens."""
    kl_reference: Literal["base", "proximal"] = "base"
    """The base model (kept in memory beside the policy), or the policy at the start of the batch."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the entropy that is added to the gain; 0 is off."""

    @property
    def is_regularised(self) -> bool:
        """Whether a token without an advantage has a gradient too."""
        return self.kl_coefficient > 0 or self.entropy_coefficient > 0

    @model_validator(mode="after")
    def _norm_belongs_to_its_mode(self) -> Self:
        if (self.aggregation is AggregationMode.SAMPLE_SUM_NORM) != (self.aggregation_norm_tokens is not None):
            raise ValueError(
                "aggregation_norm_tokens must be given exactly with aggregation=sample_sum_norm, "
                f"not with {self.aggregation.value}"
            )
        return self


class RatioOptions(AggregationOptions):
    """Ratio, clip and off-policy control."""

    ratio: RatioMode = RatioMode.DECOUPLED
    """Against which policy."""
    ratio_level: Level = Level.TOKEN
    """Over tokens or whole answers."""
    behaviour_weight_cap: float = Field(default=2.0, gt=0)
    """Largest weight of a token against the policy that sampled it; only with `decoupled`."""
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """rho is cut below 1 - clip_low where that lowers the gain."""
    clip_high: float = Field(default=0.28, ge=0)
    """rho is cut above 1 + clip_high where that lowers the gain."""
    dual_clip: float | None = Field(default=None, gt=1)
    """With a negative advantage rho counts for at most so much; null is off."""
    icepop_low: float | None = Field(default=None, ge=0)
    """IcePop: tokens whose exp(l_prox - mu) is lower are left out; null is off."""
    icepop_high: float | None = Field(default=None, gt=0)
    """IcePop: tokens whose exp(l_prox - mu) is higher are left out; null is off."""
    opsm_delta: float | None = Field(default=None, ge=0)
    """Off-policy sequence mask: negative tokens of answers that have become less likely by more nats a token than this
    are left out; null is off."""
    sequence_rejection: SequenceBound | None = None
    """Leaves out whole answers outside the bounds below; null is off."""
    sequence_rejection_low: float | None = Field(default=None, ge=0)
    """Lower bound."""
    sequence_rejection_high: float | None = Field(default=None, gt=0)
    """Upper bound."""

    @model_validator(mode="after")
    def _limits_agree(self) -> Self:
        mistakes: list[str] = []
        if self.ratio is not RatioMode.DECOUPLED and "behaviour_weight_cap" in self.model_fields_set:
            mistakes.append(f"behaviour_weight_cap has no effect with ratio={self.ratio.value}: leave it out")
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            mistakes.append(f"dual_clip={self.dual_clip} must exceed 1 + clip_high={1 + self.clip_high}")
        _check_bounds("icepop", self.icepop_low, self.icepop_high, mistakes)
        low, high = self.sequence_rejection_low, self.sequence_rejection_high
        if self.sequence_rejection is None and (low, high) != (None, None):
            mistakes.append("sequence_rejection_low and sequence_rejection_high need sequence_rejection")
        if self.sequence_rejection is not None and (low, high) == (None, None):
            mistakes.append("sequence_rejection needs sequence_rejection_low, sequence_rejection_high, or both")
        _check_bounds("sequence_rejection", low, high, mistakes)
        if mistakes:
            raise ValueError("; ".join(mistakes))
        return self


def _check_bounds(name: str, low: float | None, high: float | None, mistakes: list[str]) -> None:
    """Fresh data has a ratio of 1: bounds that leave it out would leave out everything."""
    if low is not None and low > 1:
        mistakes.append(f"{name}_low={low} is above 1, so fresh data would be left out")
    if high is not None and high < 1:
        mistakes.append(f"{name}_high={high} is below 1, so fresh data would be left out")


class BinaryOptions(RatioOptions):
    """Of `binary`."""


class DistillationOptions(RatioOptions):
    """Of `opd`."""

    advantage_clip: float | None = Field(default=None, gt=0)
    """Bounds |l_T - l_prox|; null is off."""


class CombineOptions(DistillationOptions):
    """Of `combine`."""

    rl_coefficient: float = Field(default=1.0, ge=0)
    """Weight of the RL component."""
    opd_coefficient: float = Field(default=1.0, ge=0)
    """Weight of the distillation component."""
    summed: bool = False
    """The original's: one clip and one mean over the sum of both advantages, at the sampling temperature. Biased; for
    comparison."""

    @model_validator(mode="after")
    def _something_is_learned(self) -> Self:
        if self.rl_coefficient == 0 and self.opd_coefficient == 0:
            raise ValueError("rl_coefficient and opd_coefficient are both 0: nothing would be learned")
        return self


class TopKOptions(AggregationOptions):
    """Of `topk`."""


class HybridOptions(CombineOptions):
    """Of `hybrid`."""

    advantage_clip: float | None = Field(default=1.0, gt=0)
    """Bounds |l_T(v) - l_prox(v)|; null is off."""
    support: Literal[IdSource.STUDENT_TOP, IdSource.TEACHER_TOP, IdSource.OVERLAP] = IdSource.STUDENT_TOP
    """On which ids teacher and policy are compared."""
    support_size: int = Field(default=4, ge=1)
    """At most so many ids a token: the likeliest of the support."""

    @model_validator(mode="after")
    def _never_summed(self) -> Self:
        if self.summed:
            raise ValueError("summed belongs to combine: hybrid compares whole distributions")
        return self


class LearningSignal(Section):
    """What a loss can learn from; what a sample carries beyond it is left out before it is counted."""

    rl: bool = True
    """Rewards."""
    opd: bool = True
    """A teacher's signal."""
    ids: IdSource = IdSource.NONE
    """The ids at which the teacher's signal must have log-probs."""


_PACKAGE = "services.trainer.algorithms."
OPTIONS: dict[str, tuple[type[AggregationOptions], LearningSignal]] = {
    _PACKAGE + "binary:Binary": (BinaryOptions, LearningSignal(opd=False)),
    _PACKAGE + "opd:Opd": (DistillationOptions, LearningSignal(rl=False)),
    _PACKAGE + "combine:Combine": (CombineOptions, LearningSignal()),
    _PACKAGE + "topk:TopK": (TopKOptions, LearningSignal(rl=False, ids=IdSource.TEACHER_TOP)),
    _PACKAGE + "hybrid:Hybrid": (HybridOptions, LearningSignal(ids=IdSource.STUDENT_TOP)),
}
"""Import path of every loss that ships to its options and to what it learns from."""


def options_of(import_path: str, options: dict[str, object]) -> AggregationOptions | None:
    """The validated options of a loss that ships; None for anyone's own. Raises pydantic.ValidationError."""
    known = OPTIONS.get(import_path)
    return known[0].model_validate(options) if known is not None else None


def learning_signal(import_path: str, options: AggregationOptions | None) -> LearningSignal:
    """What the loss at `import_path` learns from; anyone's own is given everything."""
    if import_path not in OPTIONS:
        return LearningSignal()
    signal = OPTIONS[import_path][1]
    if isinstance(options, HybridOptions):
        return LearningSignal(rl=options.rl_coefficient > 0, opd=options.opd_coefficient > 0, ids=options.support)
    if isinstance(options, CombineOptions):
        return LearningSignal(rl=options.rl_coefficient > 0, opd=options.opd_coefficient > 0)
    return signal
