"""Apache's C++ client at work, told by one JSON document as argument; says what happens in lines of JSON.

    {"do": "produce", "namesrv": …, "messages": [{"topic", "body", "tags", "keys", "properties", "delay", "how", …}]}
    {"do": "consume", "namesrv": …, "group", "topic", "expression", "orderly", "broadcasting", "fail_first"}
    {"do": "pull", "namesrv": …, "group", "topic"}

Each may have `account`: access key and secret key, with which the client signs.
`how` is sync (the default), async, oneway, orderly or batch. A consumer runs until it is killed.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

from rocketmq.client import Message, Producer, PullConsumer, PushConsumer  # type: ignore[import-untyped]
from rocketmq.ffi import MessageModel  # type: ignore[import-untyped]

lock = threading.Lock()


def say(**line: Any) -> None:
    with lock:
        print(json.dumps(line), flush=True)


def told(message: Any, at: float) -> dict[str, Any]:
    return {
        "body": message.body.decode(),
        "tags": (message.tags or b"").decode(),
        "keys": (message.keys or b"").decode(),
        "colour": (message.get_property("colour") or b"").decode(),
        "queue_id": message.queue_id,
        "queue_offset": message.queue_offset,
        "reconsume_times": message.reconsume_times,
        "born": message.born_timestamp,
        "id": message.id,
        "at": at,
    }


def made(wanted: dict[str, Any]) -> Any:
    message = Message(wanted["topic"])
    message.set_body(wanted["body"])
    if "tags" in wanted:
        message.set_tags(wanted["tags"])
    if "keys" in wanted:
        message.set_keys(wanted["keys"])
    for name, value in wanted.get("properties", {}).items():
        message.set_property(name, value)
    if "delay" in wanted:
        message.set_delay_time_level(wanted["delay"])
    return message


def sign(client: Any, order: dict[str, Any]) -> None:
    if "account" in order:
        client.set_session_credentials(*order["account"], "")


def produce(order: dict[str, Any]) -> None:
    producer = Producer("cppProducers", timeout=5000)
    producer.set_namesrv_addr(order["namesrv"])
    sign(producer, order)
    producer.start()
    batch = [made(wanted) for wanted in order["messages"] if wanted.get("how") == "batch"]
    if batch:
        result = producer.send_batch(batch)
        say(sent="batch", status=result.status, id=result.msg_id, offset=result.offset)
    answered = threading.Semaphore(0)
    waiting = 0
    for wanted in order["messages"]:
        match wanted.get("how", "sync"):
            case "sync":
                result = producer.send_sync(made(wanted))
                say(sent=wanted["body"], status=result.status, id=result.msg_id, offset=result.offset)
            case "orderly":
                result = producer.send_orderly(made(wanted), wanted["shard"])
                say(sent=wanted["body"], status=result.status, id=result.msg_id, offset=result.offset)
            case "oneway":
                producer.send_oneway(made(wanted))
            case "async":

                def done(result: Any, body: str = wanted["body"]) -> None:
                    say(sent=body, status=result.status, id=result.msg_id, offset=result.offset)
                    answered.release()

                producer.send_async(made(wanted), done, lambda error: say(error=str(error)))
                waiting += 1
    for _ in range(waiting):
        answered.acquire(timeout=10)
    producer.shutdown()
    say(done=True)


def consume(order: dict[str, Any]) -> None:
    model = MessageModel.BROADCASTING if order.get("broadcasting") else MessageModel.CLUSTERING
    consumer = PushConsumer(order["group"], orderly=order.get("orderly", False), message_model=model)
    consumer.set_namesrv_addr(order["namesrv"])
    sign(consumer, order)
    consumer.set_instance_name(order.get("instance", order["group"]))
    failed: set[str] = set()

    def on_message(message: Any) -> None:
        line = told(message, time.time() * 1000)
        say(**line)
        if order.get("fail_first") and line["body"] not in failed:
            failed.add(line["body"])
            raise RuntimeError("once more, please")

    consumer.subscribe(order["topic"], on_message, order.get("expression", "*"))
    consumer.start()
    say(started=True)
    sys.stdin.read()  # until the test closes it
    consumer.shutdown()
    say(done=True)


def pull(order: dict[str, Any]) -> None:
    consumer = PullConsumer(order["group"])
    consumer.set_namesrv_addr(order["namesrv"])
    sign(consumer, order)
    consumer.start()
    for message in consumer.pull(order["topic"]):
        say(**told(message, time.time() * 1000))
    consumer.shutdown()
    say(done=True)


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    {"produce": produce, "consume": consume, "pull": pull}[order["do"]](order)
