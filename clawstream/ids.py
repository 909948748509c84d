"""Identities. A turn's id is minted once at the gateway; every id downstream follows from its causes.

Because an id is a function of what caused it (uuid5, RFC 9562 section 5.5), a redelivered record
gives the same id again and can be recognised. Fields are joined with a byte that no field can hold.
"""

import hashlib
import uuid
from collections.abc import Callable
from typing import Final

NAMESPACE = uuid.UUID("6f1d6f0e-6d0b-5f4e-9a5e-0f6b6a7c1a57")
"""The namespace of all derived ids. Never changes: every id on every log depends on it."""
_NAMESPACE_BYTES: Final = NAMESPACE.bytes

IdSource = Callable[[], uuid.UUID]
"""Where fresh (not derived) ids come from: `uuid.uuid4` in production, a counter in tests."""


def derive(kind: str, *causes: str | int) -> str:
    """The id of the thing of this `kind` that follows from `causes`, in order."""
    # As str(uuid.uuid5(NAMESPACE, name)), in a fourth of its time: a judged turn derives five.
    name = "\x1f".join((kind, *map(str, causes)))
    digest = hashlib.sha1(_NAMESPACE_BYTES + name.encode(), usedforsecurity=False).hexdigest()
    variant = "89ab"[int(digest[16], 16) & 3]
    return f"{digest[:8]}-{digest[8:12]}-5{digest[13:16]}-{variant}{digest[17:20]}-{digest[20:32]}"


def next_state_id(turn_id: str, cause: str) -> str:
    """`cause` names what made it: a key of the messages that followed, a feedback id, or `session_end`.

    The messages and not the request that brought them: a client that repeats its request repeats the same evidence.
    """
    return derive("next-state", turn_id, cause)


def score_id(next_state_id: str, judge_spec_hash: str) -> str:
    """One score per next state and judge spec."""
    return derive("score", next_state_id, judge_spec_hash)


def call_id(next_state_id: str, judge_spec_hash: str, purpose: str, vote: int) -> str:
    """One ledger entry per next state, judge spec, purpose (`verdict` or `hint`) and vote number."""
    return derive("llm-call", next_state_id, judge_spec_hash, purpose, vote)


def sample_id(turn_id: str, score_id: str) -> str:
    """One sample per turn and score; its key on the log is the turn id, so that a later one replaces it."""
    return derive("sample", turn_id, score_id)


def train_step_id(lineage: str, step: int) -> str:
    """One training step per lineage and step number."""
    return derive("train-step", lineage, step)
