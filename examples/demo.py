"""`make demo`: a name server as a process, a broker that registers with it, and the route a client gets."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile

from downrange.model.topics import TopicConfig
from downrange.protocol.bodies.body import decode_body, encode_body
from downrange.protocol.bodies.data_version import DataVersion
from downrange.protocol.bodies.registration import RegisterBrokerBody, RegisterBrokerRequest
from downrange.protocol.bodies.routes import GetRouteInfoRequest, TopicRouteData
from downrange.protocol.bodies.topics import TopicConfigTable
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import request
from downrange.transport.loop import run
from downrange.transport.pool import Pool


async def show_route(namesrv: str) -> None:
    pool = Pool()
    topics = {name: TopicConfig(name, read_queue_nums=4, write_queue_nums=4) for name in ("orders", "payments")}
    table = TopicConfigTable(topic_config_table=topics, data_version=DataVersion(counter=1))
    header = RegisterBrokerRequest(
        broker_name="broker-a",
        broker_addr="127.0.0.1:10911",
        cluster_name="DefaultCluster",
        ha_server_addr="127.0.0.1:10912",
        broker_id=0,
    )
    body = encode_body(RegisterBrokerBody(topic_config_serialize_wrapper=table))
    await pool.request(namesrv, request(RequestCode.REGISTER_BROKER, header, body=body), timeout=3)
    print(f"2. broker-a registered with topics {', '.join(topics)}")

    question = request(RequestCode.GET_ROUTEINFO_BY_TOPIC, GetRouteInfoRequest("orders"))
    answer = await pool.request(namesrv, question, timeout=3)
    route = decode_body(TopicRouteData, answer.body_bytes)
    for queue, broker in zip(route.queue_datas, route.broker_datas, strict=True):
        print(f"3. route of orders: {queue.write_queue_nums} queues on {broker.broker_name} at {broker.master_address}")
    await pool.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as data:
        command = [sys.executable, "-m", "downrange.cli.main", "namesrv", "--port", "0", "--data", data]
        server = subprocess.Popen([*command, "--log-level", "WARNING"], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        try:
            ready = re.search(r"ready on (\S+)", server.stdout.readline())
            if ready is None:
                sys.exit("demo: the name server did not start")
            print(f"1. name server runs on {ready[1]}")
            run(show_route(ready[1]))
        finally:
            server.terminate()
            code = server.wait(10)
        print(f"4. name server stopped, exit code {code}")
    sys.exit(code)


if __name__ == "__main__":
    main()
