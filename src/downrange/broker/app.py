"""Composition root of a broker: every part is built here once, started here, and stopped here in order."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from downrange.auth.access_control import AccessControl
from downrange.auth.account_sync import AccountSync
from downrange.auth.audit import AuditLog
from downrange.auth.gate import Gate
from downrange.auth.guard import Guard
from downrange.auth.inner_account import InnerAccount
from downrange.auth.needs import BROKER_NEEDS
from downrange.auth.server_access import ACCOUNTS
from downrange.broker.access import BrokerAccess, plain_access, user_access
from downrange.broker.admission import Admission, FlowControl
from downrange.broker.bloom_filter import BloomFilter
from downrange.broker.clients import Consumers, Producers
from downrange.broker.config import (
    REMOTELY_CHANGEABLE,
    BrokerConfig,
    address_warnings,
    advertised_host,
    check_controller,
    check_role,
    keys_without_effect,
    refuse_unserved,
    with_acl_file,
    without_class_names,
)
from downrange.broker.controller.assembly import ControlledBroker, Surroundings
from downrange.broker.controller.duties import Duties
from downrange.broker.filter_data import ConsumerFilters
from downrange.broker.groups import CommittedOffsets, Groups
from downrange.broker.handlers.acks import Acks
from downrange.broker.handlers.assignment import AssignmentHandlers
from downrange.broker.handlers.clients import ClientHandlers
from downrange.broker.handlers.config import ConfigHandlers
from downrange.broker.handlers.consumers import ConsumerHandlers
from downrange.broker.handlers.groups import GroupHandlers
from downrange.broker.handlers.offsets import OffsetHandlers
from downrange.broker.handlers.plain_acl import PlainAclHandlers
from downrange.broker.handlers.pop import PopHandlers
from downrange.broker.handlers.pops import Pops
from downrange.broker.handlers.progress import ProgressHandlers
from downrange.broker.handlers.query import QueryHandlers
from downrange.broker.handlers.recall import RecallReader, TimerHandlers
from downrange.broker.handlers.replicas import ReplicaHandlers
from downrange.broker.handlers.reply import ReplyHandlers
from downrange.broker.handlers.send_back import SendBackReader
from downrange.broker.handlers.send_reader import SendReader
from downrange.broker.handlers.sends import Sends
from downrange.broker.handlers.statistics import ServiceFigures, StatisticsHandlers
from downrange.broker.handlers.topics import TopicHandlers
from downrange.broker.handlers.transactions import TransactionHandlers
from downrange.broker.handlers.users import UserHandlers
from downrange.broker.handlers.usual_sends import usual_sends
from downrange.broker.json_file import JsonFile
from downrange.broker.live_config import LiveConfig
from downrange.broker.message_writer import MessageWriter
from downrange.broker.metrics import MetricSources, MetricsServer, Traffic
from downrange.broker.pop.assignment import RequestModes
from downrange.broker.pop.orders import OrderStates
from downrange.broker.pop.pop import Pop
from downrange.broker.pop.revival import Revival
from downrange.broker.pop.state import PopState
from downrange.broker.pull_checks import PullChecks
from downrange.broker.pulls import Pulls
from downrange.broker.queue_locks import QueueLocks
from downrange.broker.replication.auto_switch import AutoSwitchReplication, HaPort
from downrange.broker.replication.in_sync import InSyncSlaves
from downrange.broker.replication.login import slave_access
from downrange.broker.replication.master import Slaves
from downrange.broker.request_path import RequestPath
from downrange.broker.role_services import RoleServices
from downrange.broker.routes import Commands
from downrange.broker.services.delay import DelayService
from downrange.broker.services.flushing import Flusher
from downrange.broker.services.housekeeping import clean_filters, clean_up, expire_clients, save_every, save_soon
from downrange.broker.services.registration import Registration
from downrange.broker.services.replication import (
    MasterReplication,
    Replication,
    SlaveReplication,
    listening_socket,
)
from downrange.broker.services.slave_sync import SlaveSync
from downrange.broker.services.timer import TimerService
from downrange.broker.services.transactions import TransactionService
from downrange.broker.signed_pool import signed_pool
from downrange.broker.statistics import Statistics, run_statistics
from downrange.broker.stored_topics import MessageTopics
from downrange.broker.table_journal import JournaledTables, TableJournal
from downrange.broker.tables import Tables
from downrange.broker.timed import Timing
from downrange.broker.timer_metrics import TimerMetrics
from downrange.broker.topics import Topics
from downrange.broker.transactions.half_messages import HalfMessages
from downrange.broker.user_access import check_access, inner_user
from downrange.broker.waiting_pulls import WaitingPulls
from downrange.clock import Clock, SystemClock
from downrange.compiled import VARIANT
from downrange.model.message import TopicQueue
from downrange.model.message_id import pack_host
from downrange.protocol.codes import RequestCode
from downrange.settings import (
    ConfigError,
    Property,
    check_known,
    configure,
    namesrv_addresses,
    read_properties,
    readable_secrets,
)
from downrange.store.config import BrokerRole, StoreConfig
from downrange.store.errors import FlushFailed
from downrange.store.free_memory import give_back_memory
from downrange.store.message_store import MessageStore
from downrange.store.retention import Retention
from downrange.transport.busy_poll import BusyPoll
from downrange.transport.connection import Connection
from downrange.transport.errors import ConnectFailed, ListenFailed
from downrange.transport.limits import Limits
from downrange.transport.pool import split_address
from downrange.transport.running_services import running_services
from downrange.transport.server import Server
from downrange.transport.serving import refuse_all
from downrange.transport.tls import ServerTls, server_tls
from downrange.transport.tls_config import TlsConfig, TlsMode, resolved

log = logging.getLogger(__name__)

_VIP_PORT_BELOW = 2
_PORT_ATTEMPTS = 20


def load_config(path: Path | None, overrides: dict[str, Property]) -> tuple[BrokerConfig, StoreConfig, list[str]]:
    """The configuration of a `broker.conf` and a command line, with what was changed while running, and warnings."""
    properties = without_class_names({**(read_properties(path) if path else {}), **overrides})
    refuse_unserved(properties)
    warnings = check_known(properties, [BrokerConfig, StoreConfig, TlsConfig], keys_without_effect())
    environment = namesrv_addresses()
    if "namesrvAddr" not in properties and environment:
        properties["namesrvAddr"] = Property(environment, "NAMESRV_ADDR")
    store = configure(StoreConfig, properties)
    changed_file = changed_settings_path(store)
    if changed_file.exists():
        changed = read_properties(changed_file)
        properties |= {key: value for key, value in changed.items() if key in REMOTELY_CHANGEABLE}
        store = configure(StoreConfig, properties)
    config = configure(BrokerConfig, properties)
    store = under_controller(config, store)
    slave_access(store)  # a wrong list or a missing secret is found before anything starts
    check_controller(config)
    config = with_acl_file(check_role(config, store.broker_role), path)
    check_access(config, store.broker_role)
    warnings += readable_secrets(
        properties, [BrokerConfig, StoreConfig, TlsConfig], {"haSecretFile": store.ha_secret_file}
    )
    idle = {key: given.value for key, given in properties.items() if key in keys_without_effect()}
    config = replace(config, tls=configure(TlsConfig, properties), without_effect=idle)
    for address in config.namesrv_addresses:
        try:
            split_address(address)
        except ConnectFailed as error:
            raise ConfigError(f"namesrvAddr: {error}{properties['namesrvAddr'].place}") from None
    return config, store, warnings + address_warnings(config)


def under_controller(config: BrokerConfig, store: StoreConfig) -> StoreConfig:
    """The configuration of the store: a broker under a controller begins as a slave, whatever the file says."""
    return replace(store, broker_role=BrokerRole.SLAVE) if config.enable_controller_mode else store


def protections(config: BrokerConfig, store: StoreConfig) -> dict[str, bool]:
    """The settings that protect a broker which other machines can reach, and whether each is on."""
    found = {
        ACCOUNTS: config.acl_enable or config.authentication_enabled,
        "tls.server.mode=enforcing": resolved(config.tls).mode is TlsMode.ENFORCING,
    }
    if store.broker_role is not BrokerRole.SLAVE or config.enable_controller_mode:
        found["haSecretFile or haAllowedSlaveAddresses"] = slave_access(store).is_limited
    return found


def changed_settings_path(store: StoreConfig) -> Path:
    """Where settings changed by request 25 are kept."""
    return store.store_path_root_dir / "config" / "broker.properties"


class Ports(NamedTuple):
    """The main port, the VIP port and, for a master, that for slaves, taken but not accepting yet."""

    main: Server
    vip: Server
    slaves: socket.socket | None


@dataclass(frozen=True, slots=True)
class RunningBroker:
    """A broker that serves: its configuration with the real ports, and the parts a caller may want to look at."""

    config: LiveConfig
    store: MessageStore
    topics: Topics
    filters: ConsumerFilters
    transactions: TransactionService
    timer: TimerService
    pop: Pop
    replication: Replication
    server: Server
    codes: frozenset[int]
    """The request codes that are served."""
    metrics_port: int | None
    registered_with: int
    access: BrokerAccess
    inner: InnerAccount | None
    gate: Gate | None
    audit: AuditLog
    statistics: Statistics

    @property
    def own_account(self) -> tuple[str, str] | None:
        """Name and secret of the account of parts of this process that ask servers; None without access control."""
        if self.inner is None:
            return None
        user = inner_user(self.config.broker)
        if user is not None:
            return user.username, user.password
        if self.access.plain_acl is not None:  # the name servers know the accounts of the files
            found = self.access.plain_acl.access_control.administrator()
            if found is not None:
                return found
        return self.inner.access_key, self.inner.secret_key


@asynccontextmanager
async def broker(
    config: BrokerConfig,
    store_config: StoreConfig,
    clock: Clock | None = None,
    *,
    access: AccessControl | None = None,
) -> AsyncIterator[RunningBroker]:
    """A running broker; it stops when the block ends: unregistered, drained, saved, flushed and marked as clean.

    With `access`, or with access control in the configuration, every request needs an account with the right rights.
    """
    log.info("broker starting name=%s variant=%s", config.broker_name, VARIANT)
    clock = clock or SystemClock()
    store_config = under_controller(config, store_config)
    check_access(config, store_config.broker_role)
    chosen = plain_access(config, clock) if access is None else BrokerAccess(access)
    filters = _filters(config, store_config, clock)
    bitmap_of = filters.bitmap_of if config.enable_calc_filter_bit_map else None
    store = MessageStore.open(store_config, clock=clock, bitmap_of=bitmap_of)
    try:
        if access is None and config.authentication_enabled:
            chosen = user_access(config, store_config)
        async with _listening(config, store_config, server_tls(config.tls)) as ports:
            address = advertised_host(config)
            ha_port = ports.slaves.getsockname()[1] if ports.slaves is not None else ports.main.port + 1
            live = LiveConfig(
                replace(config, listen_port=ports.main.port, broker_ip1=address),
                replace(store_config, ha_listen_port=ha_port),
            )
            async with _serving(live, store, filters, ports, clock, chosen) as running:
                yield running
    finally:
        store.close()


def _filters(config: BrokerConfig, store: StoreConfig, clock: Clock) -> ConsumerFilters:
    if config.enable_calc_filter_bit_map and not store.enable_consume_queue_ext:
        log.warning("enableCalcFilterBitMap has no effect reason=enableConsumeQueueExt is off")
    bloom = BloomFilter.sized_for(config.expect_consumer_num_use_filter, config.max_error_rate_of_bloom_filter)
    return ConsumerFilters(JsonFile(store.store_path_root_dir / "config" / "consumerFilter.json"), bloom, clock)


@asynccontextmanager
async def _serving(
    live: LiveConfig,
    store: MessageStore,
    filters: ConsumerFilters,
    ports: Ports,
    clock: Clock,
    access: BrokerAccess,
) -> AsyncIterator[RunningBroker]:
    main, vip, for_slaves = ports
    directory = store.config.store_path_root_dir / "config"
    topics = Topics(
        JsonFile(directory / "topics.json"), live.broker, clock, max(18, len(store.config.delay_level_millis()))
    )
    groups = Groups(JsonFile(directory / "subscriptionGroup.json"), clock)
    offsets = CommittedOffsets(JsonFile(directory / "consumerOffset.json"))
    consumers, producers = Consumers(), Producers()
    tables = Tables(topics, groups, offsets, consumers, producers, filters)
    statistics = Statistics(clock.now(), live.broker.broker_cluster_name)
    waiting = WaitingPulls()
    flusher = Flusher(store, live, clock)
    is_controlled = live.broker.enable_controller_mode
    slaves: Slaves | InSyncSlaves = (InSyncSlaves if is_controlled else Slaves)(store, live, clock)
    writer = MessageWriter(store, waiting, flusher, statistics, clock, slaves)
    delay = DelayService(store, writer, JsonFile(directory / "delayOffset.json"), clock)
    timer = TimerService(store, writer, TimerMetrics(JsonFile(directory / "timermetrics"), clock), live, clock)
    timing = Timing(live, topics, timer.count_at)
    half_messages = HalfMessages(store, writer, offsets, pack_host(live.broker.broker_ip1, live.broker.listen_port))
    topics.adopt(chain(map(TopicQueue._make, store.queues.names()), half_messages.destinations()))
    orders = OrderStates(JsonFile(directory / "consumerOrderInfo.json"))
    modes = RequestModes(JsonFile(directory / "messageRequestMode.json"))
    pop = Pop(PopState(live, tables, writer, orders, clock))
    revival = Revival(pop.state)
    transactions = TransactionService(live, half_messages, producers, topics, writer, clock)
    flow = FlowControl(live, store)
    writer.on_appended = flow.appended
    retention = Retention(store)
    pool = signed_pool(live.broker)
    registration = Registration(live, topics, pool)
    locks = QueueLocks(JsonFile(directory / "queueLocks.json"), clock.now())
    for_master = RoleServices(delay=delay.run, revival=revival.run, transactions=transactions.run)
    sync = SlaveSync(tables, delay, timer, modes, registration, pool)
    if access.users is not None:
        sync.copy_accounts = AccountSync(access.users, pool.request).copy
    controlled: ControlledBroker | None = None
    if isinstance(slaves, InSyncSlaves):
        assert for_slaves is not None
        journal = TableJournal(live, JournaledTables(tables, delay, orders, locks, modes, access.users), writer, clock)
        for_master = RoleServices(
            delay=delay.run, revival=revival.run, transactions=transactions.run, table_journal=journal.run
        )
        port = HaPort(for_slaves, main.tls, pool.tls)
        replication: Replication = (auto_switch := AutoSwitchReplication(live, writer, flusher, slaves, clock, port))
        duties = Duties(journal, half_messages, revival, timer, topics)
        around = Surroundings(live, writer, registration, sync, pool, clock)
        controlled = ControlledBroker(around, auto_switch, duties, for_master)
    elif for_slaves is None:
        replication = SlaveReplication(live, registration, writer, flusher, sync, clock)
    else:
        replication = MasterReplication(slaves, for_slaves, main.tls)
        revival.recover()
        for_master.start()

    reader = SendReader(live, topics, groups, writer, timing)
    reader.on_half = half_messages.stored
    transactions_handlers = TransactionHandlers(live, half_messages, writer, flusher, timing)
    usual = usual_sends(topics, store.queues, reader.cluster_property.encode(), reader.store_host)
    others = {
        int(RequestCode.CONSUMER_SEND_MSG_BACK): SendBackReader(live, topics, groups, store, writer).read,
        int(RequestCode.END_TRANSACTION): transactions_handlers.read_end,
        int(RequestCode.RECALL_MESSAGE): RecallReader(live, topics, writer, timing).read,
    }
    sends = Sends(writer, reader, usual, others, registration.register_changes)
    pops, acks = Pops(pop), Acks(pop)
    checks = PullChecks(live, topics, groups, consumers, filters)
    pulls = Pulls(live, checks, offsets, store, waiting, writer)
    routes = [
        transactions_handlers.routes,
        ReplyHandlers(reader, writer, producers).routes,
        ClientHandlers(live, tables, locks, clock, was_killed=not store.recovery.clean).routes,
        OffsetHandlers(store, offsets).routes,
        TopicHandlers(live, tables, store, retention, statistics, registration.register_changes).routes,
        GroupHandlers(live, tables, statistics).routes,
        QueryHandlers(store, consumers).routes,
        ProgressHandlers(live, tables, store, statistics, clock).routes,
        StatisticsHandlers(
            live, store, statistics, ServiceFigures(delay, flow, timer, replication.runtime_info), clock
        ).routes,
        ConsumerHandlers(live, tables, store).routes,
        ConfigHandlers(live, store, topics, changed_settings_path(store.config), clock).routes,
        PlainAclHandlers(live, access.plain_acl).routes,
        TimerHandlers(timer).routes,
        PopHandlers(pop).routes,
        AssignmentHandlers(live, tables, modes).routes,
        UserHandlers(live, access.users).routes,
        (controlled.handlers if controlled is not None else ReplicaHandlers(live, None, None)).routes,
    ]

    commands = Commands(routes, statistics)
    if controlled is not None:
        commands.changes = journal
        flow.has_other_master = controlled.manager.has_other_master
    served = frozenset(commands.routes.keys() | sends.codes | pulls.codes | pops.codes | acks.codes)
    gate = inner = None
    audit = AuditLog(live.broker.audit_log_file, live.broker.audit_log_file_size)
    if access.control is not None:
        inner = InnerAccount(access.control)
        make_guard = partial(Guard, inner, BROKER_NEEDS, MessageTopics(store), served)
        gate = Gate(make_guard, audit, clock, live.broker.failed_login_wait_mills / 1000)
        producers.may_see = gate.may_publish
    admission = Admission(flow, gate)

    def closed(connection: Connection) -> None:
        consumers.drop(connection)
        producers.drop(connection)
        waiting.drop(connection)
        pop.state.waiting.drop(connection)
        if gate is not None:
            gate.forget(connection)

    # The VIP port serves everything but pulls.
    for server, families in ((main, (sends, pulls, pops, acks)), (vip, (sends, pops, acks))):
        server.serve = RequestPath(admission, commands, *families).serve
        server.on_close = closed
        await server.start()

    traffic = Traffic(
        statistics,
        {"sends": sends, "pulls": pulls, "pops": pops, "acks": acks},
        lambda: half_messages.waiting,
        replication.lags,
        gate.figures if gate is not None else None,
        controlled.manager.figures if controlled is not None else None,
        pop.state,
    )
    metrics = MetricsServer(MetricSources(live, store, tables, traffic, clock, timer))
    await metrics.start()
    gc.collect()
    gc.freeze()  # what recovery built stays; a full collection over ten thousand topics would stall every sender
    services = running_services(
        **access.services(waiting, clock),
        flush=flusher.run(writer.dispatched),
        timer=timer.run(),
        timer_saving=timer.save_for_ever(),
        for_master=for_master.run(),
        flow_control=flow.tick(),
        registration=registration.run(),
        statistics=run_statistics(statistics, clock),
        client_expiry=expire_clients(consumers, producers, clock),
        topic_saving=save_soon(topics, clock),
        group_saving=save_soon(groups, clock),
        filter_saving=save_soon(filters, clock),
        filter_clean_up=clean_filters(filters, live, clock),
        offset_saving=save_every(
            offsets, lambda: live.broker.flush_consumer_offset_interval / 1000, clock, flusher.flushed
        ),
        order_saving=save_every(orders, lambda: 10.0, clock),
        mode_saving=save_soon(modes, clock),
        lock_saving=save_soon(locks, clock),
        delay_saving=save_every(delay, lambda: live.store.flush_delay_offset_interval / 1000, clock),
        clean_up=clean_up(retention, store, live, clock),
        replication=replication.run(),
        **({} if controlled is None else controlled.services()),
    )
    try:
        async with services:
            try:
                await replication.start()
                registered = await registration.register()
                give_back_memory()  # what was read to recover, and the registration of all topics
                yield RunningBroker(
                    live,
                    store,
                    topics,
                    filters,
                    transactions,
                    timer,
                    pop,
                    replication,
                    main,
                    served,
                    metrics.port,
                    registered,
                    access,
                    inner,
                    gate,
                    audit,
                    statistics,
                )
            finally:
                await registration.unregister()
                waiting.notify_all()
                pop.state.waiting.wake_all()
                await main.stop()
                await vip.stop()
                await replication.stop()
    finally:
        await metrics.stop()
        if controlled is not None:
            await controlled.close()
        await pool.close()
        flusher.close()
        audit.close()
        half_messages.settle()
        timer.close()
        for table in (topics, groups, filters, delay, orders, modes, locks):
            table.save()
        with suppress(FlushFailed):  # which was logged: then the offsets stay behind the log that is on disk
            store.commit()
            store.flush_commit_log()
            offsets.save()


@asynccontextmanager
async def _listening(config: BrokerConfig, store: StoreConfig, tls: ServerTls | None) -> AsyncIterator[Ports]:
    limits = replace(Limits(), idle_seconds=float(config.server_channel_max_idle_time_seconds))
    busy_poll = None
    if config.busy_poll_micros:
        busy_poll = BusyPoll(asyncio.get_running_loop(), config.busy_poll_micros / 1_000_000)
    for attempt in range(_PORT_ATTEMPTS):
        main = Server(refuse_all, config.bind_address, config.listen_port, limits=limits, tls=tls)
        await main.bind()
        vip_port = main.port - _VIP_PORT_BELOW
        vip = Server(refuse_all, config.bind_address, vip_port, limits=limits, tls=tls)
        main.busy_poll = vip.busy_poll = busy_poll
        for_slaves = None
        try:
            await vip.bind()
            if store.broker_role is not BrokerRole.SLAVE or config.enable_controller_mode:
                # Port 0: Linux gives servers odd ports and connections even ones, so the next one is often taken.
                next_port = main.port + 1 if config.listen_port else 0
                for_slaves = listening_socket(config.bind_address, store.ha_listen_port or next_port)
        except ListenFailed:
            await vip.stop()
            await main.stop()
            if config.listen_port or attempt == _PORT_ATTEMPTS - 1:
                raise
            continue  # port 0: another free port may have a free VIP port below it
        break
    try:
        yield Ports(main, vip, for_slaves)
    finally:
        await main.stop()
        await vip.stop()
        if for_slaves is not None:
            for_slaves.close()
