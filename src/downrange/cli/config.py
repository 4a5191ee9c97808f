"""`downrange config …`: settings of running brokers."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from downrange.cli.cluster import told
from downrange.cli.cluster_actions import asks, broker_row
from downrange.cli.options import Broker, Changes, Cluster, UsageError, command_family, key_values
from downrange.cli.output import Answer, cell
from downrange.settings import masked

if TYPE_CHECKING:
    from downrange.client.admin import Admin

app = command_family("Show and change settings of running brokers.")


@app.command("get")
@asks
async def get(
    admin: Admin,
    key: Annotated[str | None, typer.Argument(help="Only this key.")] = None,
    broker: Broker = None,
    cluster: Cluster = None,
) -> Answer:
    """Show the settings of running brokers."""
    settings = await admin.cluster.config(cluster, broker)
    rows: list[dict[str, Any]] = [
        {
            **broker_row(one),
            "config": {name: value for name, value in sorted(masked(found.table).items()) if key in (None, name)},
        }
        for one, found in settings.done.items()
    ]
    if key is not None and not settings.failed and not any(row["config"] for row in rows):
        near = difflib.get_close_matches(key, {name for found in settings.done.values() for name in found.table})
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UsageError(f"no broker has a setting {key}{hint}")
    parts = [settings_text(str(one), row["config"]) for one, row in zip(settings.done, rows, strict=True)]
    return Answer({"brokers": rows}, parts, settings.failed)


@app.command("update")
@asks
async def update(admin: Admin, changes: Changes, broker: Broker = None, cluster: Cluster = None) -> Answer:
    """Change settings while brokers run."""
    return told("settings updated", await admin.cluster.update_config(key_values(changes), cluster, broker))


def settings_text(server: str, table: Mapping[str, Any]) -> str:
    """Settings of one server the way mqadmin prints them."""
    return "\n".join(
        [f"============{server}============", *(f"{key:<50}=  {cell(value)}" for key, value in table.items())]
    )
