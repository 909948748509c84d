"""The homework scenario: every problem's answer is computed again, and the scoring knows good from bad."""

import ast
import json
import operator
from collections.abc import Callable
from pathlib import Path

import pytest

from clawstream.chat_client import ChatClient
from clawstream.errors import SettingsError
from examples.homework.__main__ import summarise
from examples.homework.problems import SHIPPED_FILE, Problem, last_number, load_problems, numbers
from examples.homework.scenario import THANKS, Assignment, Role, assignments, converse
from examples.homework.scoring import score_grading, score_homework
from tests.fixtures.gateway_app import GatewayUnderTest
from tests.fixtures.stub_engine import StubAnswer

ENTRIES = [json.loads(line) for line in SHIPPED_FILE.read_text().splitlines()]
PROBLEMS = load_problems()
OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def evaluated(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    assert isinstance(node, ast.BinOp)
    return OPERATORS[type(node.op)](evaluated(node.left), evaluated(node.right))


@pytest.mark.parametrize(("entry", "problem"), zip(ENTRIES, PROBLEMS, strict=True), ids=range(len(ENTRIES)))
def test_the_answer_is_what_the_expression_gives(entry: dict[str, str], problem: Problem) -> None:
    assert evaluated(ast.parse(entry["expression"], mode="eval").body) == problem.answer
    assert last_number(problem.solution) is not None
    assert problem.answer in numbers(problem.solution)
    assert problem.flawed_answer != problem.answer
    assert problem.flawed_step in problem.flawed_solution
    assert "####" not in problem.solution + problem.flawed_solution


@pytest.mark.parametrize("problem", PROBLEMS, ids=range(len(PROBLEMS)))
def test_a_good_answer_gets_full_marks_and_a_bad_one_none(problem: Problem) -> None:
    good = score_homework(problem, f"I worked it out and I got {problem.answer:g}.", True)
    assert (good.correct, good.style_faults) == (True, ())
    bad = score_homework(problem, f"Certainly! **Step 1**\n- thus {problem.flawed_answer:g}", True)
    assert not bad.correct
    assert len(bad.style_faults) == 3
    telling = min(numbers(problem.solution) - numbers(problem.question))
    kind = score_grading(problem, True, f"Good start! There is a mistake: you should have got {telling:g}.", True)
    assert (kind.correct, kind.style_faults) == (True, ())
    praise = score_grading(problem, False, f"Great work, {problem.answer:g} is correct!", True)
    assert (praise.correct, praise.style_faults) == (True, ())
    blind = score_grading(problem, True, "Correct.", True)
    assert not blind.correct
    assert len(blind.style_faults) == 2
    assert not score_grading(problem, False, "Good try, but this is not quite right.", True).correct


def test_details_of_the_scores() -> None:
    problem = PROBLEMS[0]
    assert score_homework(problem, "I got 1,033", True).correct is False
    assert score_homework(problem, "I had 42 and now I have 33", True).correct
    assert "too long" in score_homework(problem, "I " * 81 + "33", True).style_faults[0]
    assert "too long" in score_homework(problem, "I got 33", False).style_faults[0]
    assert not score_homework(problem, "", True).correct
    assert last_number("It is 1,250.50 in all") == 1250.5
    assert last_number("none") is None


def test_a_public_file_loads_by_its_usual_fields(tmp_path: Path) -> None:
    public = {"question": "2 and 3?", "answer": "It is 2+3=<<2+3=5>>5.\n#### 1,005"}
    (tmp_path / "test.jsonl").write_text(json.dumps(public) + "\n\n" + json.dumps(public) + "\n")
    first, second = load_problems(tmp_path / "test.jsonl")
    assert first == second
    assert (first.solution, first.answer) == ("It is 2+3=5.", 1005.0)
    assert (first.flawed_answer, first.flawed_step) == (1006.0, "1006")
    assert len(load_problems(tmp_path / "test.jsonl", limit=1)) == 1
    (tmp_path / "bad.jsonl").write_text(json.dumps(public) + '\n{"question": "x", "answer": "7"}\n')
    with pytest.raises(SettingsError, match=r"bad.jsonl:2: .*####"):
        load_problems(tmp_path / "bad.jsonl")


def test_the_teacher_grades_right_and_flawed_work() -> None:
    planned = assignments(PROBLEMS, list(Role))
    assert len(planned) == 2 * len(PROBLEMS)
    graded = [one for one in planned if one.role is Role.TEACHER]
    assert {one.is_flawed for one in graded} == {True, False}
    assert all((one.problem.flawed_solution in one.request) is one.is_flawed for one in graded)


async def test_a_student_complains_until_content(gateway: GatewayUnderTest) -> None:
    for text in ("Thus the answer is 33.", "I got 33.", "ok"):
        ids = [*gateway.renderer.encode(text), gateway.renderer.stop_token_ids[0]]
        gateway.engine.enqueue(StubAnswer(token_ids=ids, finish={"type": "stop", "matched": ids[-1]}))
    assignment = Assignment(Role.STUDENT, PROBLEMS[0])
    async with ChatClient(f"{gateway.base_url}/v1", api_key="k", model="policy", patience_seconds=0) as client:
        result = await converse(
            client,
            assignment,
            max_turns=4,
            max_tokens=64,
            temperature=1.0,
            seed=1,
            measure_only=False,
        )
    assert result.answers == ["Thus the answer is 33.", "I got 33."]
    assert (result.first.correct, result.first.in_style, result.content) == (True, False, True)
    said = [list(request.messages)[-1]["content"] for request in gateway.conversations.placed]
    assert said[1:] == ["That sounds like a robot. It has to sound like me.", THANKS]
    assert [request.session_done for request in gateway.conversations.placed] == [False, False, True]
    summary = summarise([result], seed=1)
    estimate = summary[Role.STUDENT]["first answer in style"]
    assert estimate is not None
    assert estimate.mean == 0.0
    assert Role.TEACHER not in summary
