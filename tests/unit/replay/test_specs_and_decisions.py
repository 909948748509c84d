"""Which spec is meant, and which counts."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from clawstream import topics
from clawstream.bus.memory import MemoryBus
from clawstream.errors import SettingsError
from clawstream.log import get_logger
from schemas.judge_spec import JudgeSpec
from services.judge.active import ActiveJudges
from services.judge.backends.rules import RulesBackend
from services.judge.chosen_spec import chosen_spec
from services.judge.promotion.decisions import Decisions, decide, read_decisions
from services.judge.prompts import load_prompt
from services.judge.specs import completed
from tests.fixtures.buses import read_all
from tests.fixtures.judged_log import JudgedLog

NOW = datetime(2026, 3, 1, tzinfo=UTC)
DEFAULT = completed(JudgeSpec(backend="rules", rules=[("thanks", 1)]))
OTHER = completed(JudgeSpec(backend="rules", rules=[("thanks", -1)]))


@pytest.fixture
def log() -> JudgedLog:
    made = JudgedLog(MemoryBus(), "test")
    made.create_topics()
    return made


def promote(log: JudgedLog, spec: JudgeSpec) -> tuple[Decisions, bool]:
    return decide(log.bus, "test", DEFAULT, lambda _: spec, reason="r", now=NOW, source="tests")


def test_changes_are_laid_over_and_the_prompt_gets_the_checksum_of_its_text(tmp_path: Path) -> None:
    spec = chosen_spec(DEFAULT, None, ['backend="openai"', "model=judge-7b", "votes=5"])
    assert (spec.backend, spec.model, spec.votes, spec.prompt) == ("openai", "judge-7b", 5, "verdict-1")
    assert spec.prompt_sha256 == load_prompt("verdict-1").sha256
    more = chosen_spec(spec, None, ["votes=7"])
    assert (more.votes, more.model) == (7, "judge-7b")
    file = tmp_path / "spec.toml"
    file.write_text('backend = "likelihood"\nmodel = "small"\n')
    assert chosen_spec(spec, file, ["temperature=0"]).prompt == "likelihood-1"
    back = chosen_spec(spec, None, ["backend=rules"])
    assert (back.prompt, back.prompt_sha256, back.votes) == ("", "", 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["votes"], "no change"),
        (["vote=3"], "not a judge spec: vote"),
        (["votes=0"], "votes"),
        (["backend=openai", "model=m", "prompt=nope"], "prompt 'nope' does not exist"),
        (["backend=guess"], "none of"),
        (["backend=openai"], "name of its model"),
    ],
)
def test_what_is_no_spec_is_refused(changes: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        chosen_spec(DEFAULT, None, changes)


def test_promotion_is_idempotent_and_a_rollback_has_a_new_epoch(log: JudgedLog) -> None:
    assert read_decisions(log.bus, "test", DEFAULT).spec == DEFAULT
    with pytest.raises(SettingsError, match="nothing to go back to"):
        read_decisions(log.bus, "test", DEFAULT).before()
    decisions, is_new = promote(log, OTHER)
    assert (decisions.epoch, is_new) == (1, True)
    decisions, is_new = promote(log, OTHER)
    assert (decisions.epoch, is_new) == (1, False)
    assert len(read_all(log.bus, log.topic(topics.CONFIG))) == 1
    assert decisions.before() == 0
    decisions, is_new = promote(log, decisions.spec_of(decisions.before()))
    assert (decisions.epoch, is_new, decisions.spec, decisions.before()) == (2, True, DEFAULT, 1)
    with pytest.raises(SettingsError, match="no promotion epoch 7"):
        decisions.spec_of(7)


def test_the_judge_follows_what_was_decided_and_compaction_keeps_every_decision(log: JudgedLog) -> None:
    promote(log, OTHER)
    promote(log, DEFAULT)
    records = read_all(log.bus, log.topic(topics.CONFIG))
    assert len({record.key for record in records}) == 2
    judges = ActiveJudges(DEFAULT, lambda spec: RulesBackend(spec.rules), logger=get_logger())
    seen = []
    for record in records:
        judges.apply(record)
        seen.append((judges.current.promotion_epoch, judges.current.spec))
    assert seen == [(1, OTHER), (2, DEFAULT)]
