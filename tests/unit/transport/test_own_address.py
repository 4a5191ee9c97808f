"""The address by which other machines reach this one."""

from __future__ import annotations

import socket

import pytest

from downrange.broker.config import BrokerConfig, address_warnings, advertised_host
from downrange.settings import ConfigError
from downrange.transport import own_address as module
from downrange.transport.own_address import LOOPBACK, is_loopback, own_address


def test_the_host_name_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's hosts file gives the host name the address 127.0.1.1."""
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    monkeypatch.setattr(socket, "gethostbyname_ex", lambda name: (name, [], ["127.0.1.1"]))
    assert advertised_host(BrokerConfig(bind_address="0.0.0.0")) == own_address()


def test_a_name_server_on_this_machine_says_nothing_about_the_network() -> None:
    assert own_address(["127.0.0.1:9876", "0.0.0.0:9876", "no address"]) == own_address()


def test_without_a_network_there_is_only_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_source_address", lambda destination: None)
    monkeypatch.setattr(module, "_address_of_an_interface", lambda: None)
    assert own_address() == LOOPBACK
    (warning,) = address_warnings(BrokerConfig(bind_address="0.0.0.0"))
    assert "--advertise" in warning


def test_an_interface_is_found_where_no_route_leads_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_source_address", lambda destination: None)
    found = own_address()
    assert found == LOOPBACK or not is_loopback(found)


@pytest.mark.parametrize(
    ("bind", "told", "expected"),
    [
        ("127.0.0.1", "", None),
        ("127.0.0.1", "127.0.0.1", None),
        ("0.0.0.0", "192.0.2.1", None),
        ("192.0.2.1", "", None),
        ("192.0.2.1", "192.0.2.1", None),
        ("127.0.0.1", "192.0.2.1", "listens on 127.0.0.1 only"),
        ("0.0.0.0", "127.0.0.1", "--advertise"),
        ("192.0.2.1", "198.51.100.1", "NAT"),
    ],
)
def test_addresses_that_do_not_fit_are_told(bind: str, told: str, expected: str | None) -> None:
    warnings = address_warnings(BrokerConfig(bind_address=bind, broker_ip1=told))
    assert len(warnings) == (expected is not None)
    assert expected is None or expected in warnings[0]


def test_names_become_addresses() -> None:
    assert advertised_host(BrokerConfig(broker_ip1="localhost")) == LOOPBACK
    with pytest.raises(ConfigError, match=r"brokerIP1=nowhere\.invalid: there is no host"):
        advertised_host(BrokerConfig(broker_ip1="nowhere.invalid"))
