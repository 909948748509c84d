"""Who is asking: an API key names a principal."""

import hashlib
import hmac
from collections.abc import Mapping, Sequence

from clawstream.errors import RequestRefused

LOCAL_PRINCIPAL = "local"
"""Whoever talks to a gateway without keys, which listens on loopback only."""


def hash_key(key: str) -> str:
    """sha256 of an API key in hexadecimal: the only form in which keys are kept."""
    return hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).hexdigest()


class Authenticator:
    """Knows principals by the hashes of their keys. Never keeps, logs or repeats a key."""

    def __init__(self, principal_keys: Mapping[str, Sequence[str]]) -> None:
        """`principal_keys`: for each principal the sha256 hashes of its keys. Empty: everyone is `local`."""
        self._entries = [(digest.lower(), principal) for principal, keys in principal_keys.items() for digest in keys]

    def principal(self, headers: Mapping[str, str]) -> str:
        """The principal of a request with these (lower-case) headers. Raises RequestRefused, status 401.

        Every known key is compared in constant time, whichever matches.
        """
        if not self._entries:
            return LOCAL_PRINCIPAL
        key = _presented_key(headers)
        if key is None:
            raise _unauthorized("no API key: send it as `Authorization: Bearer KEY`")
        digest = hash_key(key)
        found: str | None = None
        for known, principal in self._entries:
            if hmac.compare_digest(known, digest):
                found = principal
        if found is None:
            raise _unauthorized("this API key is not known")
        return found


def _presented_key(headers: Mapping[str, str]) -> str | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key", "").strip() or None


def _unauthorized(message: str) -> RequestRefused:
    return RequestRefused(message, status=401, error_type="authentication_error", code="invalid_api_key")
