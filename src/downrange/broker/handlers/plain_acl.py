"""The accounts of access control 4.x: requests 50, 51 and 53 change them, request 52 shows the versions of their files.

They need an administrator (auth/needs.py), name no file but those in use, and their answers contain no secret.
"""

from __future__ import annotations

import logging

from downrange.auth.plain_accounts import AccountChange, PlainAclError
from downrange.auth.plain_acl_files import PlainAclFiles
from downrange.broker.live_config import LiveConfig
from downrange.broker.routes import RouteTable
from downrange.protocol.bodies.plain_acl import (
    AclInfoResponse,
    DeleteAclConfigRequest,
    UpdateAclConfigRequest,
    UpdateGlobalWhiteAddrsRequest,
    split_list,
)
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command
from downrange.protocol.errors import BrokerError
from downrange.transport.connection import Connection

log = logging.getLogger(__name__)


class PlainAclHandlers:
    """Administers the accounts. `files` is None on a broker without access control of 4.x, which refuses."""

    def __init__(self, config: LiveConfig, files: PlainAclFiles | None) -> None:
        self._config = config
        self._files = files

    @property
    def routes(self) -> RouteTable:
        return {
            RequestCode.UPDATE_AND_CREATE_ACL_CONFIG: self.update_account,
            RequestCode.DELETE_ACL_CONFIG: self.delete_account,
            RequestCode.GET_BROKER_CLUSTER_ACL_INFO: self.versions,
            RequestCode.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG: self.update_white_list,
        }

    def update_account(self, command: Command, connection: Connection) -> Command:
        """Request 50: add an account, or change members of one."""
        failed = ResponseCode.UPDATE_AND_CREATE_ACL_CONFIG_FAILED
        files = self._in_use(failed)
        header = command.header(UpdateAclConfigRequest)
        change = AccountChange(
            header.access_key,
            header.secret_key,
            header.admin,
            header.white_remote_address,
            header.default_topic_perm,
            header.default_group_perm,
            None if header.topic_perms is None else split_list(header.topic_perms),
            None if header.group_perms is None else split_list(header.group_perms),
        )
        try:
            files.update_account(change)
        except PlainAclError as error:
            raise BrokerError(str(error), failed) from None
        log.info("account updated account=%s admin=%s peer=%s", change.access_key, change.admin, connection.peer)
        return command.reply()

    def delete_account(self, command: Command, connection: Connection) -> Command:
        """Request 51: delete an account."""
        failed = ResponseCode.DELETE_ACL_CONFIG_FAILED
        files = self._in_use(failed)
        key = command.header(DeleteAclConfigRequest).access_key
        try:
            if not files.delete_account(key):
                raise PlainAclError(f"The accesskey[{key}] corresponding to accessConfig has been deleted failed.")
        except PlainAclError as error:
            raise BrokerError(str(error), failed) from None
        log.info("account deleted account=%s peer=%s", key, connection.peer)
        return command.reply()

    def update_white_list(self, command: Command, connection: Connection) -> Command:
        """Request 53: replace the global white list of a file in use."""
        failed = ResponseCode.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG_FAILED
        files = self._in_use(failed)
        header = command.header(UpdateGlobalWhiteAddrsRequest)
        patterns = split_list(header.global_white_addrs)
        try:
            files.update_white_list(patterns, header.acl_file_full_path)
        except PlainAclError as error:
            raise BrokerError(str(error), failed) from None
        log.info("global white list updated addresses=%s peer=%s", ",".join(patterns), connection.peer)
        return command.reply()

    def versions(self, command: Command, connection: Connection) -> Command:
        """Request 52: the versions of the files, by names that begin at the directory of plain_acl.yml."""
        files = self._in_use(ResponseCode.SYSTEM_ERROR)
        broker = self._config.broker
        header = AclInfoResponse.of(
            files.version, files.versions(), broker.broker_name, broker.address, broker.broker_cluster_name
        )
        return command.reply(header=header)

    def _in_use(self, failed: ResponseCode) -> PlainAclFiles:
        if self._files is None:
            raise BrokerError("this broker has no access control of 4.x: start it with aclEnable=true", failed)
        return self._files
