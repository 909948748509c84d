"""Master keys: one wraps the sessions' keys, so that who reads the log alone reads no content.

Without one, keys stand on the log as they are: forgetting works all the same, but the log guards no secret. There may
be several while one follows another: all of them unwrap, and the log says which one wraps (`clawstream keys rotate`).
"""

import base64
import binascii
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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


class MasterKeys:
    """Those that this process has. Thread-safe."""

    def __init__(self, load: Callable[[], Sequence[MasterKey]]) -> None:
        """`load` is called now, and again when another key is asked for. Raises what it raises."""
        self._load = load
        self._keys = tuple(load())

    @property
    def first(self) -> MasterKey | None:
        """The one that wraps as long as the log names none."""
        return self._keys[0] if self._keys else None

    @property
    def last(self) -> MasterKey | None:
        """The newest one."""
        return self._keys[-1] if self._keys else None

    @property
    def ids(self) -> str:
        """For messages."""
        return ", ".join(key.key_id for key in self._keys) or "none"

    def get(self, key_id: str) -> MasterKey | None:
        """The key of this id; also one that was added to the file since."""
        found = self._find(key_id)
        if found is None:
            with suppress(SettingsError):  # The file is being written: what we have is what counts.
                self._keys = tuple(self._load())
            found = self._find(key_id)
        return found

    def _find(self, key_id: str) -> MasterKey | None:
        return next((key for key in self._keys if key.key_id == key_id), None)


def load_master_keys(settings: EncryptionSettings, environment: Mapping[str, str]) -> list[MasterKey]:
    """From the file of the settings, else from the environment, oldest first; none when neither is given.

    Raises SettingsError for a file that cannot be read and for what is not base64 of 32 bytes.
    """
    if settings.master_key_file is not None:
        source = str(settings.master_key_file)
        try:
            text = settings.master_key_file.read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"master key {source}: cannot be read: {type(error).__name__}") from error
        if not text.strip():
            raise SettingsError(f"master key {source}: empty")
    else:
        source, text = VARIABLE, environment.get(VARIABLE, "")
    return [_decoded(word, source) for word in text.split()]


def _decoded(text: str, source: str) -> MasterKey:
    try:
        key = base64.b64decode(text, validate=True)
    except binascii.Error:
        key = b""
    if len(key) != KEY_BYTES:
        raise SettingsError(f"master key {source}: not base64 of {KEY_BYTES} bytes (openssl rand -base64 {KEY_BYTES})")
    return MasterKey(key)
