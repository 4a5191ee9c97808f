"""Reading and writing topics of servers that take TLS only: the driver and its workers connect with TLS."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.functions import col

from downrange.settings import format_properties
from tests.support.certificates import Certificates
from tests.support.standalone_process import standalone_process


def test_a_topic_is_written_and_read_over_tls(spark: SparkSession, tmp_path: Path) -> None:
    files = Certificates.make(tmp_path / "tls")
    (cert, key), (client_cert, client_key) = files.server, files.client
    own = {"tls.client.trustCertPath": files.ca, "tls.client.certPath": client_cert, "tls.client.keyPath": client_key}
    settings = {
        "tls.server.mode": "enforcing",
        "tls.server.certPath": cert,
        "tls.server.keyPath": key,
        "tls.server.need.client.auth": "require",
        "tls.server.trustCertPath": files.ca,
        **own,
    }
    client = tmp_path / "client.properties"
    client.write_text(format_properties({name: str(path) for name, path in own.items()}))
    with standalone_process(tmp_path, settings) as running:
        options = {"namesrv": running.namesrv, "tls.config.file": str(client)}
        rows = spark.range(0, 1000, 1, 2).select(col("id").cast("string").alias("body"))
        rows.write.format("rocketmq").mode("append").options(topic="orders", **options).save()
        read = spark.read.format("rocketmq").options(subscribe="orders", minPartitions="3", **options).load()
        assert {int(row.body) for row in read.select("body").collect()} == set(range(1000))
        plain = spark.read.format("rocketmq").options(subscribe="orders", namesrv=running.namesrv).load()
        with pytest.raises(PySparkException, match="no name server answers"):
            plain.count()
