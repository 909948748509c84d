"""The manifest catches every torn or foreign file, and retention keeps what anyone may still load."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.weights.manifest import ManifestError, WeightManifest, manifest_sha256, read_manifest, seal, verify
from clawstream.weights.retention import deletable


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"weights" * 100)
    (tmp_path / "config.json").write_text("{}")
    seal(
        tmp_path,
        policy="main",
        weight_version=7,
        base_version=6,
        lineage="run",
        train_step_id="step",
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
    )
    return tmp_path


def test_a_sealed_directory_verifies(sealed: Path) -> None:
    manifest = verify(sealed, manifest_sha256(sealed))
    assert (manifest.weight_version, manifest.base_version) == (7, 6)
    assert [file.name for file in manifest.files] == ["config.json", "model.safetensors"]
    assert manifest == read_manifest(sealed)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    path.write_bytes(b"W" + path.read_bytes()[1:])


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (lambda root: cut(root / "model.safetensors"), "model.safetensors"),
        (lambda root: flip(root / "model.safetensors"), "model.safetensors"),
        (lambda root: (root / "config.json").unlink(), "config.json"),
        (lambda root: (root / "extra.safetensors").write_bytes(b""), "extra.safetensors"),
        (lambda root: (root / "manifest.json").unlink(), "manifest.json"),
        (lambda root: cut(root / "manifest.json"), "manifest.json"),
        (lambda root: (root / "manifest.json").write_text("{}"), "manifest.json"),
    ],
)
def test_damage_is_found_and_the_file_named(damage: Callable[[Path], object], name: str, sealed: Path) -> None:
    damage(sealed)
    with pytest.raises(ManifestError, match=name):
        verify(sealed)


def test_a_manifest_other_than_the_event_says_is_refused(sealed: Path) -> None:
    with pytest.raises(ManifestError, match="weight-version event says"):
        verify(sealed, "0" * 64)


def test_a_manifest_cannot_point_outside_its_directory(sealed: Path) -> None:
    document = json.loads((sealed / "manifest.json").read_text())
    document["files"][0]["name"] = "../secret"
    (sealed / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(ManifestError, match="not a manifest"):
        verify(sealed)


def test_a_later_manifest_with_more_fields_is_still_read(sealed: Path) -> None:
    document = json.loads((sealed / "manifest.json").read_text()) | {"added_later": 1}
    assert WeightManifest.model_validate(document) == read_manifest(sealed)


def test_a_folder_inside_cannot_be_sealed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ManifestError, match="folder"):
        seal(
            tmp_path,
            policy="main",
            weight_version=0,
            base_version=None,
            lineage="run",
            train_step_id=None,
            created_at=datetime(2026, 1, 1, tzinfo=UTC),
        )


def test_old_versions_go_unless_someone_may_load_them() -> None:
    versions = [1, 2, 3, 4, 5, 6]
    assert deletable(versions, {}, keep=2) == [1, 2, 3, 4]
    assert deletable(versions, {"a": 2, "b": 6}, keep=2) == [1, 3, 4]
    assert deletable(versions, {"a": 2}, keep=2, in_flight=[3]) == [1, 4]


def test_an_engine_on_an_unknown_version_stops_every_removal() -> None:
    assert deletable([1, 2, 3], {"a": None, "b": 3}, keep=1) == []


@given(
    st.sets(st.integers(0, 20)),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 20)),
    st.integers(1, 5),
    st.sets(st.integers(0, 20)),
)
def test_what_is_served_in_flight_or_new_always_stays(
    versions: set[int], applied: dict[str, int], keep: int, in_flight: set[int]
) -> None:
    gone = set(deletable(versions, applied, keep, in_flight))
    assert gone <= versions
    assert not gone & (set(applied.values()) | in_flight | set(sorted(versions)[-keep:]))
    assert len(versions - gone) <= keep + len(set(applied.values()) | in_flight)


def test_keeping_none_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        deletable([1], {}, keep=0)
