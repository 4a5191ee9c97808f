"""The handlers of a name server. Each reads the header of its request, calls the route table, and makes the reply."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Container, Iterable, Mapping
from hashlib import blake2b

from msgspec import structs

from downrange.clock import Clock
from downrange.model.topics import TopicConfig
from downrange.namesrv.config import REMOTELY_CHANGEABLE, NamesrvConfig
from downrange.namesrv.kv_config import KVConfig
from downrange.namesrv.route_table import (
    BROKER_EXPIRES_MILLIS,
    UNIT_BIT,
    UNIT_SUB_BIT,
    BrokerIdentity,
    RouteTable,
)
from downrange.protocol.bodies.body import decode_body, encode_body, encode_java_body
from downrange.protocol.bodies.data_version import DataVersion
from downrange.protocol.bodies.kv_config import (
    ORDER_TOPIC_CONFIG,
    GetKVConfigResponse,
    KVConfigRequest,
    KVNamespaceRequest,
    KVTable,
    PutKVConfigRequest,
)
from downrange.protocol.bodies.members import BrokerHeartbeatRequest, BrokerMemberGroup, BrokerMemberGroupRequest
from downrange.protocol.bodies.registration import (
    BrokerIdentityRequest,
    QueryDataVersionResponse,
    RegisterBrokerBody,
    RegisterBrokerRequest,
    RegisterBrokerResponse,
    decode_registration,
)
from downrange.protocol.bodies.routes import (
    AddWritePermResponse,
    BrokerNameRequest,
    GetRouteInfoRequest,
    TopicList,
    TopicRouteData,
    TopicsByClusterRequest,
    WipeWritePermResponse,
)
from downrange.protocol.bodies.topics import DeleteTopicInNamesrvRequest, TopicRequest
from downrange.protocol.codes import VERSION_STANDARD_JSON, RequestCode
from downrange.protocol.command import Command
from downrange.protocol.errors import BrokerError, QueryNotFound, TopicNotExist
from downrange.settings import format_properties, to_properties
from downrange.transport.connection import Connection
from downrange.transport.serving import LaterReply, refuse

log = logging.getLogger(__name__)

FAQ = "\nSee http://rocketmq.apache.org/docs/faq/ for further details."


class NamesrvHandlers:
    """The requests a name server answers. Every method takes a request and returns its reply."""

    def __init__(self, routes: RouteTable, kv: KVConfig, config: NamesrvConfig, clock: Clock) -> None:
        self._routes = routes
        self._kv = kv
        self._clock = clock
        self.config = config
        # Encoded routes, kept until a route changes: clients ask for the same routes every 30 s.
        self._encoded_routes: dict[tuple[str, bool | None, str | None], bytes] = {}
        self._encoded_revision = routes.revision
        self._handlers: Mapping[int, Callable[[Command, Connection], Command]] = {
            RequestCode.PUT_KV_CONFIG: self.put_kv_config,
            RequestCode.GET_KV_CONFIG: self.get_kv_config,
            RequestCode.DELETE_KV_CONFIG: self.delete_kv_config,
            RequestCode.GET_KVLIST_BY_NAMESPACE: self.get_kv_list,
            RequestCode.REGISTER_BROKER: self.register_broker,
            RequestCode.UNREGISTER_BROKER: self.unregister_broker,
            RequestCode.QUERY_DATA_VERSION: self.query_data_version,
            RequestCode.GET_ROUTEINFO_BY_TOPIC: self.get_route,
            RequestCode.GET_BROKER_CLUSTER_INFO: self.get_cluster_info,
            RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: self.get_topics,
            RequestCode.GET_TOPICS_BY_CLUSTER: self.get_topics_of_cluster,
            RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: self.get_system_topics,
            RequestCode.GET_UNIT_TOPIC_LIST: self.get_unit_topics,
            RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST: self.get_unit_topics,
            RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: self.get_unit_topics,
            RequestCode.WIPE_WRITE_PERM_OF_BROKER: self.wipe_write_perm,
            RequestCode.ADD_WRITE_PERM_OF_BROKER: self.add_write_perm,
            RequestCode.DELETE_TOPIC_IN_NAMESRV: self.delete_topic,
            RequestCode.REGISTER_TOPIC_IN_NAMESRV: self.register_topic,
            RequestCode.UPDATE_NAMESRV_CONFIG: self.update_config,
            RequestCode.GET_NAMESRV_CONFIG: self.get_config,
            RequestCode.GET_BROKER_MEMBER_GROUP: self.get_member_group,
            RequestCode.BROKER_HEARTBEAT: self.broker_heartbeat,
        }

    @property
    def codes(self) -> Container[int]:
        """The request codes that are answered."""
        return self._handlers.keys()

    def __call__(self, command: Command, connection: Connection) -> Command | LaterReply | None:
        handler = self._handlers.get(command.code, refuse)
        return handler(command, connection)

    # --- brokers ------------------------------------------------------------------------------------------------

    def register_broker(self, command: Command, connection: Connection) -> Command:
        header = command.header(RegisterBrokerRequest)
        data = command.body_bytes
        if header.body_crc32 and zlib.crc32(data) & 0x7FFFFFFF != header.body_crc32:
            raise BrokerError("crc32 not match")
        # A broker registers every 30 s with thousands of topics: an unchanged registration is not parsed again.
        fingerprint = blake2b(data, digest_size=16).digest()
        version = self._routes.version_by(header.broker_addr, fingerprint)
        topics: Iterable[TopicConfig] = ()
        if version is None:
            table = _registration_of(header, data).topic_config_serialize_wrapper
            version, topics = table.data_version, table.topic_config_table.values()
        registered = self._routes.register(
            BrokerIdentity(header.cluster_name, header.broker_name, header.broker_addr, header.broker_id),
            header.ha_server_addr,
            version,
            topics,
            now=self._clock.now(),
            connection=connection,
            expires_millis=header.heartbeat_timeout_millis or BROKER_EXPIRES_MILLIS,
            enable_acting_master=header.enable_acting_master,
            fingerprint=fingerprint,
        )
        order_topics = self._kv.namespace(ORDER_TOPIC_CONFIG)
        return command.reply(
            header=RegisterBrokerResponse(registered.ha_server_addr, registered.master_addr),
            body=b"" if order_topics is None else encode_body(KVTable(order_topics)),
        )

    def unregister_broker(self, command: Command, connection: Connection) -> Command:
        header = command.header(BrokerIdentityRequest)
        self._routes.unregister(
            BrokerIdentity(header.cluster_name, header.broker_name, header.broker_addr, header.broker_id)
        )
        log.info("broker unregistered name=%s address=%s", header.broker_name, header.broker_addr)
        return command.reply()

    def query_data_version(self, command: Command, connection: Connection) -> Command:
        header = command.header(BrokerIdentityRequest)
        version = decode_body(DataVersion, command.body_bytes)
        changed, known = self._routes.query_data_version(header.broker_addr, version, now=self._clock.now())
        return command.reply(
            header=QueryDataVersionResponse(changed), body=b"" if known is None else encode_body(known)
        )

    def register_topic(self, command: Command, connection: Connection) -> Command:
        route = decode_body(TopicRouteData, command.body_bytes)
        self._routes.register_topic(command.header(TopicRequest).topic, route.queue_datas)
        return command.reply()

    def broker_heartbeat(self, command: Command, connection: Connection) -> Command:
        header = command.header(BrokerHeartbeatRequest)
        self._routes.heartbeat(header.broker_addr, now=self._clock.now(), connection=connection)
        return command.reply()

    def get_member_group(self, command: Command, connection: Connection) -> Command:
        header = command.header(BrokerMemberGroupRequest)
        return command.reply(body=encode_body(BrokerMemberGroup(self._routes.broker(header.broker_name))))

    # --- routes -------------------------------------------------------------------------------------------------

    def get_route(self, command: Command, connection: Connection) -> Command:
        header = command.header(GetRouteInfoRequest)
        if self._encoded_revision != self._routes.revision:
            self._encoded_routes.clear()
            self._encoded_revision = self._routes.revision
        is_standard = header.accept_standard_json_only or command.version >= VERSION_STANDARD_JSON
        order = self._kv.get(ORDER_TOPIC_CONFIG, header.topic) if self.config.order_message_enable else None
        key = (header.topic, is_standard, order)
        body = self._encoded_routes.get(key)
        if body is None:
            route = self._routes.route(header.topic)
            if route is None:
                raise TopicNotExist(f"No topic route info in name server for the topic: {header.topic}{FAQ}")
            route = structs.replace(route, order_topic_conf=order)
            body = self._encoded_routes[key] = encode_body(route) if is_standard else encode_java_body(route)
        return command.reply(body=body)

    def get_cluster_info(self, command: Command, connection: Connection) -> Command:
        return command.reply(body=encode_body(self._routes.cluster_info()))

    def get_topics(self, command: Command, connection: Connection) -> Command:
        return command.reply(body=encode_body(TopicList(self._routes.topics())))

    def get_topics_of_cluster(self, command: Command, connection: Connection) -> Command:
        cluster = command.header(TopicsByClusterRequest).cluster
        return command.reply(body=encode_body(TopicList(self._routes.topics_of_cluster(cluster))))

    def get_system_topics(self, command: Command, connection: Connection) -> Command:
        names, broker_addr = self._routes.system_topics()
        return command.reply(body=encode_body(TopicList(names, broker_addr)))

    def get_unit_topics(self, command: Command, connection: Connection) -> Command:
        wanted = UNIT_BIT if command.code == RequestCode.GET_UNIT_TOPIC_LIST else UNIT_SUB_BIT
        unwanted = UNIT_BIT if command.code == RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST else 0
        topics = self._routes.unit_topics(with_bits=wanted, without_bits=unwanted)
        return command.reply(body=encode_body(TopicList(topics)))

    # --- operators ----------------------------------------------------------------------------------------------

    def wipe_write_perm(self, command: Command, connection: Connection) -> Command:
        name = command.header(BrokerNameRequest).broker_name
        count = self._routes.wipe_write_perm(name)
        log.info("write permission wiped broker=%s topics=%d", name, count)
        return command.reply(header=WipeWritePermResponse(count))

    def add_write_perm(self, command: Command, connection: Connection) -> Command:
        name = command.header(BrokerNameRequest).broker_name
        count = self._routes.add_write_perm(name)
        log.info("write permission added broker=%s topics=%d", name, count)
        return command.reply(header=AddWritePermResponse(count))

    def delete_topic(self, command: Command, connection: Connection) -> Command:
        header = command.header(DeleteTopicInNamesrvRequest)
        self._routes.delete_topic(header.topic, header.cluster_name or None)
        log.info("topic deleted topic=%s cluster=%s", header.topic, header.cluster_name)
        return command.reply()

    def get_config(self, command: Command, connection: Connection) -> Command:
        return command.reply(body=format_properties(to_properties(self.config)).encode())

    def update_config(self, command: Command, connection: Connection) -> Command:
        """Change settings that may be changed while running; one wrong key or value, and nothing is changed."""
        changed = REMOTELY_CHANGEABLE.changed(self.config, command.body_bytes)
        REMOTELY_CHANGEABLE.keep(changed, changed.config_store_path)
        self.config = changed
        self._routes.drop_topics_left_out = changed.delete_topic_with_broker_registration
        log.info("configuration updated %s", " ".join(command.body_bytes.decode().split()))
        return command.reply()

    # --- key-value configuration --------------------------------------------------------------------------------

    def put_kv_config(self, command: Command, connection: Connection) -> Command:
        _check_kv_names(command)
        header = command.header(PutKVConfigRequest)
        self._kv.put(header.namespace, header.key, header.value)
        return command.reply()

    def get_kv_config(self, command: Command, connection: Connection) -> Command:
        header = command.header(KVConfigRequest)
        value = self._kv.get(header.namespace, header.key)
        if value is None:
            raise QueryNotFound(f"No config item, Namespace: {header.namespace} Key: {header.key}")
        return command.reply(header=GetKVConfigResponse(value))

    def delete_kv_config(self, command: Command, connection: Connection) -> Command:
        _check_kv_names(command)
        header = command.header(KVConfigRequest)
        self._kv.delete(header.namespace, header.key)
        return command.reply()

    def get_kv_list(self, command: Command, connection: Connection) -> Command:
        namespace = command.header(KVNamespaceRequest).namespace
        table = self._kv.namespace(namespace)
        if table is None:
            raise QueryNotFound(f"No config item, Namespace: {namespace}")
        return command.reply(body=encode_body(KVTable(table)))


def _check_kv_names(command: Command) -> None:
    if not command.ext_fields.get("namespace") or not command.ext_fields.get("key"):
        raise BrokerError("namespace or key is null")


def _registration_of(header: RegisterBrokerRequest, data: bytes) -> RegisterBrokerBody:
    if not data:
        return RegisterBrokerBody()
    return decode_registration(data) if header.compressed else decode_body(RegisterBrokerBody, data)
