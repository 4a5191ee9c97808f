"""`/metrics` and `/healthz` of a controller. Names and labels: docs/reference/metrics.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Final

import msgspec

from downrange.clock import Clock
from downrange.controller.handlers import Parts
from downrange.transport.http_pages import HttpReply, HttpServer

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
FOLLOWER, LEADER = 2, 3  # the values of RocketMQ's role: 0 unknown, 1 candidate, 2 follower, 3 leader
NO_LEADER: Final = 1


class ControllerPages:
    """The two pages of one controller."""

    def __init__(
        self, parts: Parts, group: str, clock: Clock, refused: Callable[[], Mapping[str, int]] | None = None
    ) -> None:
        """`refused` tells what access control refused, by reason; None without access control."""
        self._parts = parts
        self._refused = refused
        self._clock = clock
        me = parts.leadership.me
        self._base = {"address": me.address, "group": group, "peer_id": me.id}

    def server(self, port: int) -> HttpServer:
        """Serves the pages on the loopback address."""
        return HttpServer({"/metrics": self._metrics, "/healthz": self._health}, "127.0.0.1", port)

    async def _metrics(self) -> HttpReply:
        return HttpReply(HTTPStatus.OK, "".join(self.lines()).encode(), CONTENT_TYPE)

    async def _health(self) -> HttpReply:
        leadership = self._parts.leadership
        leader = leadership.leader
        document = {
            "status": "unhealthy" if leader is None else "ok",
            "isLeader": leadership.term is not None,
            "leader": None if leader is None else leader.address,
        }
        status = HTTPStatus.SERVICE_UNAVAILABLE if leader is None else HTTPStatus.OK
        return HttpReply(status, msgspec.json.encode(document) + b"\n", "application/json")

    def lines(self) -> Iterator[str]:
        """The text of /metrics. The figures of broker sets are on the page of the leader alone."""
        leadership, overseer, sets = self._parts.leadership, self._parts.overseer, self._parts.sets
        is_leader = leadership.term is not None
        role = LEADER if is_leader else FOLLOWER if leadership.leader is not None else NO_LEADER
        yield from self._family("role", "gauge", "1 no leader, 2 follows, 3 leads.", [({}, role)])
        counts = [({"election_result": "new_master_elected"}, overseer.elections)]
        counts.append(({"election_result": "no_master_elected"}, overseer.failed_elections))
        yield from self._family("election_total", "counter", "Elections by their result.", counts)
        yield from self._family(
            "downrange_controller_lease_seconds", "gauge", "Time that is left to lead if the lease is not renewed.",
            [({}, round(leadership.seconds_left, 3))],
        )  # fmt: skip
        yield from self._family(
            "downrange_controller_terms_total", "counter", "How often this controller began to lead.",
            [({}, leadership.elections)],
        )  # fmt: skip
        yield from self._family(
            "downrange_controller_transactions_total", "counter", "Changes of broker sets in etcd by their result.",
            [({"result": "committed"}, sets.commits), ({"result": "conflict"}, sets.conflicts)],
        )  # fmt: skip
        refused = [({"reason": reason}, count) for reason, count in (self._refused() if self._refused else {}).items()]
        yield from self._family(
            "downrange_refused_total", "counter", "What access control refused, by reason.", refused
        )
        if is_leader:
            yield from self._sets()

    def _sets(self) -> Iterator[str]:
        now = self._clock.monotonic()
        alive, epochs, sizes, masters = [], [], [], []
        for one in self._parts.sets:
            labels = {"cluster": one.cluster_name, "broker_set": one.broker_name}
            living = self._parts.liveness.alive(one.broker_name, one.replicas, now)
            alive.append((labels, len(living)))
            epochs.append((labels, one.master_epoch))
            sizes.append((labels, len(one.sync_state_set)))
            masters.append((labels, -1 if one.master is None else one.master))
        yield from self._family("active_broker_num", "gauge", "Live replicas of a broker set.", alive)
        yield from self._family("downrange_controller_master_epoch", "gauge", "Epoch of a broker set.", epochs)
        yield from self._family(
            "downrange_controller_sync_state_set_size", "gauge", "Members of a sync-state set.", sizes
        )
        yield from self._family(
            "downrange_controller_master_id", "gauge", "Controller id of the master; -1: none.", masters
        )

    def _family(
        self, name: str, kind: str, help_text: str, samples: Sequence[tuple[dict[str, str], float]]
    ) -> Iterator[str]:
        yield f"# HELP {name} {help_text}\n# TYPE {name} {kind}\n"
        for labels, value in samples:
            text = ",".join(f'{key}="{_escaped(one)}"' for key, one in {**self._base, **labels}.items())
            yield f"{name}{{{text}}} {value}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
