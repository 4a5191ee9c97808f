"""The table of addresses: what each is answered by, who may ask, and whether it belongs to writing.

A view is named by its module in this package and its function; the module is imported with its first visit.
"""

from __future__ import annotations

from typing import Final

from downrange.console.requests import Address
from downrange.console.users_file import Role

_C: Final = "/c/{cluster}"

ADDRESSES: Final = (
    Address("GET", "/healthz", "overview.healthz", is_open=True),
    Address("GET", "/static/{name}", "overview.static_file", is_open=True),
    Address("GET", "/login", "account.login_page", is_open=True),
    Address("POST", "/login", "account.log_in", is_open=True),
    Address("POST", "/logout", "account.log_out"),
    Address("POST", "/language", "account.choose_language", is_open=True),
    Address("GET", "/", "overview.home"),
    Address("GET", "/settings", "account.settings"),
    Address("GET", "/audit", "account.audit", Role.ADMIN),
    Address("GET", _C, "overview.overview"),
    Address("GET", f"{_C}/chart", "overview.cluster_chart"),
    Address("GET", f"{_C}/topics", "topics.topics"),
    Address("GET", f"{_C}/new-topic", "topics.new_topic", Role.OPERATOR, writes=True),
    Address("POST", f"{_C}/new-topic", "topics.create_topic", Role.OPERATOR, writes=True),
    Address("GET", _C + "/topics/{topic}", "topics.topic"),
    Address("GET", _C + "/topics/{topic}/chart", "topics.topic_chart"),
    Address("POST", _C + "/topics/{topic}/send", "topics.send", Role.OPERATOR, writes=True),
    Address("POST", _C + "/topics/{topic}/plan-settings", "topics.plan_topic_settings", Role.OPERATOR, writes=True),
    Address("POST", _C + "/topics/{topic}/plan-deletion", "topics.plan_topic_deletion", Role.ADMIN, writes=True),
    Address("GET", f"{_C}/groups", "groups.groups"),
    Address("GET", f"{_C}/new-group", "groups.new_group", Role.OPERATOR, writes=True),
    Address("POST", f"{_C}/new-group", "groups.create_group", Role.OPERATOR, writes=True),
    Address("GET", _C + "/groups/{group}", "groups.group"),
    Address("GET", _C + "/groups/{group}/chart", "groups.group_chart"),
    Address("GET", _C + "/groups/{group}/stack", "groups.stack", Role.OPERATOR),
    Address("GET", _C + "/groups/{group}/move", "moves.move_form", Role.OPERATOR, writes=True),
    Address("POST", _C + "/groups/{group}/move", "moves.plan_move", Role.OPERATOR, writes=True),
    Address("POST", _C + "/groups/{group}/plan-settings", "groups.plan_group_settings", Role.OPERATOR, writes=True),
    Address("POST", _C + "/groups/{group}/plan-deletion", "groups.plan_group_deletion", Role.ADMIN, writes=True),
    Address("GET", _C + "/plans/{plan}", "plans.plan", Role.OPERATOR, writes=True),
    Address("POST", _C + "/plans/{plan}/apply", "plans.apply_plan", Role.OPERATOR, writes=True),
    Address("GET", f"{_C}/messages", "messages.messages"),
    Address("GET", f"{_C}/check-sql", "messages.check_sql"),
    Address("GET", _C + "/messages/{id}", "messages.message"),
    Address("POST", _C + "/messages/{id}/hand-over", "messages.hand_over", Role.OPERATOR, writes=True),
    Address("GET", _C + "/at/{topic}/{broker}/{queue}/{offset}", "messages.at"),
    Address("GET", _C + "/body/{id}", "messages.body"),
    Address("GET", f"{_C}/tail", "tail.tail_page"),
    Address("GET", f"{_C}/tail/events", "tail.tail_events"),
    Address("GET", f"{_C}/dead-letters", "dead_letters.dead_letter_groups"),
    Address("GET", _C + "/dead-letters/{group}", "dead_letters.dead_letters"),
    Address("POST", _C + "/dead-letters/{group}/plan", "dead_letters.plan_resend", Role.OPERATOR, writes=True),
    Address("GET", _C + "/jobs/{job}", "dead_letters.job_page", Role.OPERATOR, writes=True),
    Address("GET", _C + "/jobs/{job}/events", "dead_letters.job_events", Role.OPERATOR, writes=True),
    Address("POST", _C + "/jobs/{job}/start", "dead_letters.start_job", Role.OPERATOR, writes=True),
    Address("POST", _C + "/jobs/{job}/pause", "dead_letters.pause_job", Role.OPERATOR, writes=True),
    Address("GET", f"{_C}/delayed", "waiting.delayed"),
    Address("GET", f"{_C}/transactions", "waiting.transactions"),
    Address("POST", _C + "/transactions/{id}/resume", "waiting.resume", Role.OPERATOR, writes=True),
    Address("GET", f"{_C}/clients", "servers.clients"),
    Address("GET", f"{_C}/brokers", "servers.brokers"),
    Address("GET", _C + "/brokers/{broker}", "servers.broker"),
    Address("POST", _C + "/brokers/{broker}/plan-settings", "servers.plan_broker_settings", Role.ADMIN, writes=True),
    Address("POST", _C + "/brokers/{broker}/write-permission", "servers.write_permission", Role.ADMIN, writes=True),
    Address("GET", f"{_C}/name-servers", "servers.name_servers"),
    Address("GET", f"{_C}/pipelines", "pipelines.pipelines"),
    Address("GET", _C + "/pipelines/{pipeline}", "pipelines.pipeline"),
    Address("GET", _C + "/pipelines/{pipeline}/chart", "pipelines.pipeline_chart"),
    Address("GET", f"{_C}/users", "users.users", Role.ADMIN),
    Address("POST", f"{_C}/users/put", "users.put_user", Role.ADMIN, writes=True),
    Address("POST", f"{_C}/users/delete", "users.delete_user", Role.ADMIN, writes=True),
    Address("POST", f"{_C}/users/put-rule", "users.put_rule", Role.ADMIN, writes=True),
    Address("POST", f"{_C}/users/delete-rule", "users.delete_rule", Role.ADMIN, writes=True),
    Address("POST", f"{_C}/users/put-account", "plain_accounts.put_account", Role.ADMIN, writes=True),
    Address("POST", f"{_C}/users/delete-account", "plain_accounts.delete_account", Role.ADMIN, writes=True),
    Address("GET", "/find", "find.find"),
)
