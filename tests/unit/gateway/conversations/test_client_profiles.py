"""Client profiles are data: every rule matches its examples, and what they cut is cut."""

from pathlib import Path

import pytest

from clawstream.errors import SettingsError
from schemas.events.base import Message
from services.gateway.client_profiles import Rule, RuleKind, load_profiles
from tests.fixtures.conversations import assistant, user

PROFILES = load_profiles()
CUTTING = (RuleKind.VOLATILE, RuleKind.ENVELOPE, RuleKind.WRAPPER, RuleKind.ANSWER_DIRECTIVE)
RULES = [pytest.param(rule, id=f"{profile.name}-{rule.name}") for profile in PROFILES for rule in profile.rules]


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_matches_its_examples(rule: Rule) -> None:
    for example in rule.examples:
        assert (rule.pattern.search if rule.kind in CUTTING else rule.pattern.match)(example), example


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("text", ["thanks", "no, that is wrong", "Read the file and reply OK", "[1, 2] and [3]", "yes"])
def test_no_rule_matches_what_people_say(rule: Rule, text: str) -> None:
    assert not (rule.pattern.search if rule.kind in CUTTING else rule.pattern.match)(text)


def test_recognition() -> None:
    plain: list[Message] = [user("hello")]
    carrier: list[Message] = [user("hello"), user("<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>x")]
    assert PROFILES.choose("OpenAI/JS 6", plain).name == "generic"
    assert PROFILES.choose("OpenAI/JS 6", carrier).name == "openclaw"
    assert PROFILES.choose("openclaw/2026.9.6", plain).name == "openclaw"
    quoted = [user("hello"), assistant("<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>"), user("what?")]
    assert PROFILES.choose("", quoted).name == "generic"
    assert PROFILES.named("gone").name == "generic"


def test_what_the_judge_sees_of_a_message() -> None:
    profile = PROFILES.named("openclaw")
    stamped = profile.view(user("[Sun 2026-11-29 15:01 UTC] hello\n\nRuntime: agent=a | session=b\n"))
    assert stamped.message == user("hello\n\n")
    assert stamped.text == "hello"
    parts: Message = {
        "role": "user",
        "content": [
            {"type": "text", "text": "[Sun 2026-11-29 15:01 UTC] look"},
            {"type": "image_url", "image_url": "x"},
        ],
    }
    view = profile.view(parts)
    assert view.message is not None
    assert view.message["content"] == [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": "x"}]
    untouched = user("just this")
    assert profile.view(untouched).message is untouched


@pytest.mark.parametrize("said", ["hello", "two\n\nparagraphs", "a\n\na"])
def test_a_retry_wrapper_leaves_the_words_once(said: str) -> None:
    profile = PROFILES.named("openclaw")
    marker = "[Queued user message from a previous active turn; preserved as context only. Continue below.]\n"
    stamp = "[Sun 2026-11-29 15:01 UTC] "
    assert profile.view(user(f"{marker}{stamp}{said}\n\n{stamp}{said}")).text == profile.view(user(stamp + said)).text
    different = profile.view(user(f"{marker}{said}\n\nand one more"))
    assert different.text == f"{said}\n\nand one more"


@pytest.mark.parametrize("said", ["hello", "two\n\nparagraphs", "Continue where you left off. Then stop."])
def test_a_retry_with_a_continuation_below_leaves_the_words(said: str) -> None:
    """As OpenClaw 2026.9.6 asks again after an answer was cut, once there were tool turns."""
    profile = PROFILES.named("openclaw")
    marker = "[Queued user message from a previous active turn; preserved as context only. Continue below.]\n"
    continuation = (
        "Continue the current task from the existing transcript, preserving completed work. If an action was "
        "interrupted, inspect its state before deciding whether to retry it. "
        "Do not restart the task or repeat completed actions."
    )
    stamp = "[Mon 2026-11-30 03:49 UTC] "
    for retry in (
        f"{marker}{said}",
        f"{stamp}{marker}{said}",
        f"{marker}{stamp}{said}",
        f"{stamp}{marker}{stamp}{said}",
    ):
        retried = profile.view(user(f"{retry}\n\n{continuation}"))
        assert retried.text == profile.view(user(said)).text
        assert retried.message is not None
        assert retried.message["content"] == said
        assert retried.is_evidence
    assert not profile.view(user(continuation)).is_evidence
    assert not profile.view(user(f"{stamp}{continuation}")).is_evidence


@pytest.mark.parametrize(
    "said",
    ["[[reply_to_current]] [[audio_as_voice]] hello", "hello [[reply_to: 12]]\n\n[[reply_to_current]]\n", "hello"],
)
def test_directives_are_cut_out_of_answers_also_side_by_side(said: str) -> None:
    assert PROFILES.named("openclaw").answer(assistant(said)).text == "hello"


PIECES = ["\n", " \n", "\n\n ", "[Sun 2026-11-29 15:01 UTC] ", "a\n", "[", "Continue the current task ", "[[reply_to:"]


@pytest.mark.parametrize("rule", RULES)
def test_the_work_of_a_rule_grows_with_the_text_and_not_with_its_square(rule: Rule) -> None:
    """A pasted log of 100 KB blank lines would stop every user for minutes: here the test would not end in time."""
    for piece in PIECES:
        for text in (piece * (100_000 // len(piece)), "x" + piece * (100_000 // len(piece)) + "x"):
            rule.pattern.sub("", text)
            rule.pattern.match(text)


def test_an_own_profile_replaces_a_shipped_one(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        'name = "generic"\ndescription = "mine"\nrules = []\n[recognise]\n', encoding="utf-8"
    )
    assert load_profiles(tmp_path).named("generic").rules == ()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("name = ", "not TOML"),
        ('name = "x"\ndescription = ""\nrules = []\nextends = "nobody"\n[recognise]\n', "unknown profile 'nobody'"),
        ('name = "x"\ndescription = ""\n[recognise]\n[[rules]]\nname = "r"\nkind = "volatil"\n', "rules.0.kind"),
        ('name = "x"\ndescription = ""\nrules = []\n[recognise]\nagents = []\n', "recognise.agents"),
        (
            'name="x"\ndescription=""\n[recognise]\n[[rules]]\nname="r"\nkind="notice"\npattern="("\nexamples=["a"]\n',
            "rules.0.pattern",
        ),
    ],
)
def test_a_wrong_profile_names_its_fault(tmp_path: Path, content: str, complaint: str) -> None:
    (tmp_path / "wrong.toml").write_text(content, encoding="utf-8")
    with pytest.raises(SettingsError, match=complaint):
        load_profiles(tmp_path)
