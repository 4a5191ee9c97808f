"""`downrange user …`: users of clusters with ACL 2.0."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from downrange.cli.cluster import told
from downrange.cli.cluster_actions import asks, broker_row, shows
from downrange.cli.options import Broker, Cluster, UsageError, command_family
from downrange.cli.output import Answer, Column, Table
from downrange.cli.passwords import new_password

if TYPE_CHECKING:
    from downrange.client.admin import Admin
    from downrange.client.admin.users import UserInfo
    from downrange.client.brokers import Broker as BrokerProcess

app = command_family("Users of clusters with ACL 2.0 (authenticationEnabled=true).")

Username = Annotated[str, typer.Argument(help="Name of the user, the access key.")]
Type = Annotated[str | None, typer.Option("--type", "-t", help="Super or Normal.")]
PasswordFile = Annotated[
    Path | None,
    typer.Option("--password-file", help="File with the password. [$ROCKETMQ_USER_PASSWORD, else you are asked]"),
]
# mqadmin's -p. Other users of the machine can see the arguments of a command, so no help page recommends it.
Password = Annotated[str | None, typer.Option("--password", hidden=True)]


@app.command("create")
@asks
async def create(
    admin: Admin,
    username: Username,
    user_type: Type = None,
    password_file: PasswordFile = None,
    password: Password = None,
    broker: Broker = None,
    cluster: Cluster = None,
) -> Answer:
    """Create a user. A Normal user without rules may do nothing: see `downrange acl set`."""
    from downrange.client.admin.users import UserInfo

    user = UserInfo(username=username, password=new_password(password, password_file), user_type=user_type)
    return told(f"user {username} created", await admin.users.create(user, cluster, broker))


@app.command("update")
@asks
async def update(
    admin: Admin,
    username: Username,
    user_type: Type = None,
    status: Annotated[str | None, typer.Option("--status", "-s", help="enable or disable.")] = None,
    change_password: Annotated[bool, typer.Option("--new-password", help="Ask for a new password.")] = False,
    password_file: PasswordFile = None,
    password: Password = None,
    broker: Broker = None,
    cluster: Cluster = None,
) -> Answer:
    """Change a user. Settings without an option stay as they are."""
    from downrange.client.admin.users import UserInfo

    is_new = change_password or password is not None or password_file is not None
    if not is_new and user_type is None and status is None:
        raise UsageError("nothing to change: give --type, --status, --new-password or --password-file")
    user = UserInfo(
        username=username,
        password=new_password(password, password_file) if is_new else None,
        user_type=user_type,
        user_status=status,
    )
    return told(f"user {username} updated", await admin.users.update(user, cluster, broker))


@app.command("delete")
@asks
async def delete(admin: Admin, username: Username, broker: Broker = None, cluster: Cluster = None) -> Answer:
    """Delete a user and the user's rules."""
    return told(f"user {username} deleted", await admin.users.delete(username, cluster, broker))


@app.command("show")
@shows
async def show(admin: Admin, username: Username, broker: Broker = None, cluster: Cluster = None) -> Answer:
    """Show a user."""
    found = await admin.users.get(username, cluster, broker)
    rows = [_row(one, user) for one, user in found.done.items() if user is not None]
    parts = [Table(_COLUMNS, rows)] if rows else [f"there is no user {username}"]
    return Answer({"users": rows}, parts, found.failed)


@app.command("list")
@shows
async def list_users(
    admin: Admin,
    filter: Annotated[str | None, typer.Option("--filter", "-f", help="Only names with this text.")] = None,
    broker: Broker = None,
    cluster: Cluster = None,
) -> Answer:
    """List users."""
    found = await admin.users.list(filter, cluster, broker)
    rows = [_row(one, user) for one, users in found.done.items() for user in users]
    return Answer({"users": rows}, [Table(_COLUMNS, rows)], found.failed)


@app.command("copy")
@asks
async def copy(
    admin: Admin,
    source: Annotated[str, typer.Argument(help="Broker to copy from: its name or host:port.")],
    target: Annotated[str, typer.Argument(help="Broker to copy to.")],
    usernames: Annotated[str, typer.Argument(help="Users, separated by commas. [all]")] = "",
) -> Answer:
    """Copy users from one broker to another. A Downrange broker gives passwords only to the brokers' own account."""
    names = await admin.users.copy(source, target, [name for name in usernames.split(",") if name])
    return Answer({"copied": names}, [f"user {name} copied to {target}" for name in names])


def _row(broker: BrokerProcess, user: UserInfo) -> dict[str, Any]:
    return {
        **broker_row(broker),
        "username": user.username,
        "userType": user.user_type,
        "userStatus": user.user_status,
    }


_COLUMNS = [
    Column("Broker Name", "broker"),
    Column("Addr", "address"),
    Column("UserName", "username"),
    Column("UserType", "userType"),
    Column("UserStatus", "userStatus"),
]
