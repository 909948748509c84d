"""The secret of the keyed hashes: made once, shared by all gateways of a system."""

import os
import secrets
from pathlib import Path

from clawstream.durable_files import sync_directory
from clawstream.errors import SettingsError

_SECRET_BYTES = 32


def load_or_create_secret(file: Path) -> bytes:
    """The secret in `file`, readable by its owner only. Gateways that start at the same moment get the same one.

    Raises SettingsError when the file is too short to be a secret, OSError when the disk refuses a new one.
    """
    if not file.exists():
        _create(file)
    secret = file.read_bytes()
    if len(secret) < _SECRET_BYTES:
        raise SettingsError(f"{file}: an index secret has {_SECRET_BYTES} bytes, found {len(secret)}; remove the file")
    return secret


def _create(file: Path) -> None:
    """Writes beside the name and links it: the name appears with all of its content, once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, secrets.token_bytes(_SECRET_BYTES))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.link(draft, file)
    except FileExistsError:
        pass  # Another gateway was faster: its secret is the secret.
    finally:
        draft.unlink(missing_ok=True)
    sync_directory(file.parent)
