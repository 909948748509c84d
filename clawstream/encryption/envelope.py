"""An event's value with its content fields encrypted, and back. Pure.

AES-256-GCM (NIST SP 800-38D) with random nonces of 96 bits: far below 2**32 records of one key, as that standard asks.
Compressed first: nothing compresses what is encrypted.
"""

import base64
import binascii
from collections.abc import Iterator
from typing import Any, Final, cast

import orjson
import zstandard
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from pydantic import ValidationError

from clawstream.bus.interface import Headers
from clawstream.errors import DecodeError
from schemas.arrays import BlobReference
from schemas.encrypted_content import EncryptedContent

KEY_HEADER: Final = "encryption-key"
"""Header of a record whose content is encrypted: the id of the key."""
KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
_ALGORITHM: Final = "zstd+A256GCM"
_FIELD: Final = "encrypted"
_MAX_CONTENT_BYTES: Final = 256 * 1024 * 1024


def associated_data(headers: Headers, key: bytes | None, key_id: str) -> bytes:
    """What an encrypted value is bound to: it cannot be taken for another event's, nor moved to another key.

    The event's type and not its topic: a dead letter and a restored archive hold the same bytes elsewhere.
    """
    found = dict(headers)
    return b"\x1f".join((found.get("ce_type", b""), found.get("ce_id", b""), key or b"", key_id.encode()))


def encrypt(
    document: dict[str, Any], content_fields: frozenset[str], key: bytes, *, bound: bytes, nonce: bytes
) -> bytes:
    """The value in which `content_fields` of `document` are encrypted. `bound` is the associated data."""
    content = orjson.dumps({name: value for name, value in document.items() if name in content_fields})
    sealed = nonce + AESGCM(key).encrypt(nonce, zstandard.ZstdCompressor().compress(content), bound)
    # Most content names no blob: looking for the word is faster than walking through it.
    blobs = list(_blobs_in(orjson.loads(content))) if b'"sha256"' in content else []
    readable = {name: value for name, value in document.items() if name not in content_fields}
    readable[_FIELD] = {
        "algorithm": _ALGORITHM,
        "data": base64.b64encode(sealed).decode(),
        "blobs": [blob.model_dump(exclude={"encryption_key"}) for blob in blobs],
    }
    return orjson.dumps(readable)


def decrypt(value: bytes, key: bytes, *, bound: bytes, where: str) -> bytes:
    """The value as it was before `encrypt`. Raises DecodeError, with `where`, for anything else and for another key."""
    try:
        document: object = orjson.loads(value)
        if not isinstance(document, dict):
            raise TypeError("not a JSON object")
        readable = cast("dict[str, Any]", document)
        envelope = EncryptedContent.model_validate(readable.pop(_FIELD, None))
        if envelope.algorithm != _ALGORITHM:
            raise ValueError(f"algorithm {envelope.algorithm!r}; was it written by a newer clawstream?")
        sealed = base64.b64decode(envelope.data, validate=True)
        compressed = AESGCM(key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], bound)
        content = zstandard.ZstdDecompressor().decompress(compressed, max_output_size=_MAX_CONTENT_BYTES)
    except InvalidTag as error:
        raise DecodeError(f"{where}: its encrypted content is damaged, or belongs to another record") from error
    except (orjson.JSONDecodeError, TypeError, ValidationError, ValueError, zstandard.ZstdError) as error:
        # Said without what was found: it may be content.
        problem = str(error) if type(error) in (TypeError, ValueError, binascii.Error) else type(error).__name__
        raise DecodeError(f"{where}: no encrypted event: {problem}") from error
    if not readable or content == b"{}":
        return orjson.dumps(readable) if readable else content
    return orjson.dumps(readable)[:-1] + b"," + content[1:]  # Spliced: content is large, and need not be parsed here.


def _blobs_in(value: object) -> Iterator[BlobReference]:
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        if {"uri", "sha256", "size_bytes"} <= fields.keys():
            yield BlobReference.model_validate(fields)
            return
        for each in fields.values():
            yield from _blobs_in(each)
    elif isinstance(value, list):
        for each in cast("list[Any]", value):
            yield from _blobs_in(each)
