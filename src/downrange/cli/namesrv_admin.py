"""`downrange namesrv-admin …`: settings, key-value store and write permissions on running name servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from downrange.cli.cluster_actions import asks, shows
from downrange.cli.config import settings_text
from downrange.cli.options import Changes, command_family, key_values
from downrange.cli.output import Answer, Column, Table

if TYPE_CHECKING:
    from downrange.client.admin import Admin
    from downrange.client.per_server import PerServer

app = command_family("Settings and key-value store of running name servers, write permission of brokers.")

Namespace = Annotated[str, typer.Argument(help="Namespace of keys.")]
Key = Annotated[str, typer.Argument(help="Key.")]
BrokerName = Annotated[str, typer.Argument(help="Broker name.")]


def told(what: str, outcomes: PerServer[str, None]) -> Answer:
    return Answer({"done": list(outcomes.done)}, [f"{what} on {one}" for one in outcomes.done], outcomes.failed)


@app.command("config")
@asks
async def show_config(admin: Admin) -> Answer:
    """Show the settings of every name server."""
    settings = await admin.namesrv.config()
    tables = {one: dict(sorted(table.items())) for one, table in settings.done.items()}
    rows = [{"address": one, "config": table} for one, table in tables.items()]
    return Answer({"namesrvs": rows}, [settings_text(*item) for item in tables.items()], settings.failed)


@app.command("update-config")
@asks
async def update_config(admin: Admin, changes: Changes) -> Answer:
    """Change settings on every name server."""
    return told("settings updated", await admin.namesrv.update_config(key_values(changes)))


@app.command("wipe-write-perm")
@asks
async def wipe_write_perm(admin: Admin, broker: BrokerName) -> Answer:
    """Keep producers away from a broker: take the write permission from all its topics."""
    return _counted(broker, "lost", await admin.namesrv.wipe_write_perm(broker))


@app.command("add-write-perm")
@asks
async def add_write_perm(admin: Admin, broker: BrokerName) -> Answer:
    """Let producers come back to a broker: give the write permission back to all its topics."""
    return _counted(broker, "got", await admin.namesrv.add_write_perm(broker))


def _counted(broker: str, verb: str, outcomes: PerServer[str, int]) -> Answer:
    rows = [{"address": one, "topics": count} for one, count in outcomes.done.items()]
    lines = [f"{count} topics of {broker} {verb} write permission on {one}" for one, count in outcomes.done.items()]
    return Answer({"broker": broker, "namesrvs": rows}, lines, outcomes.failed)


@app.command("kv-get")
@asks
async def get_kv(admin: Admin, namespace: Namespace, key: Key) -> Answer:
    """Show one value of the key-value store."""
    value = await admin.namesrv.get_kv(namespace, key)
    return Answer({"namespace": namespace, "key": key, "value": value}, [value])


@app.command("kv-list")
@shows
async def list_kv(admin: Admin, namespace: Namespace) -> Answer:
    """List a namespace of the key-value store."""
    table = await admin.namesrv.list_kv(namespace)
    rows = [{"key": key, "value": value} for key, value in sorted(table.items())]
    return Answer(
        {"namespace": namespace, "items": rows}, [Table([Column("Key", "key"), Column("Value", "value")], rows)]
    )


@app.command("kv-put")
@asks
async def put_kv(
    admin: Admin, namespace: Namespace, key: Key, value: Annotated[str, typer.Argument(help="Value.")]
) -> Answer:
    """Set a value on every name server."""
    return told(f"{namespace} {key} set", await admin.namesrv.put_kv(namespace, key, value))


@app.command("kv-delete")
@asks
async def delete_kv(admin: Admin, namespace: Namespace, key: Key) -> Answer:
    """Delete a value on every name server."""
    return told(f"{namespace} {key} deleted", await admin.namesrv.delete_kv(namespace, key))
