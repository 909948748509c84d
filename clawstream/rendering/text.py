"""Text that UTF-8 can hold."""

import re
from typing import cast

from pydantic import JsonValue

_LONE_SURROGATES = re.compile("[\ud800-\udfff]")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def replace_lone_surrogates(text: str) -> str:
    """`text` with every half of a surrogate pair (clients cut emoji in two) replaced by U+FFFD.

    Python's strings hold no whole pairs: JSON's `\\ud83d\\ude00` was joined when it was read.
    """
    return _LONE_SURROGATES.sub(REPLACEMENT, text)


def replace_lone_surrogates_in(value: JsonValue) -> JsonValue:
    """The same for every string, keys too, of a JSON value."""
    if isinstance(value, str):
        return replace_lone_surrogates(value)
    if isinstance(value, list):
        return [replace_lone_surrogates_in(item) for item in value]
    if isinstance(value, dict):
        items = cast("dict[str, JsonValue]", value).items()
        return {replace_lone_surrogates(key): replace_lone_surrogates_in(item) for key, item in items}
    return value
