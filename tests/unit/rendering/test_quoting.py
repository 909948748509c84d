"""Text of other people cannot end its own message, and stays legible: the rules one by one, as plainly as possible."""

from hypothesis import given
from hypothesis import strategies as st

from clawstream.rendering.quoting import without_special_tokens

PIECES = ["<", ">", "|", "\uff5c", "[", "/", "think", "Tool", "START_OF", "end_of", "s>", "BOS>", "eos>", "INST", "sys"]
AFTER_LESS = ("|", "/", "\uff5c", "think", "tool", "start_of", "end_of", "s>", "bos>", "eos>")
AFTER_BRACKET = ("inst", "sys", "tool", "/inst", "/sys", "/tool")


def by_hand(text: str) -> str:
    """Character by character."""
    found: list[str] = []
    for position, character in enumerate(text):
        rest = text[position + 1 :].lower()
        if character == ">" and position > 0 and text[position - 1] in "|\uff5c":
            found.append(" >")
        elif (character == "<" and rest.startswith(AFTER_LESS)) or (
            character == "[" and rest.startswith(AFTER_BRACKET)
        ):
            found.append(f"{character} ")
        else:
            found.append(character)
    return "".join(found)


@given(st.lists(st.sampled_from([*PIECES, "a", " ", "\n"]), max_size=12).map("".join))
def test_exactly_what_looks_like_a_special_token_is_broken_up(text: str) -> None:
    assert without_special_tokens(text) == by_hand(text)


def test_special_tokens_of_several_families() -> None:
    text = "<|im_start|> </think> <start_of_turn> </s> [INST] [/TOOL_CALLS] <\uff5cUser\uff5c> a<b [0] x > y"
    broken = without_special_tokens(text)
    assert broken == (
        "< |im_start| > < /think> < start_of_turn> < /s> [ INST] [ /TOOL_CALLS] < \uff5cUser\uff5c > a<b [0] x > y"
    )
