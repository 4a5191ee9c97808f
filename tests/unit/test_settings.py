from __future__ import annotations

import ast
import dataclasses
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import downrange
from downrange.broker.config import BrokerConfig
from downrange.client.config import ClientConfig, ProducerConfig
from downrange.client.consumer.config import ConsumerConfig
from downrange.client.consumer.lite_pull_config import LitePullConfig
from downrange.namesrv.config import NamesrvConfig
from downrange.settings import (
    ConfigError,
    Property,
    check_known,
    configure,
    format_properties,
    parse_properties,
    read_properties,
    setting,
    settings_of,
    to_properties,
)
from downrange.store.config import StoreConfig


class Colour(Enum):
    RED = "RED"
    BLUE = "BLUE"


@dataclass(frozen=True, slots=True)
class Config:
    listen_port: int = setting(10911, "Port.", minimum=1, maximum=65535)
    is_fast: bool = setting(True, "Fast?")
    colour: Colour = setting(Colour.RED, "Colour.")
    store_path: Path = setting(Path("/store"), "Where.")
    broker_ip1: str = setting("127.0.0.1", "Address.", key="brokerIP1")
    mapped_size: int = setting(1024, "Size.", unit="bytes", aliases=("mapedSize",))
    ratio: float = setting(0.5, "Ratio.", minimum=0, maximum=1)
    name: str | None = setting(None, "Name.")


def config(text: str) -> Config:
    return configure(Config, parse_properties(text, "broker.conf"))


def complaint(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config(text)
    return str(caught.value)


def test_keys_are_the_fields_in_rocketmqs_spelling() -> None:
    assert [known.key for known in settings_of(Config)] == [
        "listenPort", "isFast", "colour", "storePath", "brokerIP1", "mappedSize", "ratio", "name",
    ]  # fmt: skip


def test_what_is_not_said_keeps_its_default() -> None:
    assert config("") == Config()


def test_values_become_the_types_of_their_fields() -> None:
    text = "listenPort = 1\nisFast: FALSE\ncolour=BLUE\nstorePath=~/x\nbrokerIP1=10.0.0.1\nratio=1 \nname=n"
    assert config(text) == Config(1, False, Colour.BLUE, Path.home() / "x", "10.0.0.1", 1024, 1.0, "n")


def test_an_old_spelling_works_and_the_new_one_wins() -> None:
    assert config("mapedSize=7").mapped_size == 7
    assert config("mapedSize=7\nmappedSize=8").mapped_size == 8


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("listenPort=many", "listenPort=many: expected a whole number from 1 to 65535 (broker.conf, line 1)"),
        ("\n\nlistenPort=0", "listenPort=0: expected a whole number from 1 to 65535 (broker.conf, line 3)"),
        ("isFast=yes", "isFast=yes: expected true or false (broker.conf, line 1)"),
        ("colour=GREEN", "colour=GREEN: expected RED or BLUE (broker.conf, line 1)"),
        ("ratio=1.5", "ratio=1.5: expected a number from 0 to 1 (broker.conf, line 1)"),
        ("mapedSize=x", "mapedSize=x: expected a whole number (broker.conf, line 1)"),
        ("= 5", "not a key=value line: '= 5' (broker.conf, line 1)"),
    ],
)
def test_a_wrong_value_is_refused_with_key_value_place_and_what_is_allowed(text: str, expected: str) -> None:
    assert complaint(text) == expected


def test_each_key_is_used_or_known_or_refused_with_the_nearest_name() -> None:
    properties = parse_properties("listenPort=1\nserverWorkerThreads=8", "f")
    assert check_known(properties, [Config], ["serverWorkerThreads"]) == [
        "serverWorkerThreads is known to RocketMQ but has no effect here (f, line 2)"
    ]
    with pytest.raises(ConfigError, match=r"unknown key listenProt; did you mean listenPort\? \(f, line 1\)"):
        check_known(parse_properties("listenProt=1", "f"), [Config])
    with pytest.raises(ConfigError, match=r"^unknown key zzz \(command line\)$"):
        check_known({"zzz": Property("1", "command line")}, [Config])


def test_java_properties_syntax() -> None:
    text = (
        "# comment\n! comment\n   \n  a = 1 \nb:2\nc 3\nd=x\\\n   y\\\n   z\n"
        "e\\ f=g\\=h\nu=\\u00e4\\t\\\\\nempty=\nlast=1\nlast=2"
    )
    assert {key: given.value for key, given in parse_properties(text).items()} == {
        "a": "1 ", "b": "2", "c": "3", "d": "xyz", "e f": "g=h", "u": "ä\t\\", "empty": "", "last": "2",
    }  # fmt: skip
    assert parse_properties(text)["d"].line == 7
    with pytest.raises(ConfigError, match=r"bad \\u escape"):
        parse_properties("a=\\u12")


@given(st.dictionaries(st.from_regex(r"[a-zA-Z][a-zA-Z0-9]{0,10}", fullmatch=True), st.text(max_size=30)))
def test_what_is_written_is_read_back(table: dict[str, str]) -> None:
    assert {key: given.value for key, given in parse_properties(format_properties(table)).items()} == table


def test_a_configuration_is_shown_with_its_file_keys() -> None:
    assert to_properties(Config())["isFast"] == "true"
    assert to_properties(Config())["colour"] == "RED"
    assert "name" not in to_properties(Config())


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read configuration file .*nowhere\.conf"):
        read_properties(tmp_path / "nowhere.conf")
    bad = tmp_path / "bad.conf"
    bad.write_bytes(b"a=\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_properties(bad)


# --- every setting is read somewhere


@pytest.mark.parametrize(
    "config_class",
    [BrokerConfig, StoreConfig, NamesrvConfig, ClientConfig, ProducerConfig, ConsumerConfig, LitePullConfig],
    ids=lambda config_class: config_class.__name__,
)
def test_every_setting_is_read_somewhere(config_class: type[Any]) -> None:
    names = {field.name for field in dataclasses.fields(config_class)}
    assert names - names_read_in_source() == set()


@cache
def names_read_in_source() -> frozenset[str]:
    """Every name X of an expression `….X` in the package; the line that defines a setting is not one."""
    return frozenset(
        node.attr
        for path in Path(downrange.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    )
