"""`downrange controller`: run a controller; `downrange controller status|elect|clean|…`: ask controllers that run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from downrange.cli.cluster_actions import asks, broker_row, shows
from downrange.cli.config import settings_text
from downrange.cli.options import Changes, TlsFile, TlsMode, UsageError, key_values
from downrange.cli.output import Answer, Column, Table

if TYPE_CHECKING:
    from downrange.client.admin import Admin
    from downrange.client.admin.controllers import BrokerReplica, ReplicasInfo

app = typer.Typer(
    help="Run a controller, see which replicas are in sync, elect a master by hand.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    invoke_without_command=True,
    subcommand_metavar="[COMMAND] [ARGS]...",
)

Controllers = Annotated[
    str, typer.Option("--controller", "-a", help="Controllers of one group, separated by ';'.", show_default=True)
]
DEFAULT = "127.0.0.1:9878"
SetName = Annotated[str, typer.Argument(help="Broker name of the set.")]
AnyBroker = Annotated[
    str | None, typer.Option("--broker", "-b", help="Replicas of this broker name, or one host:port.")
]
AnyCluster = Annotated[str | None, typer.Option("--cluster", "-c", help="Only this cluster.")]


@app.callback()
def run(
    context: typer.Context,
    listen: str | None = typer.Option(None, "--listen", "-l", help="host:port to listen on. [127.0.0.1:9878]"),
    etcd: str | None = typer.Option(None, "--etcd", "-e", help="Addresses of etcd, separated by ';'. [127.0.0.1:2379]"),
    config_file: Path | None = typer.Option(None, "--config", "-c", help="RocketMQ controller properties file."),
    self_id: str | None = typer.Option(None, "--id", help="Name of this controller. [its address]"),
    data: Path | None = typer.Option(None, "--data", "-d", help="Directory for settings. [~/controller]"),
    metrics_port: int | None = typer.Option(None, "--metrics-port", help="Port of /metrics; -1 for none. [-1]"),
    tls_mode: TlsMode = None,
    tls_config: TlsFile = None,
    insecure: bool = typer.Option(False, "--insecure", help="Allow an address that other machines can reach."),
    log_level: str = typer.Option("INFO", "--log-level", help="DEBUG, INFO, WARNING or ERROR."),
) -> None:
    """Run a controller until it is stopped with SIGTERM or Ctrl-C; with a command: ask controllers that run."""
    if context.invoked_subcommand is not None:
        return
    from downrange.cli.process import check_bind, overrides, serve, start_logging, warn
    from downrange.controller.app import RunningController, controller, load_config, protections

    host, port = _listen(listen)
    given = overrides(
        bindAddress=host,
        listenPort=port,
        etcdEndpoints=etcd,
        controllerDLegerSelfId=self_id,
        metricsPort=metrics_port,
        configStorePath=data and data / "controller.properties",
        **{"tls.server.mode": tls_mode, "tls.config.file": tls_config},
    )
    config, warnings = load_config(config_file, given)
    check_bind(config.bind_address, protections(config), insecure=insecure)
    start_logging(log_level)
    warn(warnings)

    def ready(running: RunningController) -> tuple[str, dict[str, str]]:
        address = f"{running.server.host}:{running.server.port}"
        return f"controller ready on {address}", {"controller": address}

    serve(controller(config), ready)


def _listen(text: str | None) -> tuple[str | None, str | None]:
    if text is None:
        return None, None
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal():
        raise UsageError(f"--listen {text}: expected host:port")
    return host.removeprefix("[").removesuffix("]"), port


def addresses_of(text: str) -> list[str]:
    """The controllers of `--controller`."""
    found = [part.strip() for part in text.split(";") if part.strip()]
    if not found:
        raise UsageError("--controller: expected host:port, or several of them separated by ';'")
    return found


# --- looking ----------------------------------------------------------------------------------------------------------

_COLUMNS = [
    Column("Broker Set", "set"),
    Column("ID", "brokerId"),
    Column("Role", "role"),
    Column("In Sync", "inSync"),
    Column("Alive", "alive"),
    Column("Addr", "address"),
    Column("Epoch", "masterEpoch"),
    Column("Set Epoch", "syncStateSetEpoch"),
]


def replica_rows(name: str, info: ReplicasInfo) -> list[dict[str, Any]]:
    """A row for each replica of a broker set."""

    def row(replica: BrokerReplica, *, in_sync: bool) -> dict[str, Any]:
        return {
            "set": name,
            "brokerId": replica.broker_id,
            "role": "master" if replica.broker_id == info.master_broker_id else "slave",
            "inSync": in_sync,
            "alive": replica.alive,
            "address": replica.broker_address,
            "masterEpoch": info.master_epoch,
            "syncStateSetEpoch": info.sync_state_set_epoch,
        }

    rows = [row(one, in_sync=True) for one in info.in_sync_replicas]
    rows += [row(one, in_sync=False) for one in info.not_in_sync_replicas]
    return sorted(rows, key=lambda one: int(one["brokerId"]))


async def status_parts(admin: Admin, addresses: Sequence[str], names: Sequence[str]) -> Answer:
    """The leader, and all replicas of broker sets."""
    leader = await admin.controllers.leader(addresses)
    table = (await admin.controllers.sync_state(addresses, names)).replicas_info_table
    rows = [row for name, info in sorted(table.items()) for row in replica_rows(name, info)]
    without = [name for name, info in sorted(table.items()) if info.master_broker_id is None]
    lines: list[Table | str] = [f"controller leader: {leader}", Table(_COLUMNS, rows)]
    lines += [f"no master: {name}" for name in without]
    return Answer({"leader": leader, "replicas": rows, "withoutMaster": without}, lines)


@app.command("status")
@shows
async def status(
    admin: Admin,
    sets: Annotated[list[str] | None, typer.Argument(help="Broker names; all if none are given.")] = None,
    cluster: AnyCluster = None,
    controller: Controllers = DEFAULT,
) -> Answer:
    """Show the controller that leads, and every replica with its role, its epoch and whether it is in sync."""
    names = list(sets or ())
    if cluster is not None:
        names += sorted({one.name for one in await admin.session.brokers(cluster)})
    return await status_parts(admin, addresses_of(controller), names)


@app.command("metadata")
@shows
async def metadata(admin: Admin, controller: Controllers = DEFAULT) -> Answer:
    """Show which controller leads, as each controller sees it."""
    views = await admin.controllers.metadata(addresses_of(controller))
    rows = [
        {
            "address": address,
            "group": view.group,
            "leaderId": view.controller_leader_id,
            "leaderAddress": view.controller_leader_address,
            "isLeader": view.is_leader,
            "peers": view.peers,
        }
        for address, view in views.done.items()
    ]
    columns = [Column(key, key) for key in ("address", "group", "leaderId", "leaderAddress", "isLeader", "peers")]
    return Answer({"controllers": rows}, [Table(columns, rows)], views.failed)


@app.command("epochs")
@shows
async def epochs(admin: Admin, broker: AnyBroker = None, cluster: AnyCluster = None) -> Answer:
    """Show the epochs in which each replica wrote its log."""
    found = await admin.controllers.epochs(cluster, broker)
    rows = [
        {
            **broker_row(one),
            "brokerId": cache.broker_id,
            "epoch": entry.epoch,
            "startOffset": entry.start_offset,
            "endOffset": min(entry.end_offset, cache.max_offset),
        }
        for one, cache in found.done.items()
        for entry in cache.epoch_list
    ]
    columns = [
        Column("Broker Name", "broker"),
        Column("BID", "brokerId"),
        Column("Addr", "address"),
        Column("Epoch", "epoch"),
        Column("Start", "startOffset"),
        Column("End", "endOffset"),
    ]
    return Answer({"epochs": rows}, [Table(columns, rows)], found.failed)


@app.command("ha-status")
@shows
async def ha_status(admin: Admin, broker: AnyBroker = None, cluster: AnyCluster = None) -> Answer:
    """Show how much of the log each slave has, for each master."""
    found = await admin.controllers.ha_status(cluster, broker)
    rows: list[dict[str, Any]] = []
    for one, info in found.done.items():
        role = "master" if info.master else "slave"
        end = info.master_commit_log_max_offset if info.master else info.ha_client_runtime_info.max_offset
        rows.append({**broker_row(one), "role": role, "slave": None, "inSync": None, "maxOffset": end, "diff": None})
        rows += [
            {**broker_row(one), "role": role, "slave": link.addr, "inSync": link.in_sync,
             "maxOffset": link.slave_ack_offset, "diff": link.diff}
            for link in info.ha_connection_info
        ]  # fmt: skip
    columns = [
        Column("Broker Name", "broker"),
        Column("Addr", "address"),
        Column("Role", "role"),
        Column("Slave", "slave"),
        Column("In Sync", "inSync"),
        Column("Max Offset", "maxOffset"),
        Column("Lag (bytes)", "diff"),
    ]
    return Answer({"replication": rows}, [Table(columns, rows)], found.failed)


# --- changing ---------------------------------------------------------------------------------------------------------


@app.command("elect")
@asks
async def elect(
    admin: Admin,
    broker_set: SetName,
    broker_id: Annotated[int, typer.Argument(help="Controller id of the replica that shall be master.", min=1)],
    cluster: Annotated[str, typer.Option("--cluster", "-c", help="Cluster of the set.")] = "DefaultCluster",
    unclean: Annotated[
        bool, typer.Option("--unclean", help="Elect a replica that is not in sync: acknowledged messages may be LOST.")
    ] = False,
    controller: Controllers = DEFAULT,
) -> Answer:
    """Make one replica the master."""
    addresses = addresses_of(controller)
    elected = await admin.controllers.elect(addresses, broker_set, broker_id, cluster=cluster, is_unclean=unclean)
    master = elected.master
    what = "elected" if elected.is_new else "is master already"
    text = f"{broker_set} {master.master_broker_id} {what}: {master.master_address}, epoch {master.master_epoch}"
    document = {
        "set": broker_set,
        "isNew": elected.is_new,
        "masterBrokerId": master.master_broker_id,
        "masterAddress": master.master_address,
        "masterEpoch": master.master_epoch,
        "syncStateSetEpoch": master.sync_state_set_epoch,
    }
    return Answer(document, [text])


@app.command("clean")
@asks
async def clean(
    admin: Admin,
    broker_set: SetName,
    ids: Annotated[str | None, typer.Option("--ids", help="Controller ids, separated by ';'. [the whole set]")] = None,
    living: Annotated[bool, typer.Option("--living/--no-living", help="Forget replicas that are alive, too.")] = False,
    cluster: AnyCluster = None,
    controller: Controllers = DEFAULT,
) -> Answer:
    """Make the controller forget replicas that will not come back, or a whole set."""
    await admin.controllers.clean(addresses_of(controller), broker_set, ids, cluster=cluster, is_living=living)
    return Answer({"set": broker_set, "ids": ids}, [f"forgotten: {broker_set} {ids or '(all replicas)'}"])


@app.command("config")
@asks
async def show_config(admin: Admin, controller: Controllers = DEFAULT) -> Answer:
    """Show the settings of controllers."""
    settings = await admin.controllers.config(addresses_of(controller))
    tables = {one: dict(sorted(table.items())) for one, table in settings.done.items()}
    rows = [{"address": one, "config": table} for one, table in tables.items()]
    return Answer({"controllers": rows}, [settings_text(*item) for item in tables.items()], settings.failed)


@app.command("update-config")
@asks
async def update_config(admin: Admin, changes: Changes, controller: Controllers = DEFAULT) -> Answer:
    """Change settings of controllers while they run."""
    outcomes = await admin.controllers.update_config(addresses_of(controller), key_values(changes))
    lines = [f"settings updated on {one}" for one in outcomes.done]
    return Answer({"done": list(outcomes.done)}, lines, outcomes.failed)
