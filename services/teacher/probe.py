"""Whether an engine can be the teacher of this policy, found out before the first score is read."""

from collections.abc import Sequence
from typing import Final

from clawstream.engine.interface import EngineClient
from clawstream.errors import EngineProtocolError, EngineRejected, TeacherUnfit
from clawstream.rendering.interface import ChatRenderer

PROBE_TEXT: Final = (
    'The quick brown fox jumps over 13 lazy dogs, they said: "2 + 2 = 4!" '
    "Grüße aus Zürich. Привет, мир. 你好，世界。 こんにちは def f(x):\n    return x ** 2\n"
)
"""Words, numbers, code and scripts: two vocabularies that agree on all of it are hardly two."""


async def probe_teacher(engine: EngineClient, renderer: ChatRenderer, *, context_tokens: int) -> None:
    """Returns when `engine` may be asked. `renderer` is the policy's.

    Raises TeacherUnfit, which says what is wrong and what to do: no log-probs of prompt tokens, another vocabulary than
    the policy's, or a context shorter than `context_tokens`. Raises EngineUnavailable or EngineTimeout when nobody
    answers yet.
    """
    information = await engine.model_information()
    offered = information.max_context_tokens
    if offered is not None and offered < context_tokens:
        raise TeacherUnfit(
            f"teacher {engine.name} ({information.model_path}) offers {offered} tokens of context, but "
            f"teacher.model.context_tokens is {context_tokens}: serve it with a longer context or lower the setting"
        )
    token_ids = renderer.encode(PROBE_TEXT)
    try:
        scored = await engine.score(token_ids[:1], token_ids[1:])
        said = await engine.token_texts(token_ids)
    except (EngineRejected, EngineProtocolError) as error:
        raise TeacherUnfit(
            f"teacher {engine.name} ({information.model_path}) gives no log-probs of prompt tokens, or does not know "
            f"the policy's token ids: {error}"
        ) from error
    if max(scored.logprobs) > 1e-3:
        raise TeacherUnfit(f"teacher {engine.name}: a log-prob of {max(scored.logprobs)} nats is no log-prob")
    other = _first_difference(token_ids, said, renderer)
    if other is not None:
        index, ours, theirs = other
        raise TeacherUnfit(
            f"teacher {engine.name} ({information.model_path}) has another vocabulary than the policy: id "
            f"{token_ids[index]} is {ours!r} to the policy and {theirs!r} to the teacher. A teacher must share the "
            "policy's tokenizer"
        )


def same_vocabulary(policy: ChatRenderer, teacher: ChatRenderer) -> None:
    """Raises TeacherUnfit unless both have the same tokens under the same ids."""
    if policy.vocabulary_fingerprint != teacher.vocabulary_fingerprint:
        raise TeacherUnfit(
            f"the teacher's tokenizer (vocabulary {teacher.vocabulary_fingerprint[:12]}) is another than the policy's "
            f"({policy.vocabulary_fingerprint[:12]}): teacher.model.directory and teacher.model_path must share one"
        )


def _first_difference(
    token_ids: Sequence[int], said: Sequence[str | None], renderer: ChatRenderer
) -> tuple[int, str, str] | None:
    """Index, our text and theirs of the first id that means something else there. White space at the ends is ignored:
    tokenizers differ in what they strip when they decode one token alone."""
    for index, (token_id, theirs) in enumerate(zip(token_ids, said, strict=True)):
        ours = renderer.decode([token_id])
        if theirs is not None and theirs.strip() != ours.strip():
            return index, ours, theirs
    return None
