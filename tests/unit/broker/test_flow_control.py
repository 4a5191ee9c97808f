from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from downrange.broker.admission import FlowControl
from downrange.broker.config import BrokerConfig
from downrange.broker.live_config import LiveConfig
from downrange.protocol.errors import SystemBusy
from downrange.store.message_store import MessageStore
from tests.unit.store.small_store import open_store, small_config


@pytest.fixture
def store(tmp_path: Path) -> MessageStore:
    return open_store(tmp_path)


def flow_control(store: MessageStore, **settings: object) -> FlowControl:
    return FlowControl(LiveConfig(BrokerConfig(**settings), store.config), store)  # type: ignore[arg-type]


async def test_requests_of_a_lively_loop_are_served(store: MessageStore) -> None:
    flow = flow_control(store)
    for check in (flow.check_send, flow.check_pull, flow.check_heartbeat, flow.check_end_transaction):
        check()
    assert flow.waited_millis < 100


@pytest.mark.parametrize(
    ("waited_seconds", "refused"),
    [(0.1, []), (0.3, ["send"]), (3.5, ["send", "end_transaction"]), (6, ["send", "pull", "end_transaction"])],
)
async def test_requests_that_waited_too_long_are_refused(
    store: MessageStore, waited_seconds: float, refused: list[str]
) -> None:
    flow = flow_control(store)
    flow.last_tick -= waited_seconds
    flow.worked_at_tick -= waited_seconds
    complaints = {}
    for name in ("send", "pull", "heartbeat", "end_transaction"):
        try:
            getattr(flow, f"check_{name}")()
        except SystemBusy as error:
            complaints[name] = error.remark
    assert list(complaints) == refused
    for remark in complaints.values():
        assert remark.startswith("[TIMEOUT_CLEAN_QUEUE]broker busy, start flow control for a while, period in queue: ")
        assert remark.endswith("ms, size of queue: 0")


async def test_nothing_is_refused_when_fast_failure_is_off(store: MessageStore) -> None:
    flow = flow_control(store, broker_fast_failure_enable=False)
    flow.last_tick -= 60
    flow.worked_at_tick -= 60
    flow.appended(60)
    flow.check_send()


async def test_a_broker_that_was_given_no_processor_refuses_nothing(store: MessageStore) -> None:
    flow = flow_control(store)
    flow.last_tick -= 60
    for check in (flow.check_send, flow.check_pull, flow.check_heartbeat, flow.check_end_transaction):
        check()


async def test_an_append_that_waited_for_the_disk_counts_as_work(store: MessageStore) -> None:
    flow = flow_control(store)
    flow.last_tick -= 0.5
    flow.appended(0.5)
    with pytest.raises(SystemBusy, match="TIMEOUT_CLEAN_QUEUE"):
        flow.check_send()
    flow.check_pull()


async def test_sends_that_waited_for_a_busy_page_cache_are_refused_until_the_loop_turns(store: MessageStore) -> None:
    flow = flow_control(store)
    flow.appended(0.9)
    flow.check_send()
    flow.appended(1.1)
    with pytest.raises(SystemBusy, match=r"^SYSTEM_BUSY \(2\): \[PCBUSY_CLEAN_QUEUE\]broker busy"):
        flow.check_send()
    flow.check_pull()
    ticking = asyncio.create_task(flow.tick())
    await asyncio.sleep(0.03)
    flow.check_send()
    ticking.cancel()


async def test_sends_are_rejected_while_the_transient_pool_is_empty(tmp_path: Path) -> None:
    config = replace(small_config(tmp_path), transient_store_pool_enable=True, transient_store_pool_size=1)
    with MessageStore.open(config) as store:
        flow = flow_control(store)
        flow.check_send()
        assert store._pool is not None
        taken = store._pool.borrow()
        assert taken is not None
        with pytest.raises(SystemBusy, match=r"\[REJECTREQUEST\]system busy, start flow control for a while"):
            flow.check_send()


@pytest.mark.parametrize("waited_seconds", [0, 0.1, 0.3, 3.5, 6])
@pytest.mark.parametrize("is_enabled", [True, False])
async def test_while_the_broker_is_calm_every_check_says_yes(
    store: MessageStore, waited_seconds: float, is_enabled: bool
) -> None:
    flow = flow_control(store, broker_fast_failure_enable=is_enabled)
    flow.last_tick -= waited_seconds
    flow._set_patience()
    is_calm = asyncio.get_running_loop().time() <= flow.calm_until
    assert is_calm == (waited_seconds < 0.2 or not is_enabled)
    for check in (flow.check_send, flow.check_pull, flow.check_heartbeat, flow.check_end_transaction):
        if is_calm:
            check()


async def test_a_broker_is_not_calm_while_the_page_cache_is_busy(store: MessageStore) -> None:
    flow = flow_control(store)
    flow.appended(1.1)
    assert asyncio.get_running_loop().time() > flow.calm_until
    ticking = asyncio.create_task(flow.tick())
    await asyncio.sleep(0)
    assert asyncio.get_running_loop().time() < flow.calm_until
    ticking.cancel()


async def test_a_broker_with_a_transient_pool_is_never_calm(tmp_path: Path) -> None:
    config = replace(small_config(tmp_path), transient_store_pool_enable=True, transient_store_pool_size=1)
    with MessageStore.open(config) as store:
        assert asyncio.get_running_loop().time() > flow_control(store).calm_until
