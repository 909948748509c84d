"""The turn ledger on the disk, beside a plain list: whatever is killed, cut off, passed over and taken up again."""

import errno
import os
import resource
import signal
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from clawstream.disk_space import is_out_of_space
from clawstream.errors import TurnLedgerError, TurnLedgerUnreadable
from services.trainer import ledger_file
from services.trainer.ledger_file import LedgerFile
from services.trainer.turn_ledger import LedgerAddition, LedgerEntry, LedgerMark, RevisionOrder, TurnLedger

TURNS = [f"turn-{number}" for number in range(6)]


def entries(first: int, count: int, *, left_at: float = 0.0) -> tuple[LedgerEntry, ...]:
    return tuple(LedgerEntry(f"turn-{number}", left_at) for number in range(first, first + count))


def addition(base: LedgerMark, added: Sequence[LedgerEntry], *, forget_before: float = 0.0) -> LedgerAddition:
    return LedgerAddition(base, base.after(added), tuple(added), forget_before)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "turns.sqlite"


@pytest.fixture
def turns(file: Path) -> Iterator[LedgerFile]:
    ledger = LedgerFile(file)
    yield ledger
    ledger.close()


def test_entries_come_back_as_they_were(turns: LedgerFile) -> None:
    added = (
        LedgerEntry("t", 1.7e9 + 0.1, (1, True, 2**40)),
        LedgerEntry("u", 1.0, (0, False, 0)),
        LedgerEntry("t", 1.7e9 + 0.3),
    )
    first = addition(LedgerMark(), added)
    turns.append(first)
    assert turns.find_turn("t", 3) == added[2]
    assert turns.find_turn("t", 2) == added[0], "as the checkpoint of two entries sees it"
    assert turns.find_turn("u", 1) is None
    assert turns.find_turn("T", 3) is None
    turns.check(first.mark)
    turns.check(LedgerMark().after(added[:2]))


def test_nothing_is_written_before_there_is_something_to_remember(turns: LedgerFile, file: Path) -> None:
    turns.append(addition(LedgerMark(), ()))
    turns.check(LedgerMark())
    assert (turns.find_turn("t", 0), file.exists()) == (None, False)


@dataclass
class Checkpoint:
    mark: LedgerMark
    memory: list[LedgerEntry]
    """The plain model: everything that it counts."""
    is_readable: bool = True


@dataclass
class Run:
    """What a trainer holds in memory."""

    ledger: TurnLedger
    memory: list[LedgerEntry] = field(default_factory=list)


class Lives(RuleBasedStateMachine):
    """A trainer that dies, starts again from the newest checkpoint that it can read, and goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = TemporaryDirectory()
        self.turns = LedgerFile(Path(self.directory.name) / "turns.sqlite")
        self.checkpoints: list[Checkpoint] = [Checkpoint(LedgerMark(), [])]
        self.base = self.checkpoints[0]
        self.now = 1.0
        self.cutoff = 0.0

    @initialize()
    def begin(self) -> None:
        self.run = Run(TurnLedger(self.turns, LedgerMark()))

    @rule(turn=st.sampled_from(TURNS), revision=st.none() | st.tuples(st.integers(0, 2), st.booleans(), st.integers()))
    def leave(self, turn: str, revision: RevisionOrder | None) -> None:
        if revision is not None:
            revision = (revision[0], revision[1], revision[2] % 2**62)
        entry = LedgerEntry(turn, self.now, revision)
        self.run.ledger.add(entry)
        self.run.memory.append(entry)

    @rule(seconds=st.floats(0, 10))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def checkpoint(self) -> None:
        self._append()
        self._write_checkpoint()

    @rule()
    def forget(self) -> None:
        self.cutoff = self.now
        self._append()
        self._write_checkpoint()

    @rule()
    def die(self) -> None:
        self._resume()

    @rule()
    def die_between_ledger_and_checkpoint(self) -> None:
        self._append()
        self._resume()

    @precondition(lambda self: len(self.checkpoints) > 1)
    @rule(data=st.data())
    def die_and_lose_checkpoints_for_a_while(self, data: st.DataObject) -> None:
        for checkpoint in self.checkpoints:
            checkpoint.is_readable = data.draw(st.booleans())
        self._resume()
        for checkpoint in self.checkpoints:
            checkpoint.is_readable = True

    def _append(self) -> None:
        self.addition = self.run.ledger.take(forget_before=self.cutoff)
        self.turns.append(self.addition)

    def _write_checkpoint(self) -> None:
        self.base = Checkpoint(self.addition.mark, list(self.run.memory))
        self.checkpoints.append(self.base)

    def _resume(self) -> None:
        self.turns.close()
        for checkpoint in reversed(self.checkpoints):
            if checkpoint.is_readable:
                try:
                    self.turns.check(checkpoint.mark)
                except TurnLedgerError:
                    assert checkpoint is not self.base, "what a run goes on from stays good"
                    continue
                break
        else:
            checkpoint = Checkpoint(LedgerMark(), [])
        self.base = checkpoint
        self.run = Run(TurnLedger(self.turns, checkpoint.mark), list(checkpoint.memory))

    @invariant()
    def every_turn_is_known_as_a_plain_list_knows_it(self) -> None:
        for turn in TURNS:
            of_turn = [entry for entry in self.run.memory if entry.turn_id == turn]
            found = self.run.ledger.find(turn)
            if not of_turn or of_turn[-1].left_at >= self.cutoff:
                assert found == (of_turn[-1] if of_turn else None)
            else:
                assert found in (None, of_turn[-1]), "forgotten or not, but nothing else"

    def teardown(self) -> None:
        self.turns.close()
        self.directory.cleanup()


Lives.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
test_lives = Lives.TestCase


def in_a_child(act: Callable[[], None]) -> int:
    """Runs it in a process of its own. Returns the signal that ended it; 0 for none."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status)
    assert os.WEXITSTATUS(status) == 0
    return 0


def limit_files(max_bytes: int, action: signal.Handlers) -> None:
    """From here on no file of this process can grow beyond that many bytes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, action)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, max_bytes))


def test_killed_at_any_byte_that_is_written_it_holds_the_old_entries_or_all(tmp_path: Path) -> None:
    old = addition(LedgerMark(), entries(0, 200))
    new = addition(old.mark, entries(200, 150))
    outcomes: set[int] = set()
    for max_bytes in range(0, 200_000, 3371):
        file = tmp_path / f"{max_bytes}.sqlite"
        in_a_child(lambda file=file: LedgerFile(file).append(old))

        def append(file: Path = file, max_bytes: int = max_bytes) -> None:
            turns = LedgerFile(file)
            turns.check(old.mark)
            limit_files(max_bytes, signal.SIG_DFL)
            turns.append(new)

        ended_by = in_a_child(append)
        assert ended_by in (0, signal.SIGXFSZ)
        outcomes.add(ended_by)
        turns = LedgerFile(file)
        turns.check(old.mark)
        assert turns.find_turn("turn-199", old.mark.entries) is not None
        assert turns.find_turn("turn-200", old.mark.entries) is None
        turns.append(new)  # what the next life trains
        turns.check(new.mark)
        assert turns.find_turn("turn-200", new.mark.entries) == new.entries[0]
        turns.close()
        if ended_by == 0:
            break
    assert outcomes == {0, signal.SIGXFSZ}


def test_a_full_disk_is_known_as_such_and_changes_nothing(file: Path, turns: LedgerFile) -> None:
    old = addition(LedgerMark(), entries(0, 200))
    turns.append(old)
    database = turns._connection  # pyright: ignore[reportPrivateUsage] - SQLite's own way to be full
    assert database is not None
    (pages,) = database.execute("PRAGMA page_count").fetchone()
    database.execute(f"PRAGMA max_page_count = {pages + 1}")
    new = addition(old.mark, entries(200, 1000))
    with pytest.raises(TurnLedgerError, match=r"turns\.sqlite could not be written: .* full") as refused:
        turns.append(new)
    assert is_out_of_space(refused.value)
    assert turns.find_turn("turn-0", 200) is not None
    database.execute("PRAGMA max_page_count = 100000")
    turns.append(new)
    turns.append(new)  # again: a disk that was waited for
    turns.check(new.mark)
    assert sorted(path.name for path in file.parent.iterdir()) == [file.name]


@pytest.mark.parametrize("told", [errno.EDQUOT, errno.ENOSPC, errno.EIO, None])
@pytest.mark.parametrize("max_bytes", [10_000, 60_000])
def test_a_disk_error_of_sqlite_is_missing_space_when_the_disk_says_so(
    file: Path, monkeypatch: pytest.MonkeyPatch, max_bytes: int, told: int | None
) -> None:
    """SQLite has no word for a quota. Its own writes fail here at a limit of the process: in journal or file."""
    old = addition(LedgerMark(), entries(0, 200))
    LedgerFile(file).append(old)
    new = addition(old.mark, entries(200, 1000))

    def refuse(descriptor: int, content: bytes) -> int:
        if told is None:
            return len(content)
        raise OSError(told, os.strerror(told))

    def append() -> None:
        turns = LedgerFile(file)
        turns.check(old.mark)
        limit_files(max_bytes, signal.SIG_IGN)
        monkeypatch.setattr(os, "write", refuse)
        with pytest.raises(TurnLedgerError) as refused:
            turns.append(new)
        monkeypatch.undo()
        assert is_out_of_space(refused.value) is (told in (errno.EDQUOT, errno.ENOSPC)), refused.value
        assert [path.name for path in file.parent.iterdir() if not path.name.endswith("-journal")] == [file.name]

    assert in_a_child(append) == 0
    turns = LedgerFile(file)
    turns.append(new)
    turns.check(new.mark)
    turns.close()


def test_a_journal_that_cannot_be_made_for_a_quota_is_missing_space(
    file: Path, turns: LedgerFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quota on the number of files."""
    real_open = os.open

    def refuse(path: Path, *arguments: int) -> int:
        if "space" in str(path):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return real_open(path, *arguments)

    old = addition(LedgerMark(), entries(0, 2))
    turns.append(old)
    journal = file.with_name(f"{file.name}-journal")
    journal.mkdir()
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(TurnLedgerError) as refused:
        turns.append(addition(old.mark, entries(2, 2)))
    assert is_out_of_space(refused.value), refused.value


def test_another_refusal_of_the_disk_is_no_missing_space(turns: LedgerFile, file: Path) -> None:
    file.mkdir()
    with pytest.raises(TurnLedgerError, match="could not be written") as refused:
        turns.append(addition(LedgerMark(), entries(0, 1)))
    assert not is_out_of_space(refused.value)


def test_a_checkpoint_whose_entries_were_overwritten_is_refused(turns: LedgerFile) -> None:
    first = addition(LedgerMark(), entries(0, 3))
    lost = addition(first.mark, entries(3, 2))
    turns.append(first)
    turns.append(lost)
    turns.check(lost.mark)
    other = addition(first.mark, entries(7, 2))  # another run, from the checkpoint before
    turns.append(other)
    turns.check(first.mark)
    turns.check(other.mark)
    with pytest.raises(TurnLedgerError, match="another run has gone on"):
        turns.check(lost.mark)
    turns.append(addition(first.mark, entries(7, 1)))  # fewer than were counted
    with pytest.raises(TurnLedgerError, match="another run has gone on"):
        turns.check(other.mark)


def test_entries_are_added_only_to_what_they_were_counted_from(turns: LedgerFile) -> None:
    turns.append(addition(LedgerMark(), entries(0, 3)))
    with pytest.raises(TurnLedgerError, match="start it again"):
        turns.append(addition(LedgerMark().after(entries(1, 3)), entries(5, 1)))


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE turns SET turn_id = 'other' WHERE sequence = 2",
        "UPDATE turns SET left_at = 9 WHERE sequence = 2",
        "UPDATE turns SET epoch = 1, is_explicit = 0, position = 0 WHERE sequence = 2",
        "DELETE FROM turns WHERE sequence = 2",
        "DELETE FROM turns WHERE sequence = 1",
        "DELETE FROM turns WHERE sequence <= 3",
        "DELETE FROM turns",
        "DROP TABLE turns",
    ],
)
def test_a_changed_file_is_refused(turns: LedgerFile, file: Path, damage: str) -> None:
    first = addition(LedgerMark(), entries(0, 3))
    turns.append(first)
    last = addition(first.mark, entries(3, 3))
    turns.append(last)
    turns.check(last.mark)
    with sqlite3.connect(file) as database:
        database.execute(damage)
    database.close()
    with pytest.raises(TurnLedgerError):
        turns.check(last.mark)


def test_a_file_that_cannot_be_read_now_is_no_reason_to_begin_anew(turns: LedgerFile, file: Path) -> None:
    """Every checkpoint rests on this one file: a disk or a lock that refuses it must not pass them all over."""
    first = addition(LedgerMark(), entries(0, 3))
    turns.append(first)
    turns.close()
    elsewhere = file.rename(file.with_name("elsewhere"))
    with pytest.raises(TurnLedgerError):  # It is not there: nobody will bring it back.
        turns.check(first.mark)
    file.mkdir()  # Even root cannot open a folder.
    with pytest.raises(TurnLedgerUnreadable, match="could not be read"):
        turns.check(first.mark)
    file.rmdir()
    elsewhere.rename(file)
    turns.check(first.mark)


def test_torn_bytes_are_noticed_and_a_new_run_begins_with_a_file_of_its_own(turns: LedgerFile, file: Path) -> None:
    first = addition(LedgerMark(), entries(0, 3000))
    turns.append(first)
    turns.close()
    content = bytearray(file.read_bytes())
    for place in range(4096, len(content), 4096):
        content[place : place + 64] = os.urandom(64)
    file.write_bytes(content)
    with pytest.raises(TurnLedgerError):
        turns.check(first.mark)
    anew = addition(LedgerMark(), entries(5000, 2))
    turns.append(anew)
    turns.check(anew.mark)
    assert turns.find_turn("turn-0", anew.mark.entries) is None


def test_no_database_at_all_is_refused_and_set_aside(turns: LedgerFile, file: Path) -> None:
    file.write_bytes(b"not a database" * 1000)
    with pytest.raises(TurnLedgerError):
        turns.check(LedgerMark().after(entries(0, 1)))
    turns.append(addition(LedgerMark(), entries(0, 1)))
    turns.check(LedgerMark().after(entries(0, 1)))
    assert file.with_name("turns.sqlite.before").read_bytes().startswith(b"not a database")


def test_a_run_that_begins_anew_leaves_what_was_remembered_before(turns: LedgerFile, file: Path) -> None:
    first = addition(LedgerMark(), entries(0, 3))
    turns.append(first)
    last = addition(first.mark, entries(3, 3))
    turns.append(last)
    for _ in range(2):  # it dies at its first checkpoint, and begins once more
        turns.append(addition(LedgerMark(), entries(9, 1)))
        assert turns.find_turn("turn-0", 1) is None
    before = LedgerFile(file.with_name("turns.sqlite.before"))
    before.check(last.mark)
    before.close()


def test_what_is_too_old_is_forgotten_a_little_at_a_time(turns: LedgerFile) -> None:
    marks = [LedgerMark()]
    for number in range(8):
        step = addition(marks[-1], entries(10 * number, 10, left_at=float(number)))
        turns.append(step)
        marks.append(step.mark)

    def remembered() -> list[int]:
        return [number for number in range(8) if turns.find_turn(f"turn-{10 * number}", 1000) is not None]

    for expected in ([2, 3, 4, 5, 6, 7], [4, 5, 6, 7], [5, 6, 7], [5, 6, 7]):
        step = addition(marks[-1], [LedgerEntry("later", 9.0)], forget_before=5.0)
        turns.append(step)
        marks.append(step.mark)
        assert remembered() == expected
    for mark in marks:
        turns.check(mark)  # an older checkpoint, whose turns were forgotten, is as good as before
    with pytest.raises(TurnLedgerError, match="fewer"):
        turns.check(LedgerMark().after(entries(1, 10)).model_copy(update={"entries": 35}))


def test_a_run_from_a_checkpoint_whose_turns_were_forgotten_goes_on(turns: LedgerFile) -> None:
    marks = [LedgerMark()]
    for number in range(4):
        cutoff = 9.0 if number == 3 else 0.0  # forgets the first two additions
        step = addition(marks[-1], entries(2 * number, 2, left_at=float(number)), forget_before=cutoff)
        turns.append(step)
        marks.append(step.mark)
    other = addition(marks[1], entries(50, 3, left_at=10.0))
    turns.append(other)
    turns.check(other.mark)
    turns.check(marks[1])
    assert turns.find_turn("turn-50", other.mark.entries) == other.entries[0]


def test_marks_of_forgotten_turns_do_not_pile_up(turns: LedgerFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_file, "_FORGOTTEN_MARKS_KEPT", 3)
    mark = LedgerMark()
    for number in range(40):
        step = addition(mark, entries(number, 1, left_at=float(number)), forget_before=number - 5.0)
        turns.append(step)
        mark = step.mark
    turns.check(mark)
    database = turns._connection  # pyright: ignore[reportPrivateUsage] - nothing else tells
    assert database is not None
    assert database.execute("SELECT count(*) FROM turns").fetchone() == (6,)
    assert database.execute("SELECT count(*) FROM marks").fetchone() == (9,)


def written_bytes() -> int:
    """By this process, ever."""
    status = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(status["wchar"])


def test_what_a_step_writes_and_reads_does_not_depend_on_how_much_is_remembered(tmp_path: Path) -> None:
    costs: list[int] = []
    for history in (20_000, 200_000):
        turns = LedgerFile(tmp_path / f"{history}.sqlite")
        old = [LedgerEntry(f"{number * 2654435761 % 2**32:08x}", 1.0) for number in range(history)]
        past = addition(LedgerMark(), old)
        turns.append(past)
        ledger = TurnLedger(turns, past.mark)
        before = written_bytes()
        for step in range(5):
            for number in range(16):
                ledger.add(LedgerEntry(f"{(16 * step + number) * 40503 % 2**16:04x}new", 2.0))
            taken = ledger.take(forget_before=0.0)
            assert len(taken.entries) == 16
            turns.append(taken)
        costs.append((written_bytes() - before) // 5)
        assert turns.find_turn(past.entries[history // 2].turn_id, past.mark.entries) is not None
        turns.close()
    assert costs[1] < 1.5 * costs[0], f"{costs}: ten times the history, and a B-tree that is one level deeper"
    assert max(costs) < 16 * 4 * 4096 * 2
