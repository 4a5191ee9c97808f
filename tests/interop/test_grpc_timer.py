"""Delayed messages and their recall by the official gRPC clients."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from downrange.client.admin import Admin
from downrange.client.config import ClientConfig
from downrange.model.topics import MESSAGE_TYPE, TopicConfig
from tests.support.grpc_clients import LANGUAGES, Language, produce, receive
from tests.support.standalone_process import Standalone, standalone_process


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    directory: Path = tmp_path_factory.mktemp("grpc-timer")
    with standalone_process(directory, {"recallMessageEnable": "true"}, grpc_port=0) as running:

        async def create() -> None:
            async with Admin(ClientConfig.of(running.namesrv)) as admin:
                for language in LANGUAGES:
                    await admin.topics.create(TopicConfig(f"{language}Delay", 4, 4, attributes={MESSAGE_TYPE: "DELAY"}))

        asyncio.run(create())
        yield running


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_delayed_message_comes_in_time_and_a_recalled_one_never(servers: Standalone, language: Language) -> None:
    topic = f"{language}Delay"
    kept, recalled = produce(
        language,
        servers.grpc,
        {"topic": topic, "body": "kept", "delay": 4},
        {"topic": topic, "body": "recalled", "delay": 4, "recall": True},
    )
    assert (kept["event"], recalled["event"]) == ("sent", "sent")
    assert kept["recallHandle"]
    found = receive(language, servers.grpc, topic, f"{language}DelayGroup", 2, seconds=12)
    assert [one["body"] for one in found] == ["kept"]
    assert 2.5 < found[0]["time"] - kept["time"] < 7
