"""A consumer group in memory: static members, and a cooperative rebalance in which nothing has two owners. No I/O."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from clawstream.bus.interface import TopicPartition


@dataclass(frozen=True, slots=True, eq=False)
class Membership:
    """One consumer object in a group; its successor under the same instance id has another. Compared by identity."""

    group: str
    instance: str


@dataclass(slots=True)
class MemoryGroup:
    """The caller holds the cluster's lock."""

    name: str
    session_timeout_seconds: float
    members: dict[str, Membership] = field(default_factory=dict[str, Membership])
    """The present member of each instance id."""
    topics: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Subscription of each instance id."""
    owners: dict[TopicPartition, str] = field(default_factory=dict[TopicPartition, str])
    """Who holds a partition, until it lets go of it."""
    absent_since: dict[str, float] = field(default_factory=dict[str, float])
    """Members that closed: their place is kept for the session timeout."""
    committed: dict[TopicPartition, int] = field(default_factory=dict[TopicPartition, int])

    def join(self, instance: str, topics: tuple[str, ...]) -> Membership:
        """A new member. One with the same instance id takes its place, and the older one is fenced."""
        membership = Membership(self.name, instance)
        self.members[instance] = membership
        self.topics[instance] = topics
        self.absent_since.pop(instance, None)
        return membership

    def leave(self, membership: Membership, now_seconds: float) -> None:
        """The member closed; its place is kept for a while."""
        if self.members.get(membership.instance) is membership:
            self.absent_since[membership.instance] = now_seconds
            self.expire(now_seconds)

    def expire(self, now_seconds: float) -> None:
        """Removes members whose session ended."""
        for instance, since in list(self.absent_since.items()):
            if now_seconds - since >= self.session_timeout_seconds:
                self.remove(instance)

    def remove(self, instance: str) -> None:
        """Gives a member's place and partitions free."""
        self.members.pop(instance, None)
        self.topics.pop(instance, None)
        self.absent_since.pop(instance, None)
        for partition in [partition for partition, owner in self.owners.items() if owner == instance]:
            del self.owners[partition]

    def is_member(self, membership: Membership) -> bool:
        """False after it was fenced or removed."""
        return self.members.get(membership.instance) is membership

    def target(self, instance: str, partitions: Iterable[TopicPartition]) -> set[TopicPartition]:
        """What `instance` should hold of `partitions` (all of its subscription), so that shares differ by one at most.

        Owners keep what they have as far as their share allows.
        """
        wanted = sorted(partitions)
        members = sorted(self.members)
        assigned: dict[str, set[TopicPartition]] = {member: set() for member in members}
        share, extra = divmod(len(wanted), len(members))
        free: list[TopicPartition] = []
        larger = 0
        for partition in wanted:
            owner = self.owners.get(partition)
            held = assigned.get(owner) if owner is not None else None
            if held is None:
                free.append(partition)
            elif len(held) < share:
                held.add(partition)
            elif len(held) == share and larger < extra:
                held.add(partition)
                larger += 1
            else:
                free.append(partition)
        for partition in free:
            smallest = min(members, key=lambda member: (len(assigned[member]), member))
            assigned[smallest].add(partition)
        return assigned[instance]
