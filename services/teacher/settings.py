"""Settings of the teacher: section `[teacher]`."""

from enum import StrEnum
from typing import Literal

from pydantic import Field, model_validator

from clawstream.dependence import Dependence, Provision
from clawstream.settings import ModelDirectory, Section, ServiceSettings
from clawstream.worker.settings import WorkerSettings


class Mode(StrEnum):
    """Which components of a sample the teacher writes."""

    BINARY = "binary"
    """The reward alone. Needs no teacher model."""
    OPD = "opd"
    """The teacher's signal alone (on-policy distillation). A score without a hint makes no sample."""
    COMBINE = "combine"
    """Both, each where there is one."""


class ScoreSign(StrEnum):
    """What came of judging, in one word."""

    NEGATIVE = "negative"
    NEUTRAL = "neutral"
    POSITIVE = "positive"
    FAILED = "failed"


class HintSettings(Section):
    """Which hint the teacher is given, and how."""

    selection: str = "longest"
    """`longest`, `shortest`, `token_optimal` and `sequence_optimal` (where teacher and student agree most about what
    could be said), or an import path `package.module:name` of your own."""
    form: Literal["last_user_message", "system"] = "last_user_message"
    """Where the hint stands: at the end of the last user message, or in a system message."""
    user_words_after: list[ScoreSign] = Field(default=[ScoreSign.NEGATIVE])
    """After which verdicts what the user wrote next counts as a hint. Thanks and new questions teach nothing. A judge's
    hints, and words of explicit feedback, always count."""
    max_candidates: int = Field(default=3, ge=1)
    """The optimal selections compare so many hints, the shortest ones."""
    overlap_k: int = Field(default=4, ge=1, le=1000)
    """The optimal selections count how many of the student's so many likeliest tokens are the teacher's too."""


class TeacherModelSettings(Section):
    """Who computes log-probs under the hinted prompt."""

    computed_by: Literal["engine", "trainer"] = "engine"
    """`engine`: the engines at `urls`. `trainer`: samples carry the hinted prompt, and the trainer's own frozen copy of
    the model is to compute the log-probs."""
    urls: list[str] = Field(default=[])
    """Base URLs of engines that serve the teacher; calls take turns and fail over."""
    directory: ModelDirectory | None = None
    """Folder with the teacher's tokenizer, when it is another model than the policy: it must share its vocabulary."""
    name: str = ""
    """Name and revision of the teacher, for the samples."""
    student_urls: list[str] = Field(default=[])
    """Engines that serve the policy: the student of the optimal selections and of `support_k`. Without them the
    teacher without a hint stands for it."""
    context_tokens: int = Field(default=4096, ge=2)
    """Longest hinted prompt with its response. Longer ones get no signal; a teacher that offers less is refused."""
    top_k: int = Field(default=0, ge=0, le=1000)
    """The teacher's likeliest tokens at every position that samples carry; 0 for none."""
    support_k: int = Field(default=0, ge=0, le=100)
    """Of so many of the student's likeliest tokens samples carry the teacher's log-probs; 0 for none."""
    call_timeout_seconds: float = Field(default=120.0, gt=0)
    """Deadline of one call."""
    max_timeouts: int = Field(default=3, ge=1)
    """So often may a score's calls time out; then it gets no signal, so that one score cannot hold its partition."""
    max_concurrent_scores: int = Field(default=16, ge=1)
    """Scores whose turns are at the engines at a time, in this process."""


class TeacherSettings(ServiceSettings):
    """The teacher."""

    mode: Mode = Mode.BINARY
    """Which components samples have."""
    model_path: ModelDirectory | None = None
    """Folder of the policy's model: its tokenizer renders hinted prompts as the gateway renders prompts. Needed unless
    the mode is binary."""
    renderer: str = "auto"
    """As the gateway's `renderer`."""
    hint: HintSettings = HintSettings()
    """Which hint, and how it is shown."""
    model: TeacherModelSettings = TeacherModelSettings()
    """The teacher model."""
    worker: WorkerSettings = WorkerSettings(deadline_seconds=900.0)
    """How many scores at once, and how long."""
    turn_cache_bytes: int = Field(default=64 * 1024 * 1024, ge=1)
    """Turns that were read ahead and may be asked for soon."""
    turn_timeout_seconds: float = Field(default=30.0, gt=0)
    """How long reading a turn may take before its score is put off."""

    @model_validator(mode="after")
    def _a_teacher_is_named_when_one_is_needed(self) -> "TeacherSettings":
        if self.mode is Mode.BINARY:
            return self
        problems: list[str] = []
        if self.model_path is None:
            problems.append("model_path: the folder of the policy's model, which renders hinted prompts")
        if self.model.computed_by == "engine" and not self.model.urls:
            problems.append("model.urls: at least one engine that serves the teacher")
        if self.model.computed_by == "trainer" and (
            self.hint.selection in ("token_optimal", "sequence_optimal") or self.model.top_k or self.model.support_k
        ):
            problems.append("model.computed_by = 'engine': optimal selections, top_k and support_k ask an engine")
        if problems:
            raise ValueError(f"mode {self.mode.value!r} needs " + "; ".join(problems))
        return self

    def provides(self) -> frozenset[Provision]:
        """The components of its samples. The trainer's own teacher finds the ids itself."""
        made: set[Provision] = set()
        if self.mode is not Mode.OPD:
            made.add(Provision.REWARD)
        if self.mode is not Mode.BINARY:
            made.add(Provision.TEACHER)
            if self.model.top_k or self.model.computed_by == "trainer":
                made.add(Provision.TEACHER_TOP)
            if self.model.support_k or self.model.computed_by == "trainer":
                made.add(Provision.STUDENT_TOP)
        return frozenset(made)

    def depends_on(self) -> list[Dependence]:
        """A trainer with the teacher that it leaves the log-probs to."""
        if self.mode is Mode.BINARY or self.model.computed_by != "trainer":
            return []
        return [
            Dependence(
                "trainer",
                Provision.OWN_TEACHER,
                "model.computed_by: 'trainer', but no trainer here has a teacher of its own: its samples would teach "
                "nothing; add the table [trainer.own_teacher], or let an engine compute it",
            )
        ]
