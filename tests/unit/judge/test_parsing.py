"""The verdict in a judge's text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.judge.backends.interface import Abstention, Opinion
from services.judge.parsing import boxed_verdict


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (r"The user said thanks. \boxed{1}", 1),
        (r"\boxed{+1}", 1),
        (r"\boxed{ 1 }", 1),
        (r"\boxed {0}", 0),
        (r"\boxed{-1}", -1),
        ("\\boxed{\N{MINUS SIGN}1}", -1),
        (r"<think>First \boxed{1}, no: \boxed{0}...</think>So: \boxed{-1}", -1),
        (r"template opened the reasoning: \boxed{1}</think>\boxed{-1}", -1),
        (r"<think>a</think>\boxed{1}<think>\boxed{0}</think>\boxed{-1}", -1),
        (r"\boxed{1} as I said, \boxed{+1}.", 1),
        (r"It is not -1, it is good: $\boxed{1}$", 1),
    ],
)
def test_the_verdict_after_the_reasoning(text: str, verdict: int) -> None:
    assert boxed_verdict(text) == Opinion(verdict=verdict)


@pytest.mark.parametrize(
    ("text", "abstention"),
    [
        ("", Abstention.UNPARSABLE),
        ("1", Abstention.UNPARSABLE),
        ("The verdict is -1.", Abstention.UNPARSABLE),
        (r"\boxed{2}", Abstention.UNPARSABLE),
        (r"\boxed{}", Abstention.UNPARSABLE),
        (r"\boxed{1.0}", Abstention.UNPARSABLE),
        (r"\boxed{good}", Abstention.UNPARSABLE),
        (r"\boxed{1, -1}", Abstention.UNPARSABLE),
        (r"<think>\boxed{1}</think>I cannot say.", Abstention.UNPARSABLE),
        (r"<think>never ends \boxed{1}", Abstention.UNPARSABLE),
        (r"</think>done<think>again \boxed{1}", Abstention.UNPARSABLE),
        (r"\boxed{1} or \boxed{-1}", Abstention.TWO_VERDICTS),
        (r"They wrote \boxed{1}. I say \boxed{2}.", Abstention.TWO_VERDICTS),
    ],
)
def test_everything_else_abstains(text: str, abstention: Abstention) -> None:
    assert boxed_verdict(text) == Opinion(abstention=abstention)


@given(st.text(alphabet="<>/think\\boxed{}01-+ ", max_size=80))
def test_any_text_gives_an_opinion(text: str) -> None:
    opinion = boxed_verdict(text)
    assert opinion.verdict in (1, 0, -1, None)


@given(st.text(max_size=60), st.sampled_from([1, 0, -1]))
def test_reasoning_never_matters(reasoning: str, verdict: int) -> None:
    assert boxed_verdict(f"<think>{reasoning}</think>\\boxed{{{verdict}}}") == Opinion(verdict=verdict)
