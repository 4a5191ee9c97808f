"""Imports point down only. This dict is the documentation of the layers, and the check."""

from __future__ import annotations

import ast
from pathlib import Path

import downrange

MAY_IMPORT: dict[str, set[str]] = {  # model, settings, clock and compiled are open to everyone
    "model": set(),
    "settings": set(),
    "clock": set(),
    "compiled": set(),
    "protocol": set(),  # bytes only
    "store": set(),  # files only: knows records, not commands
    "transport": {"protocol"},
    "auth": {"protocol"},  # who may do what; servers hand it commands, it never sees a socket
    "namesrv": {"auth", "transport", "protocol"},
    "controller": {"auth", "transport", "protocol"},  # decides who is master; not broker: it asks brokers as any peer
    "broker": {"auth", "store", "transport", "protocol"},  # not client: it speaks through transport like any peer
    "client": {"transport", "protocol"},
    "errors": {"client", "transport", "protocol"},  # the errors of a client, under one name for its users
    "proxy": {"auth", "client", "transport", "protocol"},  # gRPC in front of brokers, which it asks as any client does
    "load": {"client", "transport", "protocol"},  # measures brokers; nothing a client needs
    "simulation": {"client", "protocol"},  # the client's fault strategies against a model of a cluster
    "spark": {"client", "store", "transport", "protocol"},  # store: reading a store directory with no broker at all
    "console": {"client", "protocol"},  # protocol: the types of what brokers answer
    "cli": {
        "client",
        "load",
        "simulation",
        "console",
        "auth",  # the YAML of tools.yml
        "broker",
        "namesrv",
        "controller",
        "proxy",
        "store",
        "transport",
        "spark",
    },  # the servers only through their app.py
}
OPEN = {"model", "settings", "clock", "compiled", "__init__"}
# `model` is at the bottom; the other open modules stand on it.
ALLOWED_IN_OPEN = {"model": {"model"}, "settings": {"model"}, "clock": set[str](), "compiled": {"settings", "_steps"}}
# Packages that must not touch the outside world, and what they would touch it with.
PURE = {
    "model": {"socket", "asyncio", "os", "threading", "logging", "time", "mmap"},
    "protocol": {"socket", "asyncio", "os", "threading", "logging", "time", "mmap"},
    "store": {"socket", "asyncio", "threading"},
    "auth": {"socket", "asyncio", "threading", "time", "mmap"},
}
SERVERS = {"broker", "namesrv", "controller", "proxy"}
SOURCE = Path(downrange.__file__).parent


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layer"
            found.add(node.module or "")
            if node.module == "downrange":
                found.update(f"downrange.{alias.name}" for alias in node.names)
    return found


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def test_imports_point_down() -> None:
    wrong = []
    for path in SOURCE.rglob("*.py"):
        package = package_of(path)
        if package.startswith("__") or package not in MAY_IMPORT:
            continue
        allowed = ALLOWED_IN_OPEN.get(package, OPEN | MAY_IMPORT[package]) | {package}
        for name in imports_of(path):
            parts = name.split(".")
            if parts[0] == "downrange" and len(parts) > 1 and not parts[1].startswith("__") and parts[1] not in allowed:
                wrong.append(f"{path.relative_to(SOURCE)} imports {name}")
    assert wrong == []


def test_every_package_has_its_row() -> None:
    packages = {package_of(path) for path in SOURCE.rglob("*.py")}
    assert {name for name in packages if not name.startswith("__")} <= MAY_IMPORT.keys() | {"testing"}


def test_pure_packages_do_no_io() -> None:
    wrong = []
    for package, forbidden in PURE.items():
        for path in (SOURCE / package).rglob("*.py"):
            wrong += [
                f"{path.relative_to(SOURCE)} imports {name}"
                for name in imports_of(path)
                if name.split(".")[0] in forbidden
            ]
    assert wrong == []


def test_the_command_line_reaches_servers_only_through_their_app() -> None:
    wrong = []
    for path in (SOURCE / "cli").rglob("*.py"):
        for name in imports_of(path):
            parts = name.split(".")
            is_server = parts[:1] == ["downrange"] and len(parts) > 2 and parts[1] in SERVERS
            if is_server and parts[2] not in ("app", "config"):
                wrong.append(f"{path.relative_to(SOURCE)} imports {name}")
    assert wrong == []
