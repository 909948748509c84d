"""Opens the files of a gateway's conversations and wires everything."""

import os
from datetime import timedelta

from clawstream.bus.interface import Bus
from clawstream.clock import Clock
from clawstream.crash_points import CrashPoint, with_blob_crash, with_sync_crash
from clawstream.ids import IdSource
from clawstream.log import Logger
from clawstream.metrics import Metrics
from clawstream.topics import NEXT_STATES, OUTBOX, TURN_INDEX, TURNS, full_name
from services.gateway.batch_writer import BatchWriter, GatewayTopics
from services.gateway.client_profiles import load_profiles
from services.gateway.conversation_settings import GatewayLikeSettings
from services.gateway.conversations import GatewayConversations
from services.gateway.drain import OutboxDrain
from services.gateway.entry_encoder import EntryEncoder
from services.gateway.index_follower import IndexFollower
from services.gateway.index_secret import load_or_create_secret
from services.gateway.outbox import Outbox
from services.gateway.placing import Placer
from services.gateway.turn_blobs import TurnBlobs
from services.gateway.turn_index import TurnIndex
from services.gateway.turn_index_store import TurnIndexStore


def build_conversations(
    settings: GatewayLikeSettings,
    bus: Bus,
    clock: Clock,
    id_source: IdSource,
    metrics: Metrics,
    logger: Logger,
    crash: CrashPoint | None = None,
) -> GatewayConversations:
    """Opens the files of this gateway and wires everything. `start` must be called next.

    Raises SettingsError (profiles, secret, blob store) and OutboxError (used by another process, damaged); OSError and
    TurnIndexUnwritable when the disk refuses: then nothing is open, and it may be called again.
    """
    own = settings.conversations
    directory = settings.data_directory / settings.name / settings.kafka.namespace
    source = f"gateway/{settings.name}"
    namespace = settings.kafka.namespace
    topics = GatewayTopics(
        turns=full_name(namespace, TURNS),
        next_states=full_name(namespace, NEXT_STATES),
        turn_index=full_name(namespace, TURN_INDEX),
        outbox=full_name(namespace, OUTBOX),
    )
    secret = load_or_create_secret(own.index_secret_file or settings.data_directory / "gateway-index-secret")
    profiles = load_profiles(own.profiles_directory)
    outbox = Outbox(
        directory / "outbox",
        max_bytes=own.outbox_max_bytes,
        segment_bytes=own.outbox_segment_bytes,
        new_id=lambda: str(id_source()),
        sync=with_sync_crash(os.fdatasync, crash),
    )
    try:
        store = TurnIndexStore(directory / "turn-index.sqlite", cache_bytes=own.index_cache_bytes)
    except BaseException:
        outbox.close()
        raise
    index = TurnIndex(store)
    follower = IndexFollower(
        bus=bus,
        topic=topics.turn_index,
        source=source,
        store=store,
        index=index,
        retention=timedelta(seconds=own.index_retention_seconds),
        clock=clock,
        logger=logger,
    )
    writer = BatchWriter(
        index=index,
        follower=follower,
        topics=topics,
        gateway=settings.name,
        source=source,
        outbox_id=outbox.outbox_id,
        clock=clock,
        metrics=metrics,
        logger=logger,
    )
    drain = OutboxDrain(
        bus=bus,
        outbox=outbox,
        index=index,
        follower=follower,
        writer=writer,
        index_topic=topics.turn_index,
        outbox_topic=topics.outbox,
        gateway=settings.name,
        transactional_id=f"{namespace}.gateway.{settings.name}.outbox",
        linger_seconds=own.drain_linger_seconds,
        clock=clock,
        metrics=metrics,
        logger=logger,
    )
    placer = Placer(profiles=profiles, secret=secret, lookup_for=index.for_principal, id_source=id_source)
    return GatewayConversations(
        settings=own,
        encoder=EntryEncoder(
            placer=placer, turns_topic=topics.turns, source=source, max_next_state_bytes=own.max_event_bytes
        ),
        placer=placer,
        blobs=TurnBlobs(
            with_blob_crash(
                own.blob_store_url or str(settings.data_directory / "blobs"),
                crash,
                encrypts=settings.kafka.encryption.sessions,
            ),
            metrics,
            logger,
        ),
        outbox=outbox,
        store=store,
        index=index,
        follower=follower,
        drain=drain,
        clock=clock,
        metrics=metrics,
        logger=logger,
    )
