"""Where the master key comes from, and that a wrong one is named without being shown."""

import base64
from pathlib import Path

import pytest

from clawstream.encryption.master_key import VARIABLE, MasterKey, load_master_keys
from clawstream.errors import SettingsError
from clawstream.settings import EncryptionSettings

KEY = bytes(range(32))
TEXT = base64.b64encode(KEY).decode()


def test_it_comes_from_the_file_else_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "master"
    file.write_text(f"{TEXT}\n")
    settings = EncryptionSettings(master_key_file=file)
    assert load_master_keys(settings, {VARIABLE: "ignored"}) == [MasterKey(KEY)]
    assert load_master_keys(EncryptionSettings(), {VARIABLE: TEXT}) == [MasterKey(KEY)]
    assert load_master_keys(EncryptionSettings(), {}) == []


@pytest.mark.parametrize("text", ["secret words", TEXT[:20], base64.b64encode(b"short").decode(), "é"])
def test_a_wrong_one_is_refused_and_not_quoted(tmp_path: Path, text: str) -> None:
    file = tmp_path / "master"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(SettingsError, match="master") as caught:
        load_master_keys(EncryptionSettings(master_key_file=file), {})
    assert text not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="nowhere"):
        load_master_keys(EncryptionSettings(master_key_file=tmp_path / "nowhere"), {})


def test_what_it_wraps_it_unwraps_under_the_same_id_only() -> None:
    master = MasterKey(KEY)
    wrapped = master.wrap(b"d" * 32, key_id="a", nonce=b"n" * 12)
    assert master.unwrap(wrapped, key_id="a") == b"d" * 32
    with pytest.raises(SettingsError, match="session key b"):
        master.unwrap(wrapped, key_id="b")
    assert TEXT not in repr(master)
    assert str(KEY) not in repr(master)
