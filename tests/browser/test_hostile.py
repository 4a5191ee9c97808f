"""Checks 15, 16 and 17: whatever producers write is shown as it is, and neither obeyed nor able to freeze a page."""

from __future__ import annotations

import gzip
import json
import zlib
from urllib.parse import quote

import pytest

from downrange import Message
from downrange.client.admin import Admin
from tests.browser.conftest import Visits
from tests.support.console_process import console_process
from tests.support.shop_work import create_topic, give_up, send
from tests.support.standalone_process import Standalone
from tests.support.visitor import Visitor

pytestmark = pytest.mark.asyncio(loop_scope="package")

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'><svg onload=alert(3)>{{7*7}}javascript:alert(4)"
BODY = f"{HOSTILE}\u202etxt.exe\x00</script><script>alert(5)</script>"
TOPIC = "hostile"
PAGES = (
    "/messages?topic=hostile",
    "/topics/hostile?tab=messages",
    "/tail?topic=hostile",
    "/messages?topic=" + quote(HOSTILE),
    "/messages?topic=hostile&sql=" + quote(HOSTILE),
    "/messages?topic=hostile&text=" + quote(HOSTILE),
    "/topics?q=" + quote(HOSTILE),
    "/groups?q=" + quote(HOSTILE) + "&sort=" + quote(HOSTILE),
    "/topics/" + quote(HOSTILE, safe=""),
    "/groups/" + quote(HOSTILE, safe=""),
    "/messages/" + quote(HOSTILE, safe="") + "?topic=hostile",
    "/dead-letters/" + quote(HOSTILE, safe=""),
    "?range=" + quote(HOSTILE),
)


async def test_16_hostile_text_is_shown_and_never_obeyed(visitor: Visitor, admin: Admin) -> None:
    await create_topic(admin, TOPIC, 1)
    message = Message(TOPIC, BODY.encode(), tags="<b>tag</b>", keys="<i>key</i>", properties={"<u>name": HOSTILE})
    (sent,) = await send(admin, message)
    await visitor.opens(f"/c/local/messages/{sent.message_id}?topic={TOPIC}")
    body = await visitor.page.text_content("#body")
    assert body is not None
    assert HOSTILE in body
    assert "\u202e" not in body, "the mark that turns text round must be shown, not obeyed"
    assert "202E" in body.upper()
    assert HOSTILE in (await visitor.page.text_content("#properties") or "")
    assert "<b>tag</b>" in await visitor.text()
    for path in PAGES:
        await visitor.opens(f"/c/local{path}")
        await visitor.page.wait_for_load_state("load")
        assert await visitor.page.query_selector("main img, main svg[onload], main script[src='x']") is None, path
    await visitor.opens("/find?q=" + quote(HOSTILE))
    assert HOSTILE[:20] in await visitor.text()
    visitor.faults[:] = [fault for fault in visitor.faults if "status of 4" not in fault]


async def test_16_hostile_text_in_the_tail_and_in_dead_letters(
    visitor: Visitor, admin: Admin, cluster: Standalone
) -> None:
    await create_topic(admin, TOPIC, 1)
    await visitor.opens(f"/c/local/tail?topic={TOPIC}")
    while await visitor.page.query_selector("#tail .line") is None:
        await send(admin, Message(TOPIC, BODY.encode(), tags="<b>tag", keys="<i>key", properties={"a": HOSTILE}))
        await visitor.page.wait_for_timeout(200)
    line = await visitor.text("#tail .line")
    assert "<script>alert(1)</script>" in line
    assert "⟨U+202E⟩" in line
    await give_up(admin, cluster.namesrv, "hostile-group", "hostile-letters", 1)
    await visitor.opens("/c/local/dead-letters/hostile-group?text=" + quote(HOSTILE))
    assert await visitor.page.query_selector("main img") is None


def protobuf() -> bytes:
    """A message with a number, a text and a nested message: fields 1, 2 and 3."""
    nested = b"\x08\x2a"
    return b"\x08\x96\x01" + b"\x12\x05hello" + b"\x1a" + bytes([len(nested)]) + nested


NEXT_FRAME = "() => new Promise(done => { const at = performance.now(); requestAnimationFrame(now => done(now - at)) })"
"""How many milliseconds pass until the browser draws again."""
BODIES: dict[str, tuple[bytes, str]] = {
    "json": (b'{"order": 17, "city": "Lyon"}', '"city": "Lyon"'),
    "utf-8": ("Kraków 深圳".encode(), "Kraków 深圳"),
    "latin-1": ("Größe Übergröße".encode("latin-1"), "Gr"),
    "gzip": (gzip.compress(b'{"packed": "gzip"}'), '"packed": "gzip"'),
    "zlib": (zlib.compress(b'{"packed": "zlib"}'), '"packed": "zlib"'),
    "protobuf": (protobuf(), "hello"),
    "large": (b"x" * ((4 << 20) - 4096), "xxxx"),
    "random": (bytes(range(256)), "00"),
}


@pytest.mark.parametrize("kind", BODIES)
async def test_15_every_body_can_be_read(visitor: Visitor, admin: Admin, kind: str) -> None:
    await create_topic(admin, "bodies", 1)
    body, readable = BODIES[kind]
    (sent,) = await send(admin, Message("bodies", body, properties={"kind": kind}))
    response = await visitor.opens(f"/c/local/messages/{sent.message_id}?topic=bodies")
    assert response.status == 200
    assert readable in (await visitor.page.text_content("#body") or "")
    frozen = await visitor.page.evaluate(NEXT_FRAME)
    assert frozen < 1000
    for view in await visitor.page.eval_on_selector_all(
        "nav.choices a", "all => all.map(one => one.getAttribute('href'))"
    ):
        assert (await visitor.opens(view)).status == 200


async def test_17_a_body_that_inflates_without_end_is_refused(
    visits: Visits, admin: Admin, cluster: Standalone
) -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(1024)) + packer.flush()
    await create_topic(admin, "bodies", 1)
    (sent,) = await send(admin, Message("bodies", bomb))
    with console_process(cluster.namesrv) as console:
        visitor = await visits(console.address)
        await visitor.opens("/c/local")
        before = console.resident_bytes
        await visitor.opens(f"/c/local/messages/{sent.message_id}?topic=bodies")
        assert "larger than" in await visitor.text()
        assert console.resident_bytes - before < 20 << 20


async def test_15_a_compressed_message_is_shown_unpacked(visitor: Visitor, admin: Admin) -> None:
    text = json.dumps({"long": "y" * 9000})
    await create_topic(admin, "bodies", 1)
    (sent,) = await send(admin, Message("bodies", text.encode()))  # producers compress above 4 KiB
    await visitor.opens(f"/c/local/messages/{sent.message_id}?topic=bodies")
    assert "y" * 100 in (await visitor.page.text_content("#body") or "")
