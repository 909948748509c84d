"""A judge of one's own that is always content: what is left of a replay when judging costs nothing.

Asynchronous, so that it needs no thread.
"""

from schemas.events import NextStateEvent


async def judge(_: NextStateEvent) -> int:
    """The verdict."""
    return 1
