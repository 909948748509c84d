"""Log files: rotation keeps a bound, followers notice it."""

from pathlib import Path

from clawstream.supervisor.log_files import LogFollower, rotate, tail


def test_rotation_is_bounded_and_keeps_the_writers_file(tmp_path: Path) -> None:
    file = tmp_path / "a.log"
    with file.open("ab", buffering=0) as writer:
        for number in range(6):
            writer.write(f"{number}\n".encode() * 10)
            assert rotate(file, largest_bytes=20, kept=3)
            assert not rotate(file, largest_bytes=20, kept=3)
        writer.write(b"after\n")
    assert file.read_bytes() == b"after\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.log", "a.log.1", "a.log.2", "a.log.3"]
    assert (tmp_path / "a.log.1").read_bytes().startswith(b"5\n")
    assert (tmp_path / "a.log.3").read_bytes().startswith(b"3\n")


def test_follower_gives_whole_lines_and_survives_truncation(tmp_path: Path) -> None:
    file = tmp_path / "a.log"
    file.write_bytes(b"old\n")
    follower = LogFollower(file, position_bytes=4)
    assert list(follower.lines()) == []
    with file.open("ab") as writer:
        writer.write(b"one\ntw")
    assert list(follower.lines()) == ["one"]
    with file.open("ab") as writer:
        writer.write(b"o\n")
    assert list(follower.lines()) == ["two"]
    file.write_bytes(b"new\n")
    assert list(follower.lines()) == ["new"]


def test_tail_of_a_file_and_of_none(tmp_path: Path) -> None:
    file = tmp_path / "a.log"
    assert tail(file, 3) == []
    file.write_text("\n".join(map(str, range(100))))
    assert tail(file, 3) == ["97", "98", "99"]
