"""What a command says that was fenced by another command: a person started both, and can start it again."""

from collections.abc import Generator
from contextlib import contextmanager

from clawstream.errors import Fenced, Overtaken


@contextmanager
def telling_who_overtook(what: str, by: str, *, then: str) -> Generator[None]:
    """Around the transactions of a command. The words of a fenced client are for services, which are started twice.

    `what` was to be done, `by` whom it may have been overtaken, and what to do `then`. Raises Overtaken.
    """
    try:
        yield
    except Fenced as error:
        raise Overtaken(
            f"{what} was not finished: {by} began meanwhile and goes first, or the broker has waited too long for this "
            f"process. {then}"
        ) from error
