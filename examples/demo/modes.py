"""What the demo can learn from: the reward, the teacher who read the user's complaint, or both."""

from dataclasses import dataclass
from typing import Final

from services.teacher.settings import Mode
from services.trainer.advantages import AdvantageMode

TEACHER_CONTEXT_TOKENS: Final = 2048
"""What the demo's engines offer."""


@dataclass(frozen=True, slots=True)
class LearningMode:
    """One way to learn, from judge to loss."""

    name: str
    hints: str
    """The judge spec's source of hints: the small judge writes none, so the user's own words."""
    teacher: Mode
    """Which components samples have."""
    algorithm: str
    """Import path of the trainer's loss."""
    advantage: AdvantageMode = AdvantageMode.REWARD
    """What the loss makes of a reward."""
    support_k: int = 0
    """Of so many of the policy's likeliest tokens the teacher gives its log-probs."""


_LOSSES: Final = "services.trainer.algorithms"
MODES: Final = {
    mode.name: mode
    for mode in (
        LearningMode("binary", "none", Mode.BINARY, f"{_LOSSES}.binary:Binary"),
        # Nine of ten first reactions are complaints: beside the user's average the rare praise counts for more.
        LearningMode(
            "binary-baseline",
            "none",
            Mode.BINARY,
            f"{_LOSSES}.binary:Binary",
            advantage=AdvantageMode.USER_BASELINE,
        ),
        LearningMode("opd", "user", Mode.OPD, f"{_LOSSES}.opd:Opd"),
        LearningMode("combine", "user", Mode.COMBINE, f"{_LOSSES}.combine:Combine"),
        LearningMode("hybrid", "user", Mode.COMBINE, f"{_LOSSES}.hybrid:Hybrid", support_k=4),
    )
}
"""By name."""
