"""Frames per second through the codec, beside an echo server that sends the same frames back over loopback."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from bench.namesrv import driver, start
from bench.report import Figure, alternate, table
from downrange.protocol.bodies.send import SendMessageRequest
from downrange.protocol.codes import RequestCode, SerializeType
from downrange.protocol.command import Command
from downrange.protocol.framing import FrameDecoder, encode

FIELDS = {
    "a": "pg",
    "b": "TopicTest",
    "c": "TBW102",
    "d": "4",
    "e": "1",
    "f": "0",
    "g": "1700000000000",
    "h": "0",
    "i": "UNIQ_KEY\x017F0000010ABC18B4AAC2000000000001\x02TAGS\x01TagA\x02WAIT\x01true",
    "j": "0",
    "k": "false",
    "m": "false",
    "n": "broker-a",
}
FRAMES = 64
ROUNDS = 200


def run() -> list[Figure]:
    works: dict[str, Callable[[], int]] = {}
    for kind in SerializeType:
        send = Command(RequestCode.SEND_MESSAGE_V2, 5, raw_ext=FIELDS, body=bytes(128), serialize_type=kind)
        chunk = encode(send) * FRAMES
        reply = send.reply(ext_fields={"msgId": "7F0000010ABC18B4AAC2000000000001", "queueId": "1", "queueOffset": "7"})

        def decode(chunk: bytes = chunk) -> int:
            decoder = FrameDecoder()
            for _ in range(ROUNDS):
                decoder.feed(chunk)
            return ROUNDS * FRAMES

        def decode_typed(chunk: bytes = chunk) -> int:
            decoder = FrameDecoder()
            for _ in range(ROUNDS):
                for command in decoder.feed(chunk):
                    command.header(SendMessageRequest)
            return ROUNDS * FRAMES

        def encode_reply(reply: Command = reply) -> int:
            for _ in range(ROUNDS * FRAMES):
                encode(reply)
            return ROUNDS * FRAMES

        works[f"decode frame, {kind.name}"] = decode
        works[f"decode frame and send header, {kind.name}"] = decode_typed
        works[f"encode send reply, {kind.name}"] = encode_reply
    with ExitStack() as stack:
        _, address = start(stack, "-m", "bench.echo")
        frame = encode(Command(RequestCode.SEND_MESSAGE_V2, 5, raw_ext=FIELDS, body=bytes(128)))
        rates = alternate({"echo": driver(address, frame, RequestCode.SEND_MESSAGE_V2), **works})
    echo = rates.pop("echo")
    figures = [Figure("echo of the same frames", echo, "frames/s")]
    return figures + [Figure(name, rate, "frames/s", rate / echo, "echo") for name, rate in rates.items()]


if __name__ == "__main__":
    print(table(run()))
