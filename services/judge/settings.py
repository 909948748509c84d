"""Settings of the judge: section `[judge]`."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, SecretStr, model_validator

from clawstream.errors import SettingsError
from clawstream.settings import ConfigPath, ModelDirectory, Section, ServiceSettings
from clawstream.worker.settings import WorkerSettings
from schemas.judge_spec import JudgeSpec
from services.judge.specs import DEFAULT_PROMPTS, completed


class JudgeModelSettings(Section):
    """How to reach the judge model. What it is asked is the spec's matter."""

    urls: list[str] = Field(default=[])
    """`sglang`, `likelihood`: base URLs of engines that serve the judge model; calls take turns and fail over.
    `openai`: one base URL, with its `/v1`."""
    directory: ModelDirectory | None = None
    """`sglang`, `likelihood`: folder with the judge model's tokenizer."""
    api_key_environment: str = ""
    """`openai`: name of the environment variable that holds the API key; empty for none."""
    api_key_file: ConfigPath | None = None
    """`openai`: file that holds the API key, instead."""
    call_timeout_seconds: float = Field(default=120.0, gt=0)
    """Deadline of one call."""
    call_attempts: int = Field(default=3, ge=1)
    """Calls per vote before the input is put off."""
    first_retry_seconds: float = Field(default=0.5, gt=0)
    """Longest pause before the second call; it doubles from call to call."""
    longest_retry_seconds: float = Field(default=10.0, gt=0)
    """Longest pause between two calls."""
    max_concurrent_calls: int = Field(default=64, ge=1)
    """Answers that this process waits for at once; a call for three counts as three."""
    several_answers_per_call: bool = True
    """`sglang`, `openai`: ask for the missing votes of an input in one call (`n`): the model reads the prompt once. An
    endpoint that refuses that, or gives one answer all the same, is found out and asked for one vote at a time, and for
    several again after ten minutes. False never asks for several: for such an endpoint when it is so slow that
    `worker.deadline_seconds` leaves no time for two calls, one after the other."""
    max_timeouts: int = Field(default=3, ge=1)
    """So often may all votes of an input time out; then they abstain, so that one input cannot hold its partition."""

    def lacks_for(self, backend: str) -> list[str]:
        """What this backend of a spec needs and is not configured, each as `field: what`."""
        problems: list[str] = []
        if backend in DEFAULT_PROMPTS and not self.urls:
            problems.append(f"model.urls: backend {backend!r} needs at least one")
        if backend == "openai" and len(self.urls) > 1:
            problems.append(f"model.urls: backend {backend!r} needs 1, has {len(self.urls)}")
        if backend in ("likelihood", "sglang") and self.directory is None:
            problems.append(f"model.directory: backend {backend!r} needs the model's tokenizer folder")
        return problems

    def api_key(self, environment: Mapping[str, str]) -> SecretStr | None:
        """The key, or None when none is configured. Raises SettingsError when it is configured and missing."""
        if self.api_key_environment:
            value = environment.get(self.api_key_environment, "").strip()
            if not value:
                raise SettingsError(f"judge.model.api_key_environment: {self.api_key_environment} is not set")
            return SecretStr(value)
        if self.api_key_file is not None:
            return SecretStr(_file_content(self.api_key_file))
        return None


class JudgeSettings(ServiceSettings):
    """The judge."""

    spec: JudgeSpec = JudgeSpec()
    """The judge spec that counts (with promotion epoch 0) until one is promoted on the `config` topic."""
    model: JudgeModelSettings = JudgeModelSettings()
    """How to reach the judge model."""
    worker: WorkerSettings = WorkerSettings(deadline_seconds=900.0)
    """How many next states at once, and how long. The deadline must leave time for every attempt to call the model;
    past it, votes that did not arrive abstain. Time in which a call waits for its turn (`model.max_concurrent_calls`)
    does not count: a slow model with a backlog makes scores late, not failed."""
    ledger_flush_timeout_seconds: float = Field(default=30.0, gt=0)
    """How long a ledger entry may take to reach the log before its input is put off."""

    def problems(self, environment: Mapping[str, str]) -> list[str]:
        """Also what the spec needs: its prompts, an API key, addresses, a tokenizer's folder."""
        found = super().problems(environment)
        try:
            self.model.api_key(environment)
        except SettingsError as error:
            found.append(str(error).removeprefix("judge."))
        try:
            completed(self.spec)
        except SettingsError as error:
            found.append(f"spec: {error}")
        return found + self.model.lacks_for(self.spec.backend)

    @model_validator(mode="after")
    def _deadline_is_longer_than_the_calls(self) -> "JudgeSettings":
        needed_seconds = self.model.call_attempts * (self.model.call_timeout_seconds + self.model.longest_retry_seconds)
        if self.worker.deadline_seconds < needed_seconds:
            raise ValueError(
                f"worker.deadline_seconds is {self.worker.deadline_seconds:.0f}, but {self.model.call_attempts} calls "
                f"with their pauses may take {needed_seconds:.0f} (model.call_attempts, call_timeout_seconds, "
                "longest_retry_seconds)"
            )
        return self


def _file_content(file: Path) -> str:
    try:
        value = file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise SettingsError(f"judge.model.api_key_file: {file}: {error.strerror}") from error
    if not value:
        raise SettingsError(f"judge.model.api_key_file: {file} is empty")
    return value
