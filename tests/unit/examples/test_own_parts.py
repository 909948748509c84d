"""The examples of parts of your own do what they say, loaded as the services load them."""

import pytest

from schemas.events.score import Hint
from schemas.judge_spec import JudgeSpec
from services.judge.backends.imported import import_judge
from services.judge.specs import completed
from services.teacher.selection import text_selector
from tests.fixtures.judged_log import turn_event
from tests.unit.judge.examples import reply, tool_results

PASSED = "collected 3 items\n3 passed in 0.12s"
FAILED = "FAILED tests/test_sum.py::test_empty - assert 1 == 0\n1 failed, 2 passed in 0.20s"


@pytest.mark.parametrize(
    ("text", "verdict"),
    [(PASSED, 1), (FAILED, -1), (f"{FAILED}\n{PASSED}", 1), (f"{PASSED}\n{FAILED}", -1), ("no tests ran", None)],
)
async def test_the_example_judge_believes_the_last_test_run(text: str, verdict: int | None) -> None:
    spec = completed(JudgeSpec(backend="examples.own_parts.judge:judge_test_run", hints="judge"))
    opinion = await import_judge(spec.backend).judge(tool_results(text))
    assert opinion.verdict == verdict
    if verdict == -1:
        assert opinion.hints == (
            "The test tests/test_sum.py::test_empty must pass; before, it failed with: assert 1 == 0",
        )


async def test_the_example_judge_does_not_judge_what_people_say() -> None:
    opinion = await import_judge("examples.own_parts.judge:judge_test_run").judge(reply("3 passed in 0.12s"))
    assert opinion.verdict is None


async def test_the_example_selector_takes_what_has_to_do_with_the_request() -> None:
    select = text_selector("examples.own_parts.hint_selector:closest_to_the_request")
    turn = turn_event(
        1,
        request_messages=[{"role": "user", "content": "Name the capital of Australia"}],
        response_message={"role": "assistant", "content": "Sydney"},
    )
    near, far = Hint(text="The capital is not the largest city.", source="judge"), Hint(text="Be brief.", source="user")
    telling = Hint(text="Do not say Sydney, the capital of Australia is another.", source="judge")
    assert await select([far, near, telling], turn) == near
    assert await select([telling], turn) is None
