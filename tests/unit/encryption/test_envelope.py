"""Content fields in, ciphertext out, and back; anything else is refused without a word of what was in it."""

import os
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.encryption.envelope import associated_data, decrypt, encrypt
from clawstream.errors import DecodeError
from schemas.events import EVENT_MODELS
from schemas.json_schema import short_name

KEY, OTHER_KEY, NONCE, BOUND = b"k" * 32, b"o" * 32, b"n" * 12, b"bound"
EXAMPLES = Path(__file__).parents[3] / "schemas" / "examples"
WITH_CONTENT = {short_name(model): model for model in EVENT_MODELS.values() if model.content_fields}
FILES = [
    file
    for name in WITH_CONTENT
    for file in sorted((EXAMPLES / name).glob("*/*.json"))
    if not file.name.startswith("invalid-")
]

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.text()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
documents = st.dictionaries(st.text(min_size=1).filter(lambda name: name != "encrypted"), json_values, max_size=6)


@given(documents, st.data())
def test_what_is_encrypted_comes_back_the_same(document: dict[str, Any], data: st.DataObject) -> None:
    content = data.draw(st.frozensets(st.sampled_from([*document, "absent"])))
    value = encrypt(document, content, KEY, bound=BOUND, nonce=os.urandom(12))
    assert {name for name in orjson.loads(value) if name != "encrypted"} == set(document) - content
    assert orjson.loads(decrypt(value, KEY, bound=BOUND, where="here")) == orjson.loads(orjson.dumps(document))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(EXAMPLES)))
def test_no_string_of_an_examples_content_is_left_in_its_value(file: Path) -> None:
    model = WITH_CONTENT[file.relative_to(EXAMPLES).parts[0]]
    document = model.model_validate_json(file.read_bytes()).model_dump(mode="json")
    value = encrypt(document, model.content_fields, KEY, bound=BOUND, nonce=NONCE)
    texts = {text for name in model.content_fields for text in _texts(document.get(name)) if len(text) > 8}
    readable = orjson.dumps({name: each for name, each in document.items() if name not in model.content_fields})
    blobs = {text for text in texts if text.startswith("file:") or len(text) == 64}
    assert [text for text in texts - blobs if text.encode() in value and text.encode() not in readable] == []
    opened = decrypt(value, KEY, bound=BOUND, where="here")
    assert model.model_validate_json(opened) == model.model_validate(document)


def _texts(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for each in value.values() for text in _texts(each)]
    if isinstance(value, list):
        return [text for each in value for text in _texts(each)]
    return []


def test_blobs_of_the_content_are_listed_beside_it_without_their_keys() -> None:
    blob = {"uri": "file:///b/x", "sha256": "a" * 64, "size_bytes": 40, "encryption_key": "c2VjcmV0IGtleQ=="}
    document = {"session_id": "s", "prompt_ids": {"dtype": "uint8", "shape": [12], "data": None, "blob": blob}}
    value = encrypt(document, frozenset({"prompt_ids"}), KEY, bound=BOUND, nonce=NONCE)
    del blob["encryption_key"]
    assert orjson.loads(value)["encrypted"]["blobs"] == [blob]
    assert b"c2VjcmV0IGtleQ" not in value


VALUE = encrypt({"a": 1, "secret": "words"}, frozenset({"secret"}), KEY, bound=BOUND, nonce=NONCE)


@pytest.mark.parametrize(
    ("value", "key", "bound", "message"),
    [
        (VALUE, OTHER_KEY, BOUND, "damaged, or belongs to another"),
        (VALUE, KEY, b"another record", "damaged, or belongs to another"),
        (VALUE.replace(b'"data":"', b'"data":"AAAA'), KEY, BOUND, "damaged, or belongs to another"),
        (VALUE.replace(b"zstd+A256GCM", b"newer"), KEY, BOUND, "newer clawstream"),
        (b"{}", KEY, BOUND, "no encrypted event"),
        (b"[1]", KEY, BOUND, "not a JSON object"),
        (b"words", KEY, BOUND, "no encrypted event"),
        (b'{"encrypted":{"algorithm":"zstd+A256GCM","data":"words"}}', KEY, BOUND, "no encrypted event"),
    ],
)
def test_anything_else_is_a_decode_error_that_quotes_nothing(
    value: bytes, key: bytes, bound: bytes, message: str
) -> None:
    with pytest.raises(DecodeError, match=message) as caught:
        decrypt(value, key, bound=bound, where="topic[0]@1")
    assert "topic[0]@1" in str(caught.value)
    assert "words" not in str(caught.value)


def test_a_value_is_bound_to_event_record_key_and_encryption_key() -> None:
    headers = (("ce_type", b"clawstream.turn"), ("ce_id", b"turn-1"), ("ce_source", b"gateway/a"))
    bound = associated_data(headers, b"session", "key")
    assert bound == associated_data((*headers, ("dlq.topic", b"x")), b"session", "key"), "also as a dead letter"
    others = [
        associated_data((("ce_type", b"clawstream.sample"), *headers[1:]), b"session", "key"),
        associated_data((headers[0], ("ce_id", b"turn-2")), b"session", "key"),
        associated_data(headers, b"another", "key"),
        associated_data(headers, None, "key"),
        associated_data(headers, b"session", "key-2"),
    ]
    assert bound not in others
    assert len(set(others)) == len(others)
