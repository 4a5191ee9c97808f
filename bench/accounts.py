"""What access control costs: the broker's CPU a message with and without accounts, of either kind, in one run.

Each message is signed by itself, and each signature is checked. The requests with a signature are also sent to a broker
that asks for none: the difference between the two is the check, the rest are the longer requests.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

from bench.report import QUICK, Figure, compared, table
from bench.served import Load, by_turns, send_apart, served_in
from downrange.client.config import ClientConfig
from downrange.load import SendPlan, Target, find_target
from downrange.transport.loop import run as run_loop
from tests.support.standalone_process import Standalone

ROUNDS: Final = 1 if QUICK else 3
SECONDS: Final = 0.4 if QUICK else 1.5
SHAPES: Final = ((8, 32), (64, 1), (1, 1))
KEY, SECRET = "producer-key", "producer-secret"
PLAIN_ACL: Final = f"accounts:\n- {{accessKey: {KEY}, secretKey: {SECRET}, admin: true}}\n"
BROKERS: Final[Mapping[str, Mapping[str, object]]] = {
    "no accounts": {},
    "plain_acl.yml": {"aclEnable": "true"},
    "ACL 2.0": {
        "authenticationEnabled": "true",
        "authorizationEnabled": "true",
        "initAuthenticationUser": f'{{"username":"{KEY}","password":"{SECRET}"}}',
    },
}


def where(running: Standalone, topic: str, *, is_signed: bool) -> Target:
    key, secret = (KEY, SECRET) if is_signed else (None, None)
    config = ClientConfig((running.namesrv,), access_key=key, secret_key=secret)
    found = find_target(topic=topic, queues=4, broker=running.broker, server_pid=running.process.pid, config=config)
    return run_loop(found)


def run() -> list[Figure]:
    with ExitStack() as stack:
        targets: dict[str, Target] = {}
        for name, settings in BROKERS.items():
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
            (directory / "plain_acl.yml").write_text(PLAIN_ACL)
            running = stack.enter_context(served_in(directory, settings))
            if not settings:
                targets[name] = where(running, "unsigned", is_signed=False)
            targets[f"{name}, signed"] = where(running, "signed", is_signed=True)
        loads: dict[str, Load] = {}
        for connections, outstanding in SHAPES:
            plan = SendPlan(SECONDS, 0.3, 128, connections=connections, outstanding=outstanding)
            for name, target in targets.items():
                loads[f"{connections}x{outstanding}, {name}"] = partial(send_apart, target, plan)
        best = by_turns(loads, ROUNDS)
    figures: list[Figure] = []
    for name, one in best.items():
        base = best[f"{name.partition(',')[0]}, no accounts"]
        cpu, plain = one.server_cpu_micros, base.server_cpu_micros
        figures.append(compared(f"send 128 B, {name}: server CPU", cpu, "µs a message", plain, "no accounts"))
    figures.append(Figure("requests refused in all these loads", sum(one.refused for one in best.values()), "requests"))
    return figures


if __name__ == "__main__":
    print(table(run()))
