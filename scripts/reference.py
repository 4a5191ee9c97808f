"""Write docs/reference/config.md from the settings themselves; `--check` says whether the page is up to date."""

from __future__ import annotations

import sys
from pathlib import Path

from downrange.broker.config import REMOTELY_CHANGEABLE, BrokerConfig
from downrange.controller.config import REMOTELY_CHANGEABLE as CONTROLLER_CHANGEABLE
from downrange.controller.config import ControllerConfig
from downrange.namesrv.config import REMOTELY_CHANGEABLE as NAMESRV_CHANGEABLE
from downrange.namesrv.config import NamesrvConfig
from downrange.settings import Setting, format_value, settings_of
from downrange.store.config import StoreConfig
from downrange.transport.tls_config import TlsConfig

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "config.md"

# Words for defaults that differ from host to host.
HOST_DEPENDENT = {"brokerName": "the host's name"}

INTRODUCTION = """# Configuration

Files are Java properties files with RocketMQ's own keys: an operator's `broker.conf` works as it is. A key that
RocketMQ knows and that has no effect here is named in a warning at start; an unknown key stops the start and names the
nearest known one. `*` marks keys that can be changed while running (`downrange config update`).

This page is made by `scripts/reference.py`.
"""


def page() -> str:
    parts = [INTRODUCTION]
    for title, config_class, changeable in (
        ("Name server", NamesrvConfig, NAMESRV_CHANGEABLE.keys),
        ("Broker", BrokerConfig, REMOTELY_CHANGEABLE),
        ("Broker: storage", StoreConfig, REMOTELY_CHANGEABLE),
        ("Controller", ControllerConfig, CONTROLLER_CHANGEABLE.keys),
        ("Name server, controller and broker: TLS", TlsConfig, frozenset()),
    ):
        parts.append(f"## {title}\n\n| key | default | values | meaning |\n|---|---|---|---|")
        parts[-1] += "".join(row(known, known.key in changeable) for known in settings_of(config_class)) + "\n"
    return "\n".join(parts)


def row(known: Setting, is_changeable: bool) -> str:
    unit = f" ({known.unit})" if known.unit else ""
    aliases = f" Also `{'`, `'.join(known.aliases)}`." if known.aliases else ""
    star = "*" if is_changeable else ""
    return f"\n| `{known.key}`{star} | {default(known)} | {known.allowed()}{unit} | {known.help}{aliases} |"


def default(known: Setting) -> str:
    if known.key in HOST_DEPENDENT:
        return HOST_DEPENDENT[known.key]
    text = "" if known.default is None else format_value(known.default)
    home = str(Path.home())
    if text.startswith(home):
        text = "~" + text[len(home) :]
    return f"`{text}`" if text else ""


def main() -> None:
    text = page()
    if sys.argv[1:] == ["--check"]:
        if not PAGE.exists() or PAGE.read_text("utf-8") != text:
            sys.exit(f"{PAGE.name} is out of date: run scripts/reference.py")
        return
    PAGE.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
