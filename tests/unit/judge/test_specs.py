"""Judge specs: completed so that their hash says all, and the active one by the log."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from clawstream.bus.interface import Record
from clawstream.codec import encode
from clawstream.errors import SettingsError, UnusableJudgeSpec
from clawstream.log import get_logger
from clawstream.settings import load_settings
from schemas.events import ActiveJudgeSpecEvent
from schemas.judge_spec import JudgeSpec
from services.judge.active import ActiveJudges
from services.judge.backends.interface import Backend
from services.judge.backends.rules import RulesBackend
from services.judge.prompts import load_prompt
from services.judge.settings import JudgeSettings
from services.judge.specs import completed


def test_model_judges_get_the_prompts_checksum() -> None:
    spec = completed(JudgeSpec(backend="openai", model="m"))
    assert (spec.prompt, spec.prompt_sha256, spec.votes) == ("verdict-1", load_prompt("verdict-1").sha256, 3)
    assert spec.spec_hash != JudgeSpec(backend="openai", model="m").spec_hash
    assert completed(spec) == spec


@pytest.mark.parametrize("spec", [JudgeSpec(backend="rules"), JudgeSpec(backend="my.module:judge")])
def test_judges_without_a_model_have_one_vote_and_no_prompt(spec: JudgeSpec) -> None:
    whole = completed(spec.model_copy(update={"prompt": "verdict-1", "prompt_sha256": "x"}))
    assert (whole.votes, whole.prompt, whole.prompt_sha256) == (1, "", "")


def test_likelihood_has_one_vote() -> None:
    spec = completed(JudgeSpec(backend="likelihood", model="m"))
    assert (spec.votes, spec.prompt) == (1, "likelihood-1")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (JudgeSpec(backend="magic"), "none of rules, likelihood, sglang, openai, nor an import path"),
        (JudgeSpec(backend="openai"), "needs the name of its model"),
        (
            JudgeSpec(backend="openai", model="m", prompt="nosuch"),
            "does not exist; there are: hint-1, likelihood-1, verdict-1",
        ),
        (JudgeSpec(backend="openai", model="m", prompt_sha256="00" * 32), "another text of prompt 'verdict-1'"),
    ],
)
def test_a_spec_that_cannot_be_put_to_work_is_refused(spec: JudgeSpec, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        completed(spec)


@pytest.mark.parametrize("backend", ["sglang", "openai"])
def test_hint_votes_bring_their_prompt_and_its_checksum_into_the_hash(backend: str) -> None:
    without = completed(JudgeSpec(backend=backend, model="m", hints="user"))
    spec = completed(JudgeSpec(backend=backend, model="m", hints="both"))
    assert (without.hint_prompt, without.hint_prompt_sha256) == ("", "")
    assert (spec.hint_prompt, spec.hint_prompt_sha256) == ("hint-1", load_prompt("hint-1").sha256)
    assert completed(spec) == spec
    other_text = spec.model_copy(update={"hint_prompt_sha256": "00" * 32})
    assert other_text.spec_hash != spec.spec_hash
    with pytest.raises(SettingsError, match="another text of prompt 'hint-1'"):
        completed(other_text)


@pytest.mark.parametrize("backend", ["rules", "likelihood"])
def test_a_judge_that_writes_no_text_has_no_hint_votes(backend: str) -> None:
    with pytest.raises(SettingsError, match="needs a backend that writes text"):
        completed(JudgeSpec(backend=backend, model="m", hints="judge"))
    assert completed(JudgeSpec(backend=backend, model="m", hints="user")).hint_prompt == ""


def test_a_judge_of_your_own_may_bring_hints_and_has_no_hint_votes() -> None:
    spec = completed(JudgeSpec(backend="my.module:judge", hints="both"))
    assert (spec.judge_gives_hints, spec.hint_prompt) == (True, "")


def test_specs_of_before_hint_votes_keep_their_hash() -> None:
    """Scores, ledger entries and samples of old specs are found by it."""
    assert JudgeSpec().spec_hash == "671dce0b56252f75"
    assert completed(JudgeSpec(backend="openai", model="m")).spec_hash == "426e809d86d6e55d"
    assert JudgeSpec(hint_votes=5).spec_hash != JudgeSpec().spec_hash


def promotion(epoch: int, verdict: int, prompt: str = "") -> Record:
    spec = JudgeSpec(backend="rules", rules=[("x", verdict)])
    if prompt:
        spec = JudgeSpec(backend="openai", model="m", prompt=prompt)
    event = ActiveJudgeSpecEvent(
        spec=spec, spec_hash=spec.spec_hash, promotion_epoch=epoch, activated_at=datetime(2026, 1, 1, tzinfo=UTC)
    )
    out = encode(event, topic="clawstream.config.v1", key="active-judge-spec", event_id="e", source="cli")
    return Record(out.topic, 0, epoch, out.key, out.value, out.headers, 0)


class Made:
    """Makes rules backends and remembers for which specs."""

    def __init__(self) -> None:
        self.specs: list[JudgeSpec] = []

    def __call__(self, spec: JudgeSpec) -> Backend:
        self.specs.append(spec)
        return RulesBackend(spec.rules)


def test_the_settings_count_until_another_spec_is_promoted() -> None:
    made = Made()
    judges = ActiveJudges(JudgeSpec(), made, logger=get_logger())
    assert (judges.current.promotion_epoch, judges.current.spec) == (0, completed(JudgeSpec()))
    judges.apply(promotion(1, -1))
    assert judges.current.promotion_epoch == 1
    assert judges.current.spec.rules == [("x", -1)]
    judges.apply(promotion(3, 1))
    judges.apply(promotion(2, 0))
    judges.apply(Record("clawstream.config.v1", 0, 9, b"active-judge-spec", None, (), 0))
    assert judges.current.promotion_epoch == 3
    assert len(made.specs) == 3


def test_a_promoted_spec_that_cannot_be_put_to_work_is_an_error_and_not_ignored() -> None:
    judges = ActiveJudges(JudgeSpec(), Made(), logger=get_logger())
    with pytest.raises(UnusableJudgeSpec, match=r"epoch 1.*does not exist"):
        judges.apply(promotion(1, 0, prompt="nosuch"))
    assert judges.current.promotion_epoch == 0


def test_settings_of_the_judge_in_toml(tmp_path: Path) -> None:
    file = tmp_path / "clawstream.toml"
    file.write_text(
        '[judge]\nspec = { backend = "rules", rules = [["thanks", 1], ["no,", -1]] }\n'
        'model = { urls = ["http://127.0.0.1:1"], directory = "model", api_key_file = "key" }\n'
    )
    (tmp_path / "key").write_text(" sk-1 \n")
    settings = load_settings(JudgeSettings, section="judge", file=file, environment={})
    assert settings.spec.rules == [("thanks", 1), ("no,", -1)]
    assert settings.model.directory == tmp_path / "model"
    key = settings.model.api_key({})
    assert key is not None
    assert key.get_secret_value() == "sk-1"
    assert "sk-1" not in repr(settings) + repr(key)


def test_an_api_key_that_is_configured_and_missing_is_named(tmp_path: Path) -> None:
    settings = JudgeSettings(name="judge", model={"api_key_environment": "JUDGE_KEY"})  # type: ignore[arg-type] - parsed
    key = settings.model.api_key({"JUDGE_KEY": "sk-2"})
    assert key is not None
    assert key.get_secret_value() == "sk-2"
    with pytest.raises(SettingsError, match="JUDGE_KEY is not set"):
        settings.model.api_key({})
    missing = settings.model.model_copy(update={"api_key_environment": "", "api_key_file": tmp_path / "none"})
    with pytest.raises(SettingsError, match="No such file"):
        missing.api_key({})


def test_a_copy_of_a_spec_has_a_hash_of_its_own() -> None:
    spec = JudgeSpec(backend="openai", model="a")
    before = spec.spec_hash
    copied = spec.model_copy(update={"model": "b"})
    assert copied.spec_hash == JudgeSpec(backend="openai", model="b").spec_hash != before
    assert spec.spec_hash == before
    assert "spec_hash" not in spec.model_dump()
    assert JudgeSpec(backend="openai", model="a") == spec
