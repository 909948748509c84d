"""Token ids that an engine is never sent: pure.

SGLang 0.5.23 dies of an id beyond its vocabulary, and takes every answer that runs with it: the embedding of such an id
is read past its end, on a GPU as a device-side assertion that only a new process recovers from.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from clawstream.errors import TokenIdRefused


def check_token_ids(body: Mapping[str, Any], *, vocabulary_size: int | None, engine: str) -> None:
    """Looks at every id in the body of a `/generate` call: prompt, given ids, stop ids and biases.

    Without a known size only negative ids are found. Raises TokenIdRefused, which names the field and the id.
    """
    sampling = cast("Mapping[str, Any]", body.get("sampling_params") or {})
    fields: dict[str, Sequence[int]] = {
        "input_ids": body.get("input_ids") or (),
        "token_ids_logprob": body.get("token_ids_logprob") or (),
        "sampling_params.stop_token_ids": sampling.get("stop_token_ids") or (),
        "sampling_params.logit_bias": _keys(sampling.get("logit_bias") or {}, engine),
    }
    for name, token_ids in fields.items():
        if not token_ids:
            continue
        # Two passes in C: prompts have tens of thousands of ids.
        wrong = min(token_ids)
        if wrong >= 0 and (vocabulary_size is None or (wrong := max(token_ids)) < vocabulary_size):
            continue
        limit = "" if vocabulary_size is None else f"; the model's vocabulary is [0, {vocabulary_size})"
        raise TokenIdRefused(
            f"engine {engine}: {name}[{list(token_ids).index(wrong)}] is {wrong}, which is no token{limit}. "
            "It was not sent, because it would end the engine",
        )


def _keys(logit_bias: Mapping[str, Any], engine: str) -> list[int]:
    return [_token_id(key, engine) for key in cast("Iterable[object]", logit_bias)]


def _token_id(key: object, engine: str) -> int:
    text = str(key)
    if not (text.isascii() and text.removeprefix("-").isdecimal()):
        raise TokenIdRefused(f"engine {engine}: sampling_params.logit_bias has the key {text[:40]!r}, no token id")
    return int(text)
