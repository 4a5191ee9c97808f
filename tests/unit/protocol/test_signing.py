"""Signatures: the same as the genuine clients', for every request they signed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from downrange.client.config import ClientConfig
from downrange.protocol.bodies.query import QueryMessageRequest
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command, request
from downrange.protocol.framing import FrameDecoder, encode
from downrange.protocol.signing import ACCESS_KEY, SIGNATURE, Signer, signature
from downrange.settings import ConfigError
from tests.support.golden import all_rows

# Accounts of the captured cluster. One client of the ACL scenario signs with a wrong secret on purpose.
SECRETS = {"rocketmq2": "12345678", "goldenUser": "goldenSecret1", "goldenAdmin": "goldenSecret2"}
WRONG_SECRET = "wrongSecret1"  # noqa: S105  of the capture


def captured() -> list[tuple[str, Command]]:
    """Every signed request of a client whose secret is known."""
    found = []
    for row in all_rows():
        if row.sender == "client" and not row.is_response and b"AccessKey" in row.frame:
            (command,) = FrameDecoder().feed(row.frame)
            if command.ext_fields.get(ACCESS_KEY) in SECRETS:
                found.append((row.place, command))
    return found


def test_every_captured_signature_is_reproduced() -> None:
    requests = captured()
    for place, command in requests:
        fields = command.ext_fields
        secrets = [SECRETS[fields[ACCESS_KEY]]] + ([WRONG_SECRET] if "/acl" in place else [])
        possible = [signature(fields, command.body_bytes, secret.encode()) for secret in secrets]
        assert fields[SIGNATURE] in possible, place
    assert len(requests) > 100
    assert {command.serialize_type for _, command in requests} == {0, 1}


def test_a_signed_request_is_what_the_genuine_client_sent() -> None:
    compared = 0
    for place, command in captured():
        fields = dict(command.ext_fields)
        if command.code == RequestCode.QUERY_MESSAGE or "/acl" in place:
            continue
        user = fields.pop(ACCESS_KEY)
        del fields[SIGNATURE]
        plain = request(command.code, ext_fields=fields, body=command.body)
        ours = Signer(user, SECRETS[user]).sign(plain)
        assert ours.ext_fields == command.ext_fields, place
        compared += 1
    assert compared > 50


def test_a_token_is_signed_too() -> None:
    (genuine,) = [
        command
        for place, command in captured()
        if "498-json/acl" in place and "SecurityToken" in command.ext_fields and command.code == 310
    ]
    plain = {name: value for name, value in genuine.ext_fields.items() if len(name) == 1}
    signer = Signer("goldenUser", "goldenSecret1", genuine.ext_fields["SecurityToken"])
    ours = signer.sign(request(genuine.code, ext_fields=plain, body=genuine.body))
    assert ours.ext_fields == genuine.ext_fields


def checked_by(command: Command, secret: str, *, is_5x: bool) -> bool:
    """Whether a genuine broker would accept the signature: what it leaves out depends on its release."""
    fields = dict(command.ext_fields)
    if not is_5x or command.version <= 399:
        fields.pop("_UNIQUE_KEY_QUERY", None)
    return command.ext_fields[SIGNATURE] == signature(fields, command.body_bytes, secret.encode())


@pytest.mark.parametrize("is_5x", [False, True])
def test_queries_are_accepted_by_every_release(is_5x: bool) -> None:
    header = QueryMessageRequest(
        topic="T", key="k", max_num=32, begin_timestamp=0, end_timestamp=9, unique_key_query=True
    )
    (command,) = FrameDecoder().feed(encode(Signer("u", "s").sign(request(RequestCode.QUERY_MESSAGE, header))))
    assert command.ext_fields["_UNIQUE_KEY_QUERY"] == "true"
    assert checked_by(command, "s", is_5x=is_5x)


def test_the_secret_is_not_shown() -> None:
    assert repr(Signer("user", "very-secret", "very-token")) == "<Signer user>"


@pytest.mark.parametrize(("given", "missing"), [("access_key", "secret_key"), ("secret_key", "access_key")])
def test_half_an_account_is_refused(given: str, missing: str) -> None:
    with pytest.raises(ConfigError, match=f"{missing} is missing"):
        replace(ClientConfig(("h:1",)), **{given: "x"})  # type: ignore[arg-type]


def test_the_account_of_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ClientConfig.of("h:1").access_key is None
    monkeypatch.setenv("ROCKETMQ_ACCESS_KEY", "user")
    with pytest.raises(ConfigError, match="secret_key is missing"):
        ClientConfig.of("h:1")
    monkeypatch.setenv("ROCKETMQ_SECRET_KEY", "secret")
    config = ClientConfig.of("h:1")
    assert (config.access_key, config.secret_key, config.security_token) == ("user", "secret", None)
