"""Which brokers are alive and which topics they serve. Pure: takes time and connections as arguments, sends nothing.

topic -> broker name -> queues;  broker name -> {id: address};  address -> when the broker was last heard of.
A broker is known by its address; id 0 is the master. Topics are taken from masters only, and only when their data
version changed. A topic that a broker no longer names stays; it goes with its last broker, or by request.

In controller mode the state version of a data version is the epoch in which a broker was elected. A broker that was
elected in an earlier epoch cannot take the place of the master, however late its registration comes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from sys import intern
from typing import Final

from msgspec import structs

from downrange.model.topics import READ_WRITE, Perm, TopicConfig
from downrange.protocol.bodies.data_version import DataVersion
from downrange.protocol.bodies.routes import MASTER_ID, BrokerData, ClusterInfo, QueueData, TopicRouteData

BROKER_EXPIRES_MILLIS: Final = 120_000

UNIT_BIT: Final = 1
UNIT_SUB_BIT: Final = 2


@dataclass(frozen=True, slots=True)
class BrokerIdentity:
    """The identity a broker registers with."""

    cluster_name: str
    broker_name: str
    broker_addr: str
    broker_id: int


@dataclass(slots=True)
class LiveBroker:
    """The last registration or heartbeat of a broker, and the connection it came over."""

    heard_millis: int
    data_version: DataVersion
    connection: Hashable
    ha_server_addr: str
    expires_millis: int = BROKER_EXPIRES_MILLIS
    fingerprint: bytes = b""


@dataclass(frozen=True, slots=True)
class Registered:
    """The master's addresses, for a slave that registered; empty for masters and while the master is away."""

    master_addr: str | None = None
    ha_server_addr: str | None = None


class RouteTable:
    """All routes of one name server. Used by one thread; every method either does all of its change or none."""

    def __init__(self, *, drop_topics_left_out: bool = False) -> None:
        self.drop_topics_left_out = drop_topics_left_out
        """deleteTopicWithBrokerRegistration of RocketMQ 5: remove a topic that is missing from a registration."""
        self._queues: dict[str, dict[str, QueueData]] = {}
        self._brokers: dict[str, BrokerData] = {}
        self._clusters: dict[str, set[str]] = {}
        self._live: dict[str, LiveBroker] = {}
        self.revision = 0
        """Grows with every change that is visible in a route."""

    def __repr__(self) -> str:
        return f"<RouteTable brokers={len(self._live)} topics={len(self._queues)}>"

    # --- brokers come and go ------------------------------------------------------------------------------------

    def register(
        self,
        broker: BrokerIdentity,
        ha_server_addr: str,
        data_version: DataVersion,
        topics: Iterable[TopicConfig],
        *,
        now: int,
        connection: Hashable,
        expires_millis: int = BROKER_EXPIRES_MILLIS,
        enable_acting_master: bool | None = None,
        fingerprint: bytes = b"",
    ) -> Registered:
        """Add a broker or refresh it; `fingerprint` is a hash of its version and topics, for `version_by`."""
        known = self._brokers.get(broker.broker_name)
        if known is not None and self._is_deposed(broker, known, data_version):
            self._live.pop(broker.broker_addr, None)
            return Registered()
        addresses = dict(known.broker_addrs) if known else {}
        # An address has one id: a slave that comes back as master must not stay listed as slave.
        addresses = {id_: address for id_, address in addresses.items() if address != broker.broker_addr}
        addresses[broker.broker_id] = broker.broker_addr
        self._clusters.setdefault(broker.cluster_name, set()).add(broker.broker_name)
        changed = BrokerData(
            cluster=broker.cluster_name,
            broker_name=broker.broker_name,
            broker_addrs=dict(sorted(addresses.items())),
            enable_acting_master=enable_acting_master,
        )
        if changed != known:
            self._brokers[broker.broker_name] = changed
            self.revision += 1
        live = self._live.get(broker.broker_addr)
        if broker.broker_id == MASTER_ID and (live is None or live.data_version != data_version):
            self._take_topics(broker.broker_name, topics)
        self._live[broker.broker_addr] = LiveBroker(
            now, data_version, connection, ha_server_addr, expires_millis, fingerprint
        )
        return Registered() if broker.broker_id == MASTER_ID else self._master_of(broker.broker_name)

    def _is_deposed(self, broker: BrokerIdentity, known: BrokerData, data_version: DataVersion) -> bool:
        """Whether a broker that registers as master was elected before the live master at another address."""
        if broker.broker_id != MASTER_ID or known.master_address in (None, broker.broker_addr):
            return False
        master = self._live.get(known.master_address or "")
        return master is not None and data_version.state < master.data_version.state

    def version_by(self, broker_addr: str, fingerprint: bytes) -> DataVersion | None:
        """The data version of this broker, if it is alive and its last registration had this fingerprint."""
        live = self._live.get(broker_addr)
        return live.data_version if live is not None and fingerprint == live.fingerprint else None

    def _take_topics(self, broker_name: str, topics: Iterable[TopicConfig]) -> None:
        self.revision += 1
        named = set()
        alike: dict[QueueData, QueueData] = {}  # ten thousand topics share a few different QueueData
        for config in topics:
            topic = intern(config.topic_name)
            named.add(topic)
            queues = QueueData(
                broker_name=broker_name,
                read_queue_nums=config.read_queue_nums,
                write_queue_nums=config.write_queue_nums,
                perm=config.perm,
                topic_sys_flag=config.topic_sys_flag,
            )
            self._queues.setdefault(topic, {})[broker_name] = alike.setdefault(queues, queues)
        # A registration of a single topic is incremental: it says nothing about the other topics.
        if self.drop_topics_left_out and len(named) != 1:
            for topic in [topic for topic, brokers in self._queues.items() if topic not in named]:
                self._drop_queues(topic, {broker_name})

    def _master_of(self, broker_name: str) -> Registered:
        address = self._brokers[broker_name].master_address
        live = self._live.get(address) if address else None
        return Registered(address, live.ha_server_addr) if live else Registered()

    def register_topic(self, topic: str, queues: Iterable[QueueData]) -> None:
        """Add the queues of one topic on a known broker (a request of RocketMQ 5)."""
        self.revision += 1
        for queue in queues:
            if queue.broker_name in self._brokers:
                self._queues.setdefault(topic, {})[queue.broker_name] = queue

    def heartbeat(self, broker_addr: str, *, now: int, connection: Hashable) -> None:
        """Note that a broker is still alive (a request of RocketMQ 5)."""
        live = self._live.get(broker_addr)
        if live is not None:
            live.heard_millis = now
            live.connection = connection

    def query_data_version(
        self, broker_addr: str, version: DataVersion, *, now: int
    ) -> tuple[bool, DataVersion | None]:
        """Whether the broker must register again, and its known version; if it need not, it counts as heard of."""
        live = self._live.get(broker_addr)
        if live is None:
            return True, None
        changed = live.data_version != version
        if not changed:
            live.heard_millis = now
        return changed, live.data_version

    def unregister(self, broker: BrokerIdentity) -> None:
        self._live.pop(broker.broker_addr, None)
        known = self._brokers.get(broker.broker_name)
        if known is not None and broker.broker_addr in known.broker_addrs.values():
            # Not by its id: that may belong to another broker since, which was elected in its place.
            others = {id_: other for id_, other in known.broker_addrs.items() if other != broker.broker_addr}
            self._keep_addresses(known, others)

    def drop_connection(self, connection: Hashable) -> list[str]:
        """Forget the brokers that registered over `connection`; return their addresses."""
        return self._drop([address for address, live in self._live.items() if live.connection == connection])

    def expire(self, now: int) -> list[Hashable]:
        """Forget brokers that were silent for too long; return their connections for the caller to close."""
        silent = {
            address: live.connection
            for address, live in self._live.items()
            if live.heard_millis + live.expires_millis < now
        }
        self._drop(list(silent))
        return list(silent.values())

    def _drop(self, addresses: list[str]) -> list[str]:
        for address in addresses:
            del self._live[address]
            for known in list(self._brokers.values()):
                if address in known.broker_addrs.values():
                    self._keep_addresses(
                        known, {id_: other for id_, other in known.broker_addrs.items() if other != address}
                    )
        return addresses

    def _keep_addresses(self, known: BrokerData, addresses: dict[int, str]) -> None:
        """Keep only `addresses` of a broker name; if there are none, forget its cluster entry and topics, too."""
        self.revision += 1
        name = known.broker_name
        if addresses:
            self._brokers[name] = structs.replace(known, broker_addrs=addresses)
            return
        del self._brokers[name]
        names = self._clusters.get(known.cluster, set())
        names.discard(name)
        if not names:
            self._clusters.pop(known.cluster, None)
        for topic in list(self._queues):
            self._drop_queues(topic, {name})

    def _drop_queues(self, topic: str, broker_names: Iterable[str]) -> None:
        queues = self._queues[topic]
        for name in broker_names:
            queues.pop(name, None)
        if not queues:
            del self._queues[topic]

    # --- questions ----------------------------------------------------------------------------------------------

    def route(self, topic: str) -> TopicRouteData | None:
        """All queues and all brokers of a topic, slaves included; None when no known broker serves it."""
        queues = self._queues.get(topic, {})
        brokers = tuple(self._brokers[name] for name in sorted(queues) if name in self._brokers)
        if not brokers:
            return None
        return TopicRouteData(broker_datas=brokers, queue_datas=tuple(queues[name] for name in sorted(queues)))

    def cluster_info(self) -> ClusterInfo:
        return ClusterInfo(
            broker_addr_table=dict(self._brokers),
            cluster_addr_table={cluster: frozenset(names) for cluster, names in self._clusters.items()},
        )

    def broker(self, broker_name: str) -> BrokerData | None:
        return self._brokers.get(broker_name)

    def topics(self) -> tuple[str, ...]:
        return tuple(self._queues)

    def topics_of_cluster(self, cluster: str) -> tuple[str, ...]:
        names = self._clusters.get(cluster, set())
        return tuple(topic for topic, queues in self._queues.items() if not names.isdisjoint(queues))

    def system_topics(self) -> tuple[tuple[str, ...], str | None]:
        """Names of clusters and brokers, each of which is also a topic, and the address of one live broker."""
        names = [*self._clusters, *self._brokers]
        return tuple(dict.fromkeys(names)), next(iter(self._live), None)

    def unit_topics(self, *, with_bits: int, without_bits: int = 0) -> tuple[str, ...]:
        """Topics whose system flag has `with_bits` and none of `without_bits`."""
        return tuple(
            topic
            for topic, queues in self._queues.items()
            if any(q.topic_sys_flag & with_bits and not q.topic_sys_flag & without_bits for q in queues.values())
        )

    # --- operators ----------------------------------------------------------------------------------------------

    def wipe_write_perm(self, broker_name: str) -> int:
        """Take the write permission from every topic of a broker, until it registers a new data version."""
        return self._change_perm(broker_name, lambda perm: perm & ~Perm.WRITE)

    def add_write_perm(self, broker_name: str) -> int:
        return self._change_perm(broker_name, lambda perm: int(READ_WRITE))

    def _change_perm(self, broker_name: str, change: Callable[[int], int]) -> int:
        self.revision += 1
        count = 0
        for queues in self._queues.values():
            queue = queues.get(broker_name)
            if queue is not None:
                queues[broker_name] = structs.replace(queue, perm=int(change(queue.perm)))
                count += 1
        return count

    def delete_topic(self, topic: str, cluster: str | None = None) -> None:
        """Forget a topic, everywhere or on the brokers of one cluster."""
        if topic in self._queues:
            self.revision += 1
            names = self._queues[topic].keys() if cluster is None else self._clusters.get(cluster, set())
            self._drop_queues(topic, set(names))
