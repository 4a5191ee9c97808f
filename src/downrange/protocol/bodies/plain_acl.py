"""Requests 50 to 53: the accounts and white lists of access control 4.x, changed while the broker runs."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from downrange.protocol.bodies.body import decode_body, encode_body
from downrange.protocol.bodies.data_version import DataVersion
from downrange.protocol.bodies.fields import Header


class UpdateAclConfigRequest(Header, frozen=True, kw_only=True):
    """Request 50. Permissions by name travel as `name=PERM`, joined by commas."""

    access_key: str = ""
    secret_key: str = ""
    white_remote_address: str | None = None
    admin: bool = False
    default_topic_perm: str | None = None
    default_group_perm: str | None = None
    topic_perms: str | None = None
    group_perms: str | None = None

    def __repr__(self) -> str:
        return f"<UpdateAclConfigRequest {self.access_key}>"


class DeleteAclConfigRequest(Header, frozen=True):
    """Request 51."""

    access_key: str


class UpdateGlobalWhiteAddrsRequest(Header, frozen=True):
    """Request 53. An empty file name stands for plain_acl.yml."""

    global_white_addrs: str
    acl_file_full_path: str = ""


class AclInfoResponse(Header, frozen=True, kw_only=True):
    """The answer to request 52: versions as JSON."""

    version: str
    all_acl_file_version: str
    broker_name: str
    broker_addr: str
    cluster_name: str

    @classmethod
    def of(
        cls, version: DataVersion, files: Mapping[str, DataVersion], broker_name: str, broker_addr: str, cluster: str
    ) -> AclInfoResponse:
        table = {name: msgspec.Raw(encode_body(one)) for name, one in files.items()}
        return cls(
            version=encode_body(version).decode(),
            all_acl_file_version=msgspec.json.encode(table).decode(),
            broker_name=broker_name,
            broker_addr=broker_addr,
            cluster_name=cluster,
        )

    @property
    def file_versions(self) -> dict[str, DataVersion]:
        """The version of each file by its name."""
        table = msgspec.json.decode(self.all_acl_file_version, type=dict[str, msgspec.Raw])
        return {name: decode_body(DataVersion, bytes(one)) for name, one in table.items()}


def split_list(text: str) -> list[str]:
    """The parts of a list joined by commas; a comma between braces, as in `10.1.2.{3,4}`, does not separate."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "{") - (letter == "}")
        if letter == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]
