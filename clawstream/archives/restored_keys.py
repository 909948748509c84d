"""What a restored key topic would change: which master key counts, and which ones are needed to read it.

An archive is of a time at which another master key may have counted. Written behind what is there now, its record would
make that one count again; and its keys are wrapped by it, also those that were wrapped anew since.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from clawstream.bus.interface import Record
from clawstream.codec import decode_as
from clawstream.encryption.master_key import MasterKeys
from clawstream.encryption.session_keys import MASTER_KEY_RECORD
from clawstream.errors import ArchiveError, DecodeError
from schemas.events.session_key import MasterKeyEvent, SessionKeyEvent


@dataclass(frozen=True, slots=True)
class ArchivedKeys:
    """What an archive's records of the key topic say."""

    named: str | None
    """The master key that counted; None when none was named, or its record cannot be decoded."""
    wrapping: frozenset[str]
    """Ids of the master keys that wrap its keys."""

    @classmethod
    def of(cls, records: Iterable[Record]) -> "ArchivedKeys":
        """What cannot be decoded is restored as it is, and says nothing here."""
        named: str | None = None
        wrapping: dict[bytes, str] = {}
        for record in records:
            if record.key is None:
                continue
            if record.value is None:
                wrapping.pop(record.key, None)
                continue
            try:
                if names_master_key(record):
                    named = None
                    named = decode_as(record, MasterKeyEvent).master_key_id
                else:
                    wrapping[record.key] = decode_as(record, SessionKeyEvent).master_key_id
            except DecodeError:
                continue
        return cls(named, frozenset(wrapping.values()) - {""})

    def check(self, masters: MasterKeys, counting: str | None, where: object) -> str:
        """What is to be done about master keys after the restore; empty: nothing.

        `counting` is the one that counts now and goes on to; None where the archive says it. Raises ArchiveError when
        one that will be needed is not among ours: whoever reads or writes encrypted content would end for want of it.
        """
        named = counting or self.named
        needed = self.wrapping if named is None else self.wrapping | {named}
        missing = sorted(each for each in needed if masters.get(each) is None)
        if missing:
            raise ArchiveError(
                f"{where}: its keys need master key {', '.join(missing)}, and this process has {masters.ids}. Whoever "
                "reads or writes encrypted content would end for want of it: add it to kafka.encryption."
                "master_key_file on every machine, then restore, then `clawstream keys rotate`"
            )
        wanted = counting or (None if masters.last is None else masters.last.key_id)
        old = sorted(needed - {wanted})
        if not old:
            return ""
        return (
            f"the archive brings master key {', '.join(old)} back, which wraps keys, or counts: keep it in the files, "
            f"and run `clawstream keys rotate --to {wanted}` now; then `clawstream keys status` says when it may go"
        )


def names_master_key(record: Record) -> bool:
    """Whether it is the record that says which master key counts."""
    return record.key == MASTER_KEY_RECORD.encode()
