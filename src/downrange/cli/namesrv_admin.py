"""`downrange namesrv-admin …`: settings, key-value store and write permissions on running name servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from downrange.cli.asking import answer
from downrange.cli.config import settings_text
from downrange.cli.options import Json, Namesrv, command_family, key_values
from downrange.cli.output import Answer, Column, Table

if TYPE_CHECKING:
    from downrange.client.admin import Admin
    from downrange.client.outcomes import Outcomes

app = command_family("Running name servers: settings, key-value store, write permission of brokers.")

Namespace = Annotated[str, typer.Argument(help="Namespace of keys.")]
Key = Annotated[str, typer.Argument(help="Key.")]
BrokerName = Annotated[str, typer.Argument(help="Broker name.")]


def told(what: str, outcomes: Outcomes[str, None]) -> Answer:
    return Answer({"done": list(outcomes.done)}, [f"{what} on {one}" for one in outcomes.done], outcomes.failed)


@app.command("config")
def show_config(namesrv: Namesrv = None, json: Json = False) -> None:
    """Show the settings of every name server."""

    async def action(admin: Admin) -> Answer:
        settings = await admin.namesrv.config()
        tables = {one: dict(sorted(table.items())) for one, table in settings.done.items()}
        rows = [{"address": one, "config": table} for one, table in tables.items()]
        return Answer({"namesrvs": rows}, [settings_text(*item) for item in tables.items()], settings.failed)

    answer(namesrv, json, action)


@app.command("update-config")
def update_config(
    changes: Annotated[list[str], typer.Argument(help="key=value, any number of them.")],
    namesrv: Namesrv = None,
    json: Json = False,
) -> None:
    """Change settings on every name server."""
    table = key_values(changes)

    async def action(admin: Admin) -> Answer:
        return told("settings updated", await admin.namesrv.update_config(table))

    answer(namesrv, json, action)


@app.command("wipe-write-perm")
def wipe_write_perm(broker: BrokerName, namesrv: Namesrv = None, json: Json = False) -> None:
    """Keep producers away from a broker: take the write permission from all its topics."""

    async def action(admin: Admin) -> Answer:
        return _counted(broker, "lost", await admin.namesrv.wipe_write_perm(broker))

    answer(namesrv, json, action)


@app.command("add-write-perm")
def add_write_perm(broker: BrokerName, namesrv: Namesrv = None, json: Json = False) -> None:
    """Let producers come back to a broker: give the write permission back to all its topics."""

    async def action(admin: Admin) -> Answer:
        return _counted(broker, "got", await admin.namesrv.add_write_perm(broker))

    answer(namesrv, json, action)


def _counted(broker: str, verb: str, outcomes: Outcomes[str, int]) -> Answer:
    rows = [{"address": one, "topics": count} for one, count in outcomes.done.items()]
    lines = [f"{count} topics of {broker} {verb} write permission on {one}" for one, count in outcomes.done.items()]
    return Answer({"broker": broker, "namesrvs": rows}, lines, outcomes.failed)


@app.command("kv-get")
def get_kv(namespace: Namespace, key: Key, namesrv: Namesrv = None, json: Json = False) -> None:
    """Show one value of the key-value store."""

    async def action(admin: Admin) -> Answer:
        value = await admin.namesrv.get_kv(namespace, key)
        return Answer({"namespace": namespace, "key": key, "value": value}, [value])

    answer(namesrv, json, action)


@app.command("kv-list")
def list_kv(namespace: Namespace, namesrv: Namesrv = None, json: Json = False) -> None:
    """List a namespace of the key-value store."""

    async def action(admin: Admin) -> Answer:
        table = await admin.namesrv.list_kv(namespace)
        rows = [{"key": key, "value": value} for key, value in sorted(table.items())]
        return Answer(
            {"namespace": namespace, "items": rows}, [Table([Column("Key", "key"), Column("Value", "value")], rows)]
        )

    answer(namesrv, json, action)


@app.command("kv-put")
def put_kv(
    namespace: Namespace,
    key: Key,
    value: Annotated[str, typer.Argument(help="Value.")],
    namesrv: Namesrv = None,
    json: Json = False,
) -> None:
    """Set a value on every name server."""

    async def action(admin: Admin) -> Answer:
        return told(f"{namespace} {key} set", await admin.namesrv.put_kv(namespace, key, value))

    answer(namesrv, json, action)


@app.command("kv-delete")
def delete_kv(namespace: Namespace, key: Key, namesrv: Namesrv = None, json: Json = False) -> None:
    """Delete a value on every name server."""

    async def action(admin: Admin) -> Answer:
        return told(f"{namespace} {key} deleted", await admin.namesrv.delete_kv(namespace, key))

    answer(namesrv, json, action)
