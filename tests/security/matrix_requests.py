"""The requests of the matrix: one for each row of matrix.txt, made for a topic and a group."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from downrange.model.message_id import offset_message_id, pack_host
from downrange.model.recall_handle import RecallHandle
from downrange.protocol.bodies.send import BatchEntry, encode_batch
from downrange.protocol.command import Command, request

TIME: Final = 1_700_000_000_000
OTHER_TOPIC: Final = "T9"
OTHER_GROUP: Final = "G9"


class Half(NamedTuple):
    """Where a half message lies: in the log, and in the half queue."""

    physical_offset: int
    queue_offset: int


class Scene(NamedTuple):
    """What a request is made for: names, and stored messages of the topic and of another topic."""

    topic: str
    group: str
    record: int
    """Where a message of the topic lies in the log."""
    other_record: int
    half: Half


Make = Callable[[Scene], Command]


def ask(code: int, body: object = b"", /, **fields: object) -> Command:
    """A request of ext fields; a body that is no bytes goes as JSON."""
    text = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in fields.items()}
    return request(code, ext_fields=text, body=body if isinstance(body, bytes) else json.dumps(body).encode())


def recall(topic: str, topic_of_handle: str) -> Command:
    handle = RecallHandle(topic_of_handle, "broker-a", 1_700_000_000_001, "ID").encode()
    return ask(370, topic=topic, recallHandle=handle, producerGroup="PG")


def send(
    code: int, topic: str, *, body: bytes = b"body", properties: Mapping[str, str] = {}, batch: bool = False
) -> Command:
    """A send with the field names of V2."""
    text = "\x02".join(f"{name}\x01{value}" for name, value in properties.items())
    flags = 4 if "TRAN_MSG" in properties else 0
    return ask(
        code, body, a="PG", b=topic, c="TBW102", d=4, e=0, f=flags, g=TIME, h=0, i=text, j=0, k=False, m=batch
    )  # fmt: skip


def send_v1(code: int, topic: str) -> Command:
    return ask(
        code, b"body", producerGroup="PG", topic=topic, defaultTopic="TBW102", defaultTopicQueueNums=4, queueId=0,
        sysFlag=0, bornTimestamp=TIME, flag=0, properties="KEYS\x01k", reconsumeTimes=0, unitMode=False,
    )  # fmt: skip


def pull(code: int, topic: str, group: str) -> Command:
    return ask(
        code, consumerGroup=group, topic=topic, queueId=0, queueOffset=0, maxMsgNums=1, sysFlag=4, commitOffset=0,
        suspendTimeoutMillis=0, subscription="*", subVersion=0,
    )  # fmt: skip


def pop(topic: str, group: str) -> Command:
    return ask(
        200050, topic=topic, consumerGroup=group, queueId=0, maxMsgNums=1, invisibleTime=10_000, pollTime=0,
        bornTime=TIME, initMode=0,
    )  # fmt: skip


HANDLE: Final = f"0 {TIME} 10000 0 0 broker-a 0 0"


def batch_ack(*acked: tuple[str, str]) -> Command:
    acks = [
        {"c": group, "t": topic, "r": "0", "so": 0, "q": 0, "rq": 0, "pt": TIME, "it": 10_000, "b": "AQ=="}
        for topic, group in acked
    ]
    return ask(200151, {"brokerName": "broker-a", "acks": acks})


def subscription(topic: str) -> dict[str, object]:
    return {"topic": topic, "subString": "*", "subVersion": 1, "expressionType": "TAG", "tagsSet": [], "codeSet": []}


def heartbeat(group: str, *topics: str) -> Command:
    consumer = {
        "groupName": group, "consumeType": "CONSUME_PASSIVELY", "messageModel": "CLUSTERING",
        "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET", "subscriptionDataSet": [subscription(one) for one in topics],
    }  # fmt: skip
    return ask(34, {"clientID": "c@1", "consumerDataSet": [consumer], "producerDataSet": []})


def locks(code: int, group: str, *topics: str) -> Command:
    queues = [{"topic": topic, "brokerName": "b", "queueId": 0} for topic in topics]
    return ask(code, {"consumerGroup": group, "clientId": "c@1", "mqSet": queues})


def end_transaction(half: Half) -> Command:
    return ask(
        37, producerGroup="PG", tranStateTableOffset=half.queue_offset, commitLogOffset=half.physical_offset,
        commitOrRollback=8, msgId="0" * 32, fromTransactionCheck=False, topic="T1",
    )  # fmt: skip


def message_id(offset: int) -> str:
    return offset_message_id(pack_host("127.0.0.1", 10911), offset)


def topic_config(topic: str) -> dict[str, object]:
    return {
        "topicName": topic, "readQueueNums": 3, "writeQueueNums": 3, "perm": 6, "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": 0, "order": False,
    }  # fmt: skip


def group_config(group: str) -> dict[str, object]:
    return {"groupName": group, "retryQueueNums": 1, "retryMaxTimes": 5}


NO_HALF: Final = Half(7, 7)
REPLY_TOPIC: Final = "DefaultCluster_REPLY_TOPIC"
ACL: Final = {
    "subject": "User:newcomer",
    "policies": [
        {"policyType": "Custom", "entries": [{"resource": "Topic:x", "actions": ["Pub"], "decision": "Allow"}]}
    ],
}

BROKER: Final[Mapping[str, Make]] = {
    "10": lambda to: send_v1(10, to.topic),
    "310": lambda to: send(310, to.topic),
    "310/batch": lambda to: send(310, to.topic, body=encode_batch([BatchEntry(0, b"one", "")]), batch=True),
    "310/half": lambda to: send(310, to.topic, properties={"TRAN_MSG": "true", "PGROUP": "PG", "UNIQ_KEY": "u"}),
    "310/delay": lambda to: send(310, to.topic, properties={"DELAY": "18", "REAL_TOPIC": OTHER_TOPIC}),
    "310/timer": lambda to: send(310, to.topic, properties={"TIMER_DELAY_SEC": "900", "REAL_TOPIC": OTHER_TOPIC}),
    "310/retry": lambda to: send(310, f"%RETRY%{to.group}"),
    "310/dlq": lambda to: send(310, f"%DLQ%{to.group}"),
    "320": lambda to: send(320, to.topic, body=encode_batch([BatchEntry(0, b"one", "")] * 2), batch=True),
    "324": lambda to: send_v1(324, REPLY_TOPIC),
    "324/topic": lambda to: send_v1(324, to.topic),
    "325": lambda to: send(325, REPLY_TOPIC),
    "325/topic": lambda to: send(325, to.topic),
    "37": lambda to: end_transaction(to.half),
    "37/none": lambda to: end_transaction(NO_HALF),
    "370": lambda to: recall(to.topic, to.topic),
    "370/handle": lambda to: recall(to.topic, OTHER_TOPIC),
    "11": lambda to: pull(11, to.topic, to.group),
    "11/group": lambda to: pull(11, to.topic, OTHER_GROUP),
    "11/topic": lambda to: pull(11, OTHER_TOPIC, to.group),
    "11/waiting": lambda to: pull(11, "SCHEDULE_TOPIC_XXXX", to.group),
    "11/timer": lambda to: pull(11, "rmq_sys_wheel_timer", to.group),
    "361": lambda to: pull(361, to.topic, to.group),
    "200050": lambda to: pop(to.topic, to.group),
    "200050/group": lambda to: pop(to.topic, OTHER_GROUP),
    "200050/topic": lambda to: pop(OTHER_TOPIC, to.group),
    "200051": lambda to: ask(200051, topic=to.topic, consumerGroup=to.group, queueId=0, extraInfo=HANDLE, offset=0),
    "200151": lambda to: batch_ack((to.topic, to.group)),
    "200151/mixed": lambda to: batch_ack((to.topic, to.group), (OTHER_TOPIC, OTHER_GROUP)),
    "200052": lambda to: ask(200052, topic=to.topic, consumerGroup=to.group, queueId=0, maxMsgNums=1),
    "200053": lambda to: ask(
        200053, topic=to.topic, consumerGroup=to.group, queueId=0, extraInfo=HANDLE, offset=0, invisibleTime=60_000
    ),
    "200054": lambda to: ask(200054, topic=to.topic, consumerGroup=to.group, queueId=0, pollTime=0, bornTime=TIME),
    "200055": lambda to: ask(200055, topic=to.topic, consumerGroup=to.group, queueId=0),
    "400": lambda to: ask(
        400, {"topic": to.topic, "consumerGroup": to.group, "clientId": "c@1", "strategyName": "AVG",
              "messageModel": "CLUSTERING"},
    ),
    "401": lambda to: ask(401, {"topic": to.topic, "consumerGroup": to.group, "mode": "POP", "popShareQueueNum": 0}),
    "402": lambda to: ask(402),
    "34": lambda to: heartbeat(to.group, to.topic, f"%RETRY%{to.group}"),
    "34/producer": lambda to: ask(34, {"clientID": "c@1", "producerDataSet": [{"groupName": to.group}]}),
    "34/mixed": lambda to: heartbeat(to.group, to.topic, OTHER_TOPIC),
    "35": lambda to: ask(35, clientID="c@1", consumerGroup=to.group),
    "35/producer": lambda to: ask(35, clientID="c@1", producerGroup=to.group),
    "36": lambda to: ask(36, offset=to.record, group=to.group, delayLevel=18),
    "36/record": lambda to: ask(36, offset=to.other_record, group=to.group, delayLevel=18, originTopic=to.topic),
    "38": lambda to: ask(38, consumerGroup=to.group),
    "41": lambda to: locks(41, to.group, to.topic),
    "41/mixed": lambda to: locks(41, to.group, to.topic, OTHER_TOPIC),
    "42": lambda to: locks(42, to.group, to.topic),
    "46": lambda to: ask(46, {"clientId": "c@1", "group": to.group, "subscriptionData": subscription(to.topic)}),
    "14": lambda to: ask(14, consumerGroup=to.group, topic=to.topic, queueId=0),
    "15": lambda to: ask(15, consumerGroup=to.group, topic=to.topic, queueId=0, commitOffset=1),
    "29": lambda to: ask(29, topic=to.topic, queueId=0, timestamp=TIME),
    "30": lambda to: ask(30, topic=to.topic, queueId=0),
    "31": lambda to: ask(31, topic=to.topic, queueId=0),
    "32": lambda to: ask(32, topic=to.topic, queueId=0),
    "12": lambda to: ask(12, topic=to.topic, key="k", maxNum=9, beginTimestamp=0, endTimestamp=1 << 60),
    "33": lambda to: ask(33, offset=to.record),
    "33/topic": lambda to: ask(33, offset=to.other_record, topic=to.topic),
    "33/none": lambda to: ask(33, offset=1 << 40, topic=to.topic),
    "17": lambda to: ask(
        17, topic=to.topic, defaultTopic="TBW102", readQueueNums=3, writeQueueNums=3, perm=6,
        topicFilterType="SINGLE_TAG", topicSysFlag=0, order=False,
    ),
    "18": lambda to: ask(18, {"topicConfigList": [topic_config(to.topic), topic_config("T8")]}),
    "215": lambda to: ask(215, topic=to.topic),
    "202": lambda to: ask(202, topic=to.topic),
    "300": lambda to: ask(300, topic=to.topic),
    "321": lambda to: ask(321, topic=to.topic, queueId=0, index=0, count=1, consumerGroup=to.group),
    "323": lambda to: ask(323, msgId=message_id(to.record), topic=to.topic),
    "351": lambda to: ask(351, topic=to.topic),
    "200": lambda to: ask(200, group_config(to.group)),
    "225": lambda to: ask(225, {"groupConfigList": [group_config(to.group)]}),
    "207": lambda to: ask(207, groupName=to.group, removeOffset=True),
    "203": lambda to: ask(203, consumerGroup=to.group),
    "208": lambda to: ask(208, consumerGroup=to.group, topic=to.topic),
    "222": lambda to: ask(222, topic=to.topic, group=to.group, timestamp=0, isForce=True),
    "223": lambda to: ask(223, topic=to.topic, group=to.group),
    "303": lambda to: ask(303, topic=to.topic, group=to.group),
    "307": lambda to: ask(307, consumerGroup=to.group, clientId="c@1", jstackEnable=True),
    "308": lambda to: ask(308, topic=to.topic, compareGroup=to.group),
    "309": lambda to: ask(309, consumerGroup=to.group, clientId="c@1", topic=to.topic, msgId=message_id(to.record)),
    "314": lambda to: ask(314, srcGroup=to.group, destGroup=to.group, topic=to.topic, offline=True),
    "352": lambda to: ask(352, group=to.group),
    "25": lambda to: ask(25, b"flushConsumerOffsetInterval=4999\n"),
    "26": lambda to: ask(26),
    "28": lambda to: ask(28),
    "21": lambda to: ask(21),
    "43": lambda to: ask(43),
    "45": lambda to: ask(45),
    "60": lambda to: ask(60),
    "61": lambda to: ask(61),
    "906": lambda to: ask(906),
    "907": lambda to: ask(907),
    "1007": lambda to: ask(1007),
    "1008": lambda to: ask(1008, masterEpoch="1"),
    "201": lambda to: ask(201),
    "204": lambda to: ask(204, producerGroup=to.group),
    "305": lambda to: ask(305),
    "306": lambda to: ask(306),
    "315": lambda to: ask(315, statsName="TOPIC_PUT_NUMS", statsKey=to.topic),
    "316": lambda to: ask(316),
    "317": lambda to: ask(317, isOrder=False),
    "328": lambda to: ask(328),
    "329": lambda to: ask(329),
    "50": lambda to: ask(50, accessKey="newcomer", secretKey="newSecret7", admin=True, topicPerms="T9=PUB|SUB"),
    "51": lambda to: ask(51, accessKey="newcomer"),
    "52": lambda to: ask(52),
    "53": lambda to: ask(53, globalWhiteAddrs="10.99.99.99", aclFileFullPath=""),
    "54": lambda to: ask(54),
    "3001": lambda to: ask(3001, {"password": "newSecret7", "userType": "Super"}, username="newcomer"),
    "3002": lambda to: ask(3002, {"password": "newSecret8"}, username="newcomer"),
    "3003": lambda to: ask(3003, username="newcomer"),
    "3004": lambda to: ask(3004, username="admin-key"),
    "3005": lambda to: ask(3005),
    "3006": lambda to: ask(3006, ACL, subject="User:newcomer"),
    "3007": lambda to: ask(3007, ACL, subject="User:newcomer"),
    "3008": lambda to: ask(3008, subject="User:newcomer"),
    "3009": lambda to: ask(3009, subject="User:producer-key"),
    "3010": lambda to: ask(3010),
    "9999": lambda to: ask(9999),
}  # fmt: skip


def broker_identity(code: int, topic: str) -> Command:
    """A broker speaks: it registers the topic, or it leaves."""
    table = {"topicConfigTable": {topic: topic_config(topic)}, "dataVersion": {"counter": 1, "timestamp": TIME}}
    registration: object = {"topicConfigSerializeWrapper": table, "filterServerList": []}
    body = registration if code == 103 else table["dataVersion"]
    return ask(
        code, body, brokerName="rogue", brokerAddr="10.9.8.7:10911", clusterName="DefaultCluster",
        haServerAddr="10.9.8.7:10912", brokerId=0, compressed=False, bodyCrc32=0,
    )  # fmt: skip


NAMESRV: Final[Mapping[str, Make]] = {
    "105": lambda to: ask(105, topic=to.topic),
    "106": lambda to: ask(106),
    "901": lambda to: ask(901, clusterName="DefaultCluster", brokerName="broker-a"),
    "206": lambda to: ask(206),
    "224": lambda to: ask(224, cluster="DefaultCluster"),
    "304": lambda to: ask(304),
    "311": lambda to: ask(311),
    "312": lambda to: ask(312),
    "313": lambda to: ask(313),
    "103": lambda to: broker_identity(103, to.topic),
    "104": lambda to: ask(
        104, brokerName="broker-a", brokerAddr="10.1.1.1:10911", clusterName="DefaultCluster", brokerId=0
    ),
    "322": lambda to: broker_identity(322, to.topic),
    "904": lambda to: ask(904, clusterName="DefaultCluster", brokerAddr="10.1.1.1:10911", brokerName="broker-a"),
    "217": lambda to: ask(217, {"queueDatas": [{"brokerName": "rogue"}], "brokerDatas": []}, topic=to.topic),
    "205": lambda to: ask(205, brokerName="broker-a"),
    "327": lambda to: ask(327, brokerName="broker-a"),
    "216": lambda to: ask(216, topic=to.topic),
    "100": lambda to: ask(100, namespace="n", key="k", value="v"),
    "101": lambda to: ask(101, namespace="ORDER_TOPIC_CONFIG", key="T1"),
    "102": lambda to: ask(102, namespace="ORDER_TOPIC_CONFIG", key="T1"),
    "219": lambda to: ask(219, namespace="ORDER_TOPIC_CONFIG"),
    "318": lambda to: ask(318, b"orderMessageEnable=true"),
    "319": lambda to: ask(319),
    "9999": lambda to: ask(9999),
}  # fmt: skip


def of_set(code: int, body: object = b"", **fields: object) -> Command:
    """A request about the broker set `broker-a`, whose master is 1."""
    return ask(code, body, clusterName="DefaultCluster", brokerName="broker-a", **fields)


CONTROLLER: Final[Mapping[str, Make]] = {
    "1005": lambda to: ask(1005),
    "1006": lambda to: ask(1006, ["broker-a"]),
    "904": lambda to: of_set(904, brokerAddr="10.1.1.9:10911", brokerId=2, heartbeatTimeoutMills=600_000),
    "1001": lambda to: of_set(1001, {"syncStateSet": [1, 2], "syncStateSetEpoch": 1}, masterBrokerId=1, masterEpoch=1),
    "1002": lambda to: of_set(1002, brokerId=2, designateElect=False),
    "1002/designate": lambda to: of_set(1002, brokerId=2, designateElect=True),
    "1002/unclean": lambda to: of_set(1002, brokerId=2, designateElect=True, uncleanElect=True),
    "1003": lambda to: of_set(1003, brokerId=1, brokerAddress="10.9.8.7:10911", invokeTime=TIME),
    "1004": lambda to: of_set(1004),
    "1012": lambda to: of_set(1012),
    "1013": lambda to: of_set(1013, appliedBrokerId=3, registerCheckCode=f"10.9.8.7:10911;{TIME}"),
    "1009": lambda to: ask(1009, b"scanNotActiveBrokerInterval=3000"),
    "1010": lambda to: ask(1010),
    "1011": lambda to: of_set(1011, brokerControllerIdsToClean="2", isCleanLivingBroker=True),
    "9999": lambda to: ask(9999),
}  # fmt: skip
