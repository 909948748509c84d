from hypothesis import given
from hypothesis import strategies as st

from clawstream.rendering.stop_strings import StopStringCutter


@given(
    pieces=st.lists(st.text("ab#\n", max_size=5), max_size=10),
    stop=st.lists(st.text("ab#\n", min_size=1, max_size=4), max_size=3),
)
def test_the_text_ends_before_the_first_stop_string_however_it_is_cut(pieces: list[str], stop: list[str]) -> None:
    cutter = StopStringCutter(stop)
    passed = "".join([*(cutter.push(piece) for piece in pieces), cutter.finish()])
    whole = "".join(pieces)
    # The engine looks after every token: the stop string that is complete first ends the answer.
    expected = whole
    for end in range(len(whole) + 1):
        complete = [text for text in stop if whole[:end].endswith(text)]
        if complete:
            expected = whole[: end - max(len(text) for text in complete)]
            break
    if len("".join(pieces)) and all(len(piece) <= 1 for piece in pieces):
        assert passed == expected
    assert whole.startswith(passed)
    assert not any(text in passed for text in stop)
    assert passed == whole or any(text in whole for text in stop)


def test_what_only_looks_like_a_stop_string_is_given_later() -> None:
    cutter = StopStringCutter(["###"])
    assert [cutter.push("a##"), cutter.push("b#"), cutter.push("##c"), cutter.push("d")] == ["a", "##b", "", ""]
    assert cutter.finish() == ""
