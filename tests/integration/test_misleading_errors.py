"""Mistakes that people make when they start, and the one line that each of them gets."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from downrange import Message
from downrange.testing import EmbeddedBroker, broker

QUIET = ("--metrics-port", "-1", "--grpc-port", "-1")


@pytest.fixture(scope="module")
def mq() -> Iterator[EmbeddedBroker]:
    with broker() as running:
        running.create_topic("orders", 1)
        yield running


def refused(*arguments: str) -> str:
    """What a command that must fail says: one line."""
    command = [sys.executable, "-m", "downrange.cli.main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    (line,) = done.stderr.splitlines()
    return line


def test_a_broker_or_a_name_server_where_a_controller_was_meant(mq: EmbeddedBroker) -> None:
    for address in (mq.namesrv, mq.address):
        assert f"{address} is not a controller" in refused("controller", "status", "-a", address)


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """A server of another protocol: it sends the same bytes to everybody."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(answer)
                    connection.recv(1000)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_broker_where_a_name_server_was_meant(mq: EmbeddedBroker) -> None:
    for command in (("topic", "list"), ("message", "send", "orders", "x"), ("consume", "orders")):
        assert f"{mq.address} is not a name server, but a broker" in refused(*command, "-n", mq.address)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "speaks HTTP, not"),
        (b"\0\0\x0c\x04\0\0\0\0\0\0\x03\0\0\0\x64", "a port for gRPC clients"),
        (b"\x15\x03\x03\0\x02\x02\x46\0\0", "connect with TLS"),
    ],
)
def test_another_protocol_is_recognised(answer: bytes, expected: str) -> None:
    with answering(answer) as address:
        assert expected in refused("topic", "list", "-n", address)


def test_a_web_server_that_waits_for_a_line_is_recognised_at_once() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            address = f"127.0.0.1:{server.server_port}"
            for command in (("topic", "list"), ("message", "send", "orders", "x"), ("consume", "orders")):
                assert "speaks HTTP, not" in refused(*command, "-n", address)
        finally:
            server.shutdown()
            serving.join()


def test_a_unique_id_needs_its_topic(mq: EmbeddedBroker) -> None:
    sent = mq.producer().send(Message("orders", b"x"))
    line = refused("message", "view", sent.message_id, "-n", mq.namesrv)
    assert line == (
        f"downrange: {sent.message_id} is a unique id: only its topic's brokers know it, so name the topic (--topic)"
    )


def test_the_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    file, conf = tmp_path / "file", tmp_path / "broker.conf"
    file.touch()
    ports = ("--namesrv-port", "0", "--broker-port", "0")
    assert f"{file} is a file: a directory is needed" in refused("standalone", "-d", str(file), *ports, *QUIET)
    for path in (file, file / "below"):
        conf.write_text(f"storePathCommitLog={path}\n")
        line = refused("standalone", "-d", str(tmp_path / "data"), "-c", str(conf), *ports, *QUIET)
        assert f" {path}: there is a file where a directory is needed" in line
    conf.write_text("storePathCommitLog=/proc/nowhere/below\n")  # where nobody can make a directory
    line = refused("standalone", "-d", str(tmp_path / "data"), "-c", str(conf), *ports, *QUIET)
    assert line.endswith(" /proc/nowhere/below: No such file or directory")


@pytest.mark.parametrize("option", ["--namesrv-port", "--broker-port", "--metrics-port", "--grpc-port"])
def test_the_option_for_another_port_is_named(option: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {"--namesrv-port": "0", "--broker-port": "0", "--metrics-port": "-1", "--grpc-port": "-1"}
        ports[option] = str(taken.getsockname()[1])
        line = refused("standalone", "-d", str(tmp_path), *(word for pair in ports.items() for word in pair))
        more = " for gRPC clients, or -1 for none" if option == "--grpc-port" else ""
        assert line.endswith(f"address already in use; {option} takes another port{more}")


PIPELINES = [
    ("archive", "out", "nowhere"),
    ("latest", "out", "nowhere"),
    ("sql", "SELECT 1", "--topic", "nowhere"),
    ("stats", "out", "nowhere"),
    ("trace", "out", "--topic", "nowhere"),
]


@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda pipeline: pipeline[0])
def test_a_pipeline_looks_for_its_topics_before_it_starts_spark(
    pipeline: tuple[str, ...], mq: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))  # where Spark cannot start
    arguments = [str(tmp_path / word) if word == "out" else word for word in pipeline]
    line = refused("pipeline", *arguments, "-n", mq.namesrv)
    assert line == f"downrange: no topic nowhere that may be read, says name server {mq.namesrv}"
    assert "is not a name server, but a broker" in refused("pipeline", *arguments, "-n", mq.address)
