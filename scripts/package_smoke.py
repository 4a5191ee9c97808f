"""Use an installed Downrange as a stranger would: `package_smoke.py compiled` or `package_smoke.py pure`.

Runs in an environment that has the package and nothing else, so it uses the standard library and `downrange` only.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DOWNRANGE = str(Path(sys.executable).with_name("downrange"))
PORTS = ("--namesrv-port", "0", "--broker-port", "0", "--metrics-port", "-1", "--grpc-port", "-1")


def output_of(*words: str, given: str = "") -> str:
    done = subprocess.run([DOWNRANGE, *words], input=given, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        sys.exit(f"smoke: downrange {' '.join(words)} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def check(what: str, found: object, wanted: object) -> None:
    if found != wanted:
        sys.exit(f"smoke: {what}: {found!r} instead of {wanted!r}")


def main(variant: str) -> None:
    started = time.monotonic()
    version = output_of("--version").strip()
    check("--version", version.partition("(")[2], f"{variant})")
    with tempfile.TemporaryDirectory() as directory:
        server = subprocess.Popen(
            [DOWNRANGE, "standalone", *PORTS, "--data", directory],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            namesrv = address(server)
            output_of("produce", "orders", "-n", namesrv, given="one\ntwo\nthree\n")
            consumed = output_of("consume", "orders", "-n", namesrv).split()
            check("messages", sorted(consumed), ["one", "three", "two"])
            by_api(namesrv)
        finally:
            server.terminate()
            ended = server.wait(30)
    check("end of the server", ended, 0)
    seconds = time.monotonic() - started
    print(f"smoke: {version}, Python {sys.version.split()[0]}: sent, consumed and stopped in {seconds:.1f} s")


def address(server: subprocess.Popen[str]) -> str:
    """Where the name server of this process listens; its output up to there."""
    assert server.stdout is not None
    shown = ""
    for line in server.stdout:
        shown += line
        if found := re.search(r"name server +(\S+)", line):
            return found[1]
    sys.exit(f"smoke: the server is not ready: {shown.strip()}")


def by_api(namesrv: str) -> None:
    """The first example of the README: the blocking producer, and a consumer of a group."""
    from downrange import Message, Producer, PushConsumer

    with Producer("billing", namesrv=namesrv) as producer:
        check("status", producer.send(Message("paid", b"four")).status.name, "SEND_OK")
    with PushConsumer("shipping", namesrv=namesrv) as consumer:
        consumer.subscribe("paid")
        for message in consumer:
            check("body", message.body, b"four")
            break


if __name__ == "__main__":
    main(sys.argv[1])
