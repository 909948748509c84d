"""Judges that are code."""

import pytest

from clawstream.errors import SettingsError
from schemas.events import NextStateEvent
from services.judge.backends.imported import import_judge
from services.judge.backends.interface import Abstention, Opinion
from services.judge.backends.rules import RulesBackend, last_exit_code
from tests.unit.judge.examples import next_state, reply, tool_results

RULES = [(r"(?i)\bno\b|too long", -1), (r"(?i)\bthanks?\b", 1), (r"\?$", 0)]


@pytest.mark.parametrize(
    ("text", "verdict"),
    [("Thanks, exactly.", 1), ("TOO LONG, thanks", -1), ("And of New Zealand?", 0), ("no", -1)],
)
async def test_the_first_rule_that_matches_decides(text: str, verdict: int) -> None:
    assert await RulesBackend(RULES).judge(reply(text)) == Opinion(verdict=verdict)


async def test_without_a_match_the_rules_abstain() -> None:
    assert await RulesBackend(RULES).judge(reply("Hm.")) == Opinion(abstention=Abstention.NO_RULE)


async def test_rules_read_what_the_user_wrote_and_not_tool_output() -> None:
    assert await RulesBackend(RULES).judge(tool_results("thanks")) == Opinion(abstention=Abstention.NO_RULE)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("2 failed\n[exit code 1]", 1),
        ("ok\nexit code: 0", 0),
        ("Process exited with status 127", 127),
        ("exit_code=-9", -9),
        ("exit codes are explained in chapter 3", None),
        ("exit code 1\nretried\nexit code 0", 0),
        ("", None),
    ],
)
async def test_exit_codes_of_tools(text: str, code: int | None) -> None:
    state = tool_results("exit code 5", text) if code is not None else tool_results(text)
    assert last_exit_code(state.following_messages) == code
    expected = Opinion(abstention=Abstention.NO_RULE) if code is None else Opinion(verdict=1 if code == 0 else -1)
    assert await RulesBackend([]).judge(state) == expected


async def test_what_the_user_says_outranks_an_exit_code() -> None:
    state = next_state(
        kind="tool_result",
        following_messages=[{"role": "tool", "content": "exit code 0"}, {"role": "user", "content": "No."}],
    )
    assert await RulesBackend(RULES).judge(state) == Opinion(verdict=-1)


def test_every_wrong_rule_is_named_at_once() -> None:
    with pytest.raises(SettingsError, match=r"(?s)'\('.*'x'.*not 2"):
        RulesBackend([("(", 1), ("x", 2), ("fine", 1)])


def judge_of_ours(state: NextStateEvent) -> int | None:
    return {"good": 1, "bad": -1}.get(str(state.following_messages[0]["content"]))


async def async_judge_of_ours(state: NextStateEvent) -> int | None:
    return judge_of_ours(state)


def broken_judge(state: NextStateEvent) -> int | None:
    return 7


@pytest.mark.parametrize("name", ["judge_of_ours", "async_judge_of_ours"])
async def test_a_judge_of_your_own_by_import_path(name: str) -> None:
    backend = import_judge(f"{__name__}:{name}")
    assert await backend.judge(reply("good")) == Opinion(verdict=1)
    assert await backend.judge(reply("bad")) == Opinion(verdict=-1)
    assert await backend.judge(reply("neither")) == Opinion(abstention=Abstention.NO_RULE)


async def test_a_verdict_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="returned 7"):
        await import_judge(f"{__name__}:broken_judge").judge(reply("good"))


@pytest.mark.parametrize("path", ["nosuch.module:name", f"{__name__}:nosuch", f"{__name__}:RULES"])
def test_an_import_path_without_a_function_is_a_settings_error(path: str) -> None:
    with pytest.raises(SettingsError, match="judge backend"):
        import_judge(path)
