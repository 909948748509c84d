"""The master key: it wraps the sessions' keys, so that who reads the log alone reads no content.

Without one, keys stand on the log as they are: forgetting works all the same, but the log guards no secret.
"""

import base64
import binascii
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from clawstream.encryption.envelope import KEY_BYTES, NONCE_BYTES
from clawstream.errors import SettingsError
from clawstream.settings import EncryptionSettings

VARIABLE: Final = "CLAWSTREAM_MASTER_KEY"
"""Environment variable that may hold it. In the settings there is only the name of a file: they get printed."""


@dataclass(frozen=True, slots=True)
class MasterKey:
    """32 random bytes that only our processes know."""

    key: bytes = field(repr=False)

    @property
    def key_id(self) -> str:
        """Says which one it is, and nothing of it."""
        return hashlib.sha256(self.key).hexdigest()[:16]

    def wrap(self, data_key: bytes, *, key_id: str, nonce: bytes) -> bytes:
        """`data_key` encrypted, bound to its id."""
        return nonce + AESGCM(self.key).encrypt(nonce, data_key, key_id.encode())

    def unwrap(self, wrapped: bytes, *, key_id: str) -> bytes:
        """The reverse. Raises SettingsError when it was wrapped by another, or as another."""
        try:
            return AESGCM(self.key).decrypt(wrapped[:NONCE_BYTES], wrapped[NONCE_BYTES:], key_id.encode())
        except (InvalidTag, ValueError) as error:
            raise SettingsError(f"session key {key_id}: the master key does not unwrap it") from error


def load_master_key(settings: EncryptionSettings, environment: Mapping[str, str]) -> MasterKey | None:
    """From the file of the settings, else from the environment; None when neither is given.

    Raises SettingsError for a file that cannot be read and for what is not base64 of 32 bytes.
    """
    if settings.master_key_file is not None:
        source = str(settings.master_key_file)
        try:
            text = settings.master_key_file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"master key {source}: cannot be read: {type(error).__name__}") from error
    else:
        source, text = VARIABLE, environment.get(VARIABLE, "").strip()
        if not text:
            return None
    try:
        key = base64.b64decode(text, validate=True)
    except binascii.Error:
        key = b""
    if len(key) != KEY_BYTES:
        raise SettingsError(f"master key {source}: not base64 of {KEY_BYTES} bytes (openssl rand -base64 {KEY_BYTES})")
    return MasterKey(key)
