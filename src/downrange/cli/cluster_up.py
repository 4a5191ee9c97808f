"""`downrange cluster up|status|kill|down`: a whole cluster on this machine, and the state of its replicas."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from downrange.cli.cluster_actions import again_and_again, ask, broker_row
from downrange.cli.controller import status_parts
from downrange.cli.etcd_process import check_etcd
from downrange.cli.local_cluster import ClusterFailed, Kind, Layout, LocalCluster, Member, names
from downrange.cli.options import Json, Namesrv, TlsFile, UsageError, Watch
from downrange.cli.output import Answer, Column, Table, print_answer

if TYPE_CHECKING:
    from downrange.client.admin import Admin
    from downrange.client.admin.cluster import Replica
    from downrange.client.brokers import Broker
    from downrange.client.per_server import PerServer

Data = Annotated[Path, typer.Option("--data", "-d", help="Directory of the local cluster.")]
_DEFAULT = Path("downrange-cluster")
_MAX_PROCESSES = 64


def up(
    brokers: Annotated[int, typer.Option(help="Number of masters.", min=1)] = 2,
    replicas: Annotated[int, typer.Option(help="Copies of each broker, the master included.", min=1)] = 2,
    sync: Annotated[bool, typer.Option("--sync", help="Acknowledge a send only when a slave has it, too.")] = False,
    controller: Annotated[
        bool,
        typer.Option("--controller", help="Let controllers choose the masters, also when a master dies; needs etcd."),
    ] = False,
    controllers: Annotated[int, typer.Option(help="Number of controllers, with --controller.", min=1, max=9)] = 2,
    etcd_nodes: Annotated[int, typer.Option(help="Number of etcd nodes, with --controller.", min=1, max=7)] = 1,
    data: Data = _DEFAULT,
    namesrv_port: Annotated[
        int, typer.Option(help="Port of the name server; 0 takes a free one.", min=0, max=65535)
    ] = 9876,
    tls_config: TlsFile = None,
) -> None:
    """Start a whole cluster on this machine: a name server, masters and slaves, each in its own process.

    If the directory holds a cluster already, this cluster is started again; running processes are left alone. With
    --tls-config every server takes TLS only, and makes its own connections with the tls.client keys of the file.
    """
    if brokers * replicas > _MAX_PROCESSES:
        raise UsageError(f"{brokers} brokers with {replicas} copies each are more than {_MAX_PROCESSES} processes")
    cluster = LocalCluster.load(data)
    is_new = cluster is None
    if cluster is None:
        if controller:
            check_etcd()
        layout = Layout(
            brokers,
            replicas,
            sync,
            namesrv_port,
            controllers if controller else 0,
            etcd_nodes if controller else 0,
        )
        cluster = LocalCluster.create(data, layout, tls_config)
    elif len(cluster.running) == len(cluster.members):
        raise UsageError(f"the cluster in {cluster.directory} runs already: downrange cluster status --data {data}")
    else:
        masters = len({member.broker for member in cluster.members} - {""})
        typer.echo(f"{cluster.directory} holds a cluster of {masters} brokers: starting it again")
    before = cluster.running
    try:
        cluster.start()
    except BaseException:  # also Ctrl-C: half a cluster is useless, and a new one is laid out again next time
        cluster.stop(10, except_for=before)
        if is_new:
            cluster.forget()
        raise
    typer.echo(f"cluster ready: name server {cluster.namesrv}")
    others = {member: _role(cluster, member) for member in cluster.members if member.role is not Kind.NAMESRV}
    width = max(map(len, others.values()))
    for member, role in others.items():
        typer.echo(f"  {member.name:<16} {role:<{width}}  {member.address}")
    here = "" if data == _DEFAULT else f" --data {data}"
    tls = "" if tls_config is None else f" --tls-config {tls_config}"
    typer.echo(
        f"Try: downrange{tls} message send hello 'Hello, world' -n {cluster.namesrv}\n"
        f"     downrange{tls} cluster status{here}\n"
        f"Stop: downrange cluster down{here}"
    )


def _role(cluster: LocalCluster, member: Member) -> str:
    return "replica" if member.broker and cluster.controllers else member.role


def status(
    namesrv: Namesrv = None,
    data: Data = _DEFAULT,
    json: Json = False,
    watch: Watch = None,
) -> None:
    """Show every broker process with its role, the end of its log, and how far a slave is behind its master.

    With controllers it also shows which controller leads, the epochs and the sync-state sets.

    Asks the name servers given with -n, else those of the local cluster in --data, else those of $NAMESRV_ADDR.
    """
    cluster = LocalCluster.load(data) if namesrv is None else None
    if cluster is None and data != _DEFAULT:
        raise _no_cluster(data)
    if cluster is not None and not cluster.running:
        raise ClusterFailed(f"the cluster in {cluster.directory} is stopped: downrange cluster up --data {data}")

    controllers = [] if cluster is None else cluster.controllers
    servers = namesrv if cluster is None else cluster.namesrv

    async def action(admin: Admin) -> Answer:
        answer = _status(await admin.cluster.replicas(), _dead(cluster))
        if not controllers:
            return answer
        sets = await status_parts(admin, controllers, ())
        return Answer({**answer.document, **sets.document}, [*answer.parts, "", *sets.parts], answer.failed)

    if watch is not None:
        ask(servers, lambda admin: again_and_again(lambda: action(admin), json, watch))
        return
    print_answer(ask(servers, action), as_json=json)
    if _dead(cluster):
        raise typer.Exit(1)


def _dead(cluster: LocalCluster | None) -> list[Member]:
    """Processes of the local cluster that should run and do not."""
    return [] if cluster is None else [member for member in cluster.members if not member.is_running]


def _status(replicas: PerServer[Broker, Replica], dead: list[Member]) -> Answer:
    ends = {broker.name: replica.max_offset for broker, replica in replicas.done.items() if broker.broker_id == 0}
    rows: list[dict[str, Any]] = []
    for broker, replica in sorted(replicas.done.items(), key=lambda item: (item[0].name, item[0].broker_id)):
        end = ends.get(broker.name)
        lag = None if end is None or broker.broker_id == 0 else max(0, end - replica.max_offset)
        row = {"cluster": broker.cluster, **broker_row(broker), "brokerId": broker.broker_id, "role": replica.role}
        rows.append({**row, "maxOffset": replica.max_offset, "lagBytes": lag})
    columns = [
        Column("Cluster Name", "cluster"),
        Column("Broker Name", "broker"),
        Column("BID", "brokerId"),
        Column("Role", "role"),
        Column("Addr", "address"),
        Column("Max Offset", "maxOffset"),
        Column("Lag (bytes)", "lagBytes"),
    ]
    stopped = [f"not running: {names(dead)}"] if dead else []
    return Answer(
        {"brokers": rows, "stopped": [member.name for member in dead]},
        [Table(columns, rows), *stopped],
        replicas.failed,
    )


def down(
    data: Data = _DEFAULT,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the directory with all messages.")] = False,
    seconds: Annotated[float, typer.Option("--wait", help="Seconds to wait for each kind of server.", min=0)] = 30.0,
) -> None:
    """Stop the local cluster in order. Its messages are kept unless --delete is given."""
    cluster = LocalCluster.load(data)
    if cluster is None:
        raise _no_cluster(data)
    stopped = cluster.stop(seconds)
    typer.echo(f"stopped: {names(stopped)}" if stopped else "nothing was running")
    if delete:
        shutil.rmtree(cluster.directory)
        typer.echo(f"deleted: {cluster.directory}")


def kill(
    name: Annotated[str, typer.Argument(help="Process of the local cluster, such as broker-a or namesrv.")],
    data: Data = _DEFAULT,
) -> None:
    """Kill one process of the local cluster, as a crash would, to see what happens; `cluster up` starts it again."""
    cluster = LocalCluster.load(data)
    if cluster is None:
        raise _no_cluster(data)
    member = next((one for one in cluster.running if one.name == name), None)
    if member is None:
        raise UsageError(f"{name} does not run here; running: {names(cluster.running) or 'nothing'}")
    os.kill(member.pid, signal.SIGKILL)
    typer.echo(f"killed: {name} (process {member.pid})")


def _no_cluster(data: Path) -> UsageError:
    return UsageError(f"there is no local cluster in {data.resolve()}: name its directory with --data")
