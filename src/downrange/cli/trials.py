"""Commands that try something out, or copy what a cluster knows into files."""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from downrange.cli.cluster_actions import asks, broker_row, shows
from downrange.cli.options import Broker, Cluster, Topic, UsageError
from downrange.cli.output import Answer, Column, Table

if TYPE_CHECKING:
    from downrange.client.admin import Admin
    from downrange.client.admin.trials import TriedSend

Count = Annotated[int, typer.Option("--count", "-a", min=1, help="Messages to send.")]
Size = Annotated[int, typer.Option("--size", "-s", min=1, help="Bytes of each message.")]


@asks
async def send_rt(admin: Admin, topic: Topic, count: Count = 100, size: Size = 128) -> Answer:
    """Measure how long sends to a topic take. The messages stay there. A broker's own topic has the broker's name."""
    return _times(topic, await admin.trials.sends(topic, count, size))


@shows
async def cluster_rt(admin: Admin, cluster: Cluster = None, count: Count = 100, size: Size = 128) -> Answer:
    """Measure how long sends to every broker take. The messages go to the topic that has the broker's name."""
    rows: list[dict[str, Any]] = []
    for broker in await admin.session.masters(cluster):
        tried = await admin.trials.sends(broker.name, count, size)
        rows.append({"cluster": broker.cluster, **broker_row(broker), **_summary(tried)})
    columns = [Column("Cluster Name", "cluster"), Column("Broker Name", "broker"), *_SUMMARY_COLUMNS]
    return Answer({"brokers": rows}, [Table(columns, rows)])


def _summary(tried: list[TriedSend]) -> dict[str, Any]:
    millis = sorted(one.millis for one in tried if one.is_ok)
    return {
        "rt": round(sum(millis) / len(millis), 2) if millis else None,
        "p99": round(millis[int(0.99 * (len(millis) - 1))], 2) if millis else None,
        "successCount": len(millis),
        "failCount": len(tried) - len(millis),
        "problem": next((one.problem for one in tried if one.problem), None),
    }


_SUMMARY_COLUMNS = [
    Column("RT(ms)", "rt"),
    Column("P99(ms)", "p99"),
    Column("SuccessCount", "successCount"),
    Column("FailCount", "failCount"),
    Column("Problem", "problem"),
]


def _times(topic: str, tried: list[TriedSend]) -> Answer:
    row = {"topic": topic, **_summary(tried)}
    return Answer(row, [Table([Column("Topic", "topic"), *_SUMMARY_COLUMNS], [row])])


@asks
async def allocate(
    admin: Admin,
    topic: Topic,
    clients: Annotated[str, typer.Option("--clients", "-i", help="Client ids or addresses, separated by commas.")],
) -> Answer:
    """Show which queues of a topic each member of a group would get, if the group had exactly these members."""
    named = [part for piece in clients.split(",") if (part := piece.strip())]
    if not named:
        raise UsageError("--clients: name at least one client")
    shares = await admin.trials.allocation(topic, named)
    rows = [
        {"client": client, "broker": queue.broker_name, "queueId": queue.queue_id}
        for client, queues in shares.items()
        for queue in queues
    ]
    columns = [Column("Client", "client"), Column("Broker Name", "broker"), Column("QID", "queueId")]
    return Answer({"topic": topic, "queues": rows}, [Table(columns, rows)])


@asks
async def queue_entries(
    admin: Admin,
    topic: Topic,
    queue: Annotated[int, typer.Argument(help="Number of the queue.")],
    index: Annotated[int, typer.Argument(help="Number of the first entry.")],
    broker: Annotated[str, typer.Option("--broker", "-b", help="The broker: its name or host:port.")],
    count: Annotated[int, typer.Option("--count", "-c", min=1, help="How many entries.")] = 10,
    group: Annotated[
        str | None, typer.Option("--group", "-g", help="Consumer group; show whether its filter lets each entry pass.")
    ] = None,
) -> Answer:
    """Show entries of a consume queue: the place of each message in the log, its size, and the hash of its tag."""
    found = await admin.trials.queue_entries(broker, (topic, queue), index, count, group)
    rows = [
        {
            "index": index + number,
            "physicOffset": entry.physic_offset,
            "physicSize": entry.physic_size,
            "tagsCode": entry.tags_code,
            "eval": entry.eval if group else None,
        }
        for number, entry in enumerate(found.queue_data)
    ]
    document = {"minQueueIndex": found.min_queue_index, "maxQueueIndex": found.max_queue_index, "entries": rows}
    columns = [
        Column("Index", "index"),
        Column("Physic Offset", "physicOffset"),
        Column("Physic Size", "physicSize"),
        Column("Tags Code", "tagsCode"),
        Column("Eval", "eval"),
    ]
    reach = f"the queue reaches from {found.min_queue_index} to {found.max_queue_index}"
    return Answer(document, [reach, Table(columns, rows), *([found.filter_data] if found.filter_data else [])])


@asks
async def order_conf(
    admin: Admin,
    topic: Topic,
    method: Annotated[str, typer.Option("--method", "-m", help="get, put or delete.")] = "get",
    value: Annotated[str | None, typer.Option("--value", "-v", help="For put: broker-a:4;broker-b:4.")] = None,
) -> Answer:
    """Show or change the queues of an ordered topic. Name servers give them to clients with the topic's route."""
    if method not in ("get", "put", "delete") or (method == "put") != (value is not None):
        raise UsageError("--method is get, put with --value, or delete")
    if method == "get":
        found = await admin.namesrv.order_conf(topic)
        return Answer({"topic": topic, "orderConf": found}, [found])
    outcomes = await admin.namesrv.update_order_conf(topic, value)
    told = [f"name server {address} told" for address in outcomes.done]
    return Answer({"done": list(outcomes.done)}, told, outcomes.failed)


@asks
async def export(
    admin: Admin,
    what: Annotated[str, typer.Argument(metavar="metadata|configs|metrics", help="What to copy.")],
    directory: Annotated[Path, typer.Option("--directory", "-f", help="Where to write the file.")] = Path("."),
    cluster: Cluster = None,
    broker: Broker = None,
    topics: Annotated[bool, typer.Option("--topics", help="metadata: only the topics.")] = False,
    groups: Annotated[bool, typer.Option("--groups", help="metadata: only the groups.")] = False,
) -> Answer:
    """Copy topics and groups, settings, or figures of every broker into a JSON file. Secrets are masked."""
    readers = {"metadata": _metadata, "configs": _configs, "metrics": _metrics}
    if what not in readers:
        raise UsageError(f"{what}: expected {', '.join(readers)}")
    if what != "metadata" and (topics or groups):
        raise UsageError("--topics and --groups belong to metadata")
    document = await readers[what](admin, cluster, broker)
    if topics != groups:
        left_out = "groups" if topics else "topics"
        for parts in document.values():
            del parts[left_out]
    path = directory / f"{what}.json"
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(json_text.dumps(document, indent=2, ensure_ascii=False) + "\n", "utf-8")
    return Answer({"file": str(path)}, [f"{what} of {len(document)} brokers written to {path}"])


async def _metadata(admin: Admin, cluster: str | None, broker: str | None) -> dict[str, Any]:
    from dataclasses import asdict

    found = {}
    for one in [await admin.session.broker(broker)] if broker is not None else await admin.session.masters(cluster):
        topics = await admin.topics.configs_on(one)
        groups = await admin.groups.configs_of(one)
        found[one.name] = {
            "topics": {name: asdict(topics[name]) for name in sorted(topics)},
            "groups": {name: asdict(groups[name]) for name in sorted(groups)},
        }
    return found


async def _configs(admin: Admin, cluster: str | None, broker: str | None) -> dict[str, Any]:
    from downrange.settings import masked

    settings = await admin.cluster.config(cluster, broker)
    settings.raise_if_none()
    return {broker.name: masked(one.table) for broker, one in settings.done.items()}


async def _metrics(admin: Admin, cluster: str | None, broker: str | None) -> dict[str, Any]:
    status = await admin.cluster.broker_status(cluster, broker)
    status.raise_if_none()
    return {broker.name: dict(one.table) for broker, one in status.done.items()}
