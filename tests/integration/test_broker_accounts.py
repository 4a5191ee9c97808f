"""A gRPC server that stands alone copies the users and ACLs of a broker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from downrange.client.admin import Admin
from downrange.client.config import ClientConfig
from downrange.client.session import Session
from downrange.clock import SystemClock
from downrange.protocol.bodies.users import UserInfo
from downrange.proxy.broker_accounts import BrokerAccounts
from downrange.settings import ConfigError
from tests.support.grpc_cluster import grpc_cluster

SETTINGS = {
    "authenticationEnabled": "true",
    "authorizationEnabled": "true",
    "initAuthenticationUser": json.dumps({"username": "root", "password": "root-secret"}),
    "innerClientAuthenticationCredentials": json.dumps({"accessKey": "servers", "secretKey": "servers-secret"}),
}


def account(namesrv: str, key: str) -> ClientConfig:
    return ClientConfig((namesrv,), access_key=key, secret_key=f"{key}-secret")


async def test_users_are_copied_and_a_deleted_one_is_gone_with_the_next_copy(tmp_path: Path) -> None:
    async with grpc_cluster(tmp_path, SETTINGS) as cluster, Session(account(cluster.namesrv, "servers")) as session:
        accounts = BrokerAccounts(session, SystemClock())
        assert not accounts.access_control.secrets
        await accounts.copy()
        assert accounts.access_control.secrets == {"root": b"root-secret", "servers": b"servers-secret"}
        async with Admin(account(cluster.namesrv, "root")) as admin:
            (await admin.users.create(UserInfo(username="shop", password="shop-secret"))).raise_if_none()  # noqa: S106
            await accounts.copy()
            assert accounts.access_control.secrets["shop"] == b"shop-secret"
            (await admin.users.delete("shop")).raise_if_none()
        await accounts.copy()
        assert "shop" not in accounts.access_control.secrets


async def test_without_the_brokers_own_account_nobody_gets_in(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with grpc_cluster(tmp_path, SETTINGS) as cluster:
        async with Session(account(cluster.namesrv, "root")) as session:  # a Super user is not enough
            accounts = BrokerAccounts(session, SystemClock())
            await accounts.copy()
            await accounts.copy()
            assert not accounts.access_control.secrets
            (line,) = [one.getMessage() for one in caplog.records if "cannot be copied" in one.getMessage()]
            assert "passwords are for the account of innerClientAuthenticationCredentials only" in line
        async with Session(ClientConfig((cluster.namesrv,))) as unsigned:
            with pytest.raises(ConfigError, match="set ROCKETMQ_ACCESS_KEY"):
                BrokerAccounts(unsigned, SystemClock())
