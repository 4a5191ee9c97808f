"""The official gRPC client of Python as a process: an order in JSON as its argument, JSON lines as its output.

    produce  {endpoints, topics, messages: [{topic, body, tag, keys, properties, group, delay, transaction, recall}]}
    simple   {endpoints, group, topic, filter, invisible, count, ack}
    push     {endpoints, group, topic, filter, fail: {body: times}, sleep, threads}      until standard input ends

A message with `transaction` (commit, rollback, unknown) is sent in one; `check` answers the checks of unknown ones.
"""

import json
import sys
import threading
import time

from rocketmq import (
    ClientConfiguration,
    ConsumeResult,
    Credentials,
    FilterExpression,
    Message,
    MessageListener,
    Producer,
    PushConsumer,
    SimpleConsumer,
    TransactionChecker,
    TransactionResolution,
)
from rocketmq.grpc_protocol import FilterType

printing = threading.Lock()
RESOLUTIONS = {"commit": TransactionResolution.COMMIT, "rollback": TransactionResolution.ROLLBACK}


def say(event, **members):
    with printing:
        print(json.dumps({"event": event, "time": time.time(), **members}), flush=True)


def configuration(order):
    user = order.get("account") or {}
    return ClientConfiguration(order["endpoints"], Credentials(user.get("accessKey", ""), user.get("secretKey", "")))


def expression(order):
    text = order.get("filter", "*")
    return FilterExpression(text, FilterType.SQL) if order.get("sql") else FilterExpression(text)


def shown(message):
    return {
        "body": message.body.decode("utf-8", "replace"),
        "size": len(message.body),
        "topic": message.topic,
        "tag": message.tag,
        "keys": sorted(message.keys or []),
        "properties": dict(message.properties),
        "messageId": message.message_id,
        "attempt": message.delivery_attempt,
        "group": message.message_group,
        "corrupted": bool(message.corrupted),
    }


class Checker(TransactionChecker):
    def __init__(self, answer):
        self.answer = answer

    def check(self, message):
        say("check", **shown(message))
        return RESOLUTIONS.get(self.answer, TransactionResolution.TRANSACTION_RESOLUTION_UNSPECIFIED)


def outgoing(wanted):
    message = Message()
    message.topic = wanted["topic"]
    message.body = wanted["body"].encode() * wanted.get("times", 1)
    if wanted.get("tag"):
        message.tag = wanted["tag"]
    if wanted.get("keys"):
        message.keys = wanted["keys"]
    for name, value in (wanted.get("properties") or {}).items():
        message.add_property(name, value)
    if wanted.get("group"):
        message.message_group = wanted["group"]
    if "delay" in wanted:
        message.delivery_timestamp = int(time.time() + wanted["delay"])
    return message


def produce(order):
    checker = Checker(order.get("check"))
    producer = Producer(configuration(order), tuple(order["topics"]), checker=checker)
    producer.startup()
    for wanted in order["messages"]:
        time.sleep(order.get("pause", 0))
        message = outgoing(wanted)
        try:
            if wanted.get("transaction"):
                transaction = producer.begin_transaction()
                receipt = producer.send(message, transaction)
                if wanted["transaction"] == "commit":
                    transaction.commit()
                elif wanted["transaction"] == "rollback":
                    transaction.rollback()
            else:
                receipt = producer.send(message)
            handle = getattr(receipt, "recall_handle", None)
            if wanted.get("recall"):
                producer.recall_message(wanted["topic"], handle)
            say("sent", messageId=receipt.message_id, recallHandle=handle, body=wanted["body"])
        except Exception as error:
            say("refused", error=type(error).__name__, text=str(error), body=wanted["body"])
    say("done")
    if order.get("stay"):
        sys.stdin.read()
    producer.shutdown()


def simple(order):
    consumer = SimpleConsumer(
        configuration(order), order["group"], {order["topic"]: expression(order)}, order.get("await", 5)
    )
    consumer.startup()
    say("started")
    left = order["count"]
    end = time.monotonic() + order.get("seconds", 40)
    while left > 0 and time.monotonic() < end:
        try:
            found = consumer.receive(order.get("batch", 16), order.get("invisible", 30)) or []
        except Exception as error:
            say("failed", error=type(error).__name__, text=str(error))
            time.sleep(0.2)
            continue
        for message in found:
            left -= 1
            say("message", **shown(message))
            if "nack" in order and message.delivery_attempt == 1:
                consumer.change_invisible_duration(message, order["nack"])
            elif order.get("ack", True):
                consumer.ack(message)
    say("done")
    if order.get("stay"):
        sys.stdin.read()
    consumer.shutdown()


class Listener(MessageListener):
    def __init__(self, order):
        self.sleep = order.get("sleep", 0)
        self.left = dict(order.get("fail") or {})

    def consume(self, message):
        say("message", **shown(message))
        body = message.body.decode("utf-8", "replace")
        if self.left.get(body, 0) > 0:
            self.left[body] -= 1
            return ConsumeResult.FAILURE
        time.sleep(self.sleep)
        say("consumed", body=body)
        return ConsumeResult.SUCCESS


def push(order):
    consumer = PushConsumer(
        configuration(order),
        order["group"],
        Listener(order),
        {order["topic"]: expression(order)},
        consumption_thread_count=order.get("threads", 4),
    )
    consumer.startup()
    say("started")
    sys.stdin.read()
    consumer.shutdown()


if __name__ == "__main__":
    {"produce": produce, "simple": simple, "push": push}[sys.argv[1]](json.loads(sys.argv[2]))
