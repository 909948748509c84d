"""Text of other people inside a prompt: it may say anything, but it cannot end its own message."""

import re
from typing import Final

# The three characters come first, what must stand around them second: so the search skips all other text at once. With
# one alternative for each it tried all of them at every character, and that was a fifth of a judge's time.
_SPECIAL_TOKEN: Final = re.compile(
    r"[<>\[](?:"
    r"(?<=<)(?=[|/\uff5c]|think|tool|start_of|end_of|s>|bos>|eos>)"  # <|im_start|>, </think>, <start_of_turn>
    r"|(?<=[|\uff5c]>)"
    r"|(?<=\[)(?=/?(?:INST|SYS|TOOL|SYSTEM))"  # [INST], [/INST], [TOOL_CALLS]
    r")",
    re.IGNORECASE,
)


def without_special_tokens(text: str) -> str:
    """`text` with a space in everything that a tokenizer or a chat template could take for a token of its own.

    Tokenizers read `<|im_end|>` inside a message as the end of that message. The space keeps the text legible.
    """
    return _SPECIAL_TOKEN.sub(lambda match: " >" if match[0] == ">" else f"{match[0]} ", text)
