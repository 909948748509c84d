"""Which system a namespace of topics belongs to: two systems in one would take each other's names.

Transactional ids, group members and positions follow from the names of processes, which two systems that were made from
the same file share. Each then ends what the other starts. So a data directory has an id, and the first one to come is
written into the namespace; a data directory with another id is refused.
"""

from datetime import datetime
from pathlib import Path
from typing import Final

from clawstream.bus.interface import Bus
from clawstream.bus.overtaken import telling_who_overtook
from clawstream.bus.ranges import latest_of_topic
from clawstream.bus.write_together import write_together
from clawstream.codec import decode_as, encode
from clawstream.durable_files import replace_file
from clawstream.errors import NamespaceTaken
from clawstream.ids import IdSource, derive
from clawstream.topics import DEPLOYMENT, full_name
from schemas.events import DeploymentEvent

FILE_NAME: Final = "deployment-id"
_KEY: Final = "deployment"


def claim_namespace(
    bus: Bus,
    namespace: str,
    data_directory: Path,
    *,
    host: str,
    now: datetime,
    id_source: IdSource,
    joins: bool = False,
) -> str:
    """The id of the system that the namespace belongs to, which is that of `data_directory` from now on.

    `joins`: a data directory of another id, or of none, becomes one of that system's. Of two that claim a namespace at
    the same moment the second fences the first before it reads. Raises NamespaceTaken, Overtaken and BusError.
    """
    directory = data_directory.resolve()
    file = directory / FILE_NAME
    own = file.read_text(encoding="ascii").strip() if file.exists() else ""
    producer = bus.transactional_producer(f"{namespace}.deployment")
    try:
        owner = _owner(bus, namespace)
        if owner is None:
            owner = DeploymentEvent(
                deployment_id=own or str(id_source()), data_directory=str(directory), host=host, claimed_at=now
            )
            _remember(file, owner.deployment_id)  # First: a claim whose directory does not know it refuses its own.
            claim = encode(
                owner,
                topic=full_name(namespace, DEPLOYMENT),
                key=_KEY,
                event_id=derive("deployment", namespace, owner.deployment_id),
                source="cli/topics",
            )
            with telling_who_overtook(
                f"{full_name(namespace, DEPLOYMENT)}: claiming namespace {namespace!r}",
                "another system, or another `clawstream topics apply` of this one,",
                then="Run it again: it then says whose the namespace is",
            ):
                write_together(producer, [claim])
        elif owner.deployment_id != own:
            if not joins:
                raise NamespaceTaken(
                    f"the topics of namespace {namespace!r} belong to the data directory {owner.data_directory} on "
                    f"{owner.host} (system {owner.deployment_id}, since {owner.claimed_at:%Y-%m-%d %H:%M}), and this "
                    f"is {directory} on {host} ({f'system {own}' if own else 'a new one'}): two systems would take "
                    "each other's names. Set another kafka.namespace here; or, if this is a further machine of that "
                    "system, or its directory made anew, run `clawstream topics apply --join` once"
                )
            _remember(file, owner.deployment_id)
        return owner.deployment_id
    finally:
        producer.close()


def _owner(bus: Bus, namespace: str) -> DeploymentEvent | None:
    latest = latest_of_topic(bus, full_name(namespace, DEPLOYMENT))
    record = latest.get(_KEY.encode())
    return None if record is None else decode_as(record, DeploymentEvent)


def _remember(file: Path, deployment_id: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, deployment_id.encode("ascii"))
