"""The one search box: a topic, a group, a key or a message id leads to its page."""

from __future__ import annotations

import asyncio
from typing import Any, Final
from urllib.parse import quote, urlencode

from downrange.client.admin import Admin
from downrange.client.admin.located import WAITING_ROOMS, real_topic
from downrange.console.clusters import Cluster
from downrange.console.pages import Page
from downrange.console.requests import Answer, Visit, see_other
from downrange.console.snapshot import kind_of
from downrange.model.errors import MQError
from downrange.model.message import StoredMessage
from downrange.model.text import Text
from downrange.model.topics import DLQ_PREFIX, RETRY_PREFIX

AT_ONCE: Final = 8
MOST_TOPICS: Final = 400
SECONDS: Final = 4.0


async def find(visit: Visit) -> Answer:
    """One hit: its page. Several, or none: a list that says where was looked."""
    text = visit.query.get("q", "").strip()
    clusters = _wanted(visit)
    hits = [hit for cluster in clusters for hit in _named(cluster, text)] if text else []
    exact = [hit for hit in hits if hit["is_exact"]]
    if exact and not visit.wants_json:
        return see_other(exact[0]["address"])
    looked = 0
    messages: list[dict[str, Any]] = []
    if text and not exact:
        for cluster in clusters:
            found, count = await _messages(visit, cluster, text)
            messages += found
            looked += count
    if len(messages) == 1 and not visit.wants_json:
        return see_other(messages[0]["address"])
    data = {"q": text, "named": hits[:50], "messages": messages, "looked": looked}
    return Page("find.html", Text("Found for {text}", text=text) if text else Text("Find"), data)


def _wanted(visit: Visit) -> list[Cluster]:
    known = visit.clusters
    asked = known.get(visit.query.get("cluster", ""))
    return list(known.values()) if asked is None else [asked]


def _address(cluster: Cluster, *parts: str) -> str:
    return "/c/" + "/".join(quote(part, safe="") for part in (cluster.name, *parts))


def _named(cluster: Cluster, text: str) -> list[dict[str, Any]]:
    """Topics and groups with this text in their names; a name of a retry or dead-letter topic leads to its group."""
    snapshot = cluster.snapshot
    lower = text.lower()
    hits: list[dict[str, Any]] = []
    if text.startswith(DLQ_PREFIX) and text.removeprefix(DLQ_PREFIX) in snapshot.groups:
        group = text.removeprefix(DLQ_PREFIX)
        hits.append(_hit(cluster, "dead letters", group, True, "dead-letters", group))
    elif text.startswith(RETRY_PREFIX) and text.removeprefix(RETRY_PREFIX) in snapshot.groups:
        group = text.removeprefix(RETRY_PREFIX)
        hits.append(_hit(cluster, "group", group, True, "groups", group))
    names = {
        ("group", "groups"): list(snapshot.groups),
        ("topic", "topics"): [name for name in snapshot.topics if kind_of(name) in ("topic", "system")],
        ("broker", "brokers"): sorted({one.name for one in snapshot.brokers.values()}),
    }
    hits += [
        _hit(cluster, kind, name, name == text, page, name)
        for (kind, page), known in names.items()
        for name in known
        if lower in name.lower()
    ]
    kinds = ["dead letters", "topic", "group", "broker"]  # a topic and a group of one name: the topic
    return sorted(hits, key=lambda hit: (not hit["is_exact"], kinds.index(hit["kind"]), len(hit["name"])))


def _hit(cluster: Cluster, kind: str, name: str, is_exact: bool, *parts: str) -> dict[str, Any]:
    return {"kind": kind, "name": name, "is_exact": is_exact, "address": _address(cluster, *parts)}


async def _messages(visit: Visit, cluster: Cluster, text: str) -> tuple[list[dict[str, Any]], int]:
    """Messages with this id or key: by offset id at once, else in every topic, those with the newest messages first."""
    admin = visit.admin_of(cluster)
    topic, _, key = text.partition(" ")
    if key and topic in cluster.snapshot.topics:
        topics, text = [topic], key.strip()
    else:
        by_age = sorted(cluster.snapshot.topics.values(), key=lambda one: -one.last)
        topics = [one.name for one in by_age if kind_of(one.name) == "topic"][:MOST_TOPICS]
    found: dict[str, dict[str, Any]] = {}
    if _may_be_id(text):
        try:
            async with asyncio.timeout(SECONDS):
                one = await admin.messages.by_offset_id(text)
            return [_message_hit(cluster, one)], 1
        except (MQError, TimeoutError):
            pass  # then it is a unique id
    gate = asyncio.Semaphore(AT_ONCE)

    async def look(name: str) -> None:
        async with gate:
            for one in await _in_topic(admin, name, text):
                hit = _message_hit(cluster, one)
                found[hit["address"]] = hit

    try:
        async with asyncio.timeout(SECONDS):
            await asyncio.gather(*map(look, topics))
            if not found:  # nobody sees it yet: it is delayed, or half of a transaction
                await asyncio.gather(*map(look, WAITING_ROOMS))
    except TimeoutError:
        pass
    return sorted(found.values(), key=lambda hit: -hit["stored"]), len(topics)


def _may_be_id(text: str) -> bool:
    return len(text) in (32, 56) and all(one in "0123456789abcdefABCDEF" for one in text)


async def _in_topic(admin: Admin, topic: str, text: str) -> list[StoredMessage]:
    try:
        if _may_be_id(text):
            answers = await admin.messages.all_by_unique_key(topic, text)
        else:
            answers = await admin.messages.by_key(topic, text)
    except MQError:
        return []
    return [one for messages in answers.done.values() for one in messages]


def _message_hit(cluster: Cluster, one: StoredMessage) -> dict[str, Any]:
    topic = real_topic(one) if one.topic in WAITING_ROOMS else one.topic
    address = _address(cluster, "messages", one.message_id) + "?" + urlencode({"topic": topic})
    return {
        "id": one.message_id,
        "topic": topic,
        "tag": one.tags or "",
        "keys": " ".join(one.keys),
        "stored": one.store_timestamp,
        "address": address,
    }
