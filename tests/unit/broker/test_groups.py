from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from downrange.broker.groups import CommittedOffsets, Groups
from downrange.broker.json_file import JsonFile
from downrange.clock import ManualClock
from downrange.model.topics import BUILT_IN_GROUPS, SubscriptionGroupConfig
from downrange.protocol.bodies.data_version import DataVersion
from downrange.protocol.bodies.groups import SubscriptionGroupTable
from downrange.protocol.bodies.offsets import ConsumerOffsets
from tests.support.golden_store import unpack

NOW = 1_700_000_000_000
OpenGroups = Callable[[], Groups]
OpenOffsets = Callable[[], CommittedOffsets]


@pytest.fixture
def open_groups(tmp_path: Path) -> OpenGroups:
    return lambda: Groups(JsonFile(tmp_path / "subscriptionGroup.json"), ManualClock(NOW))


@pytest.fixture
def open_offsets(tmp_path: Path) -> OpenOffsets:
    return lambda: CommittedOffsets(JsonFile(tmp_path / "consumerOffset.json"))


def test_a_new_broker_has_the_built_in_groups(open_groups: OpenGroups) -> None:
    groups = open_groups()
    assert {group.group_name for group in groups} == set(BUILT_IN_GROUPS)
    assert len(groups) == 7


def test_a_group_is_created_when_it_may_be(open_groups: OpenGroups) -> None:
    groups = open_groups()
    assert groups.find("g", auto_create=False) is None
    created = groups.find("g", auto_create=True)
    assert created == SubscriptionGroupConfig("g")
    assert groups.find("g", auto_create=False) is created
    assert groups.data_version == DataVersion(counter=1, timestamp=NOW)
    groups.save()
    assert open_groups().get("g") == created


@pytest.mark.parametrize("name", ["", " ", "white space", "a/b", "x" * 256, "g@h"])
def test_an_illegal_name_makes_no_group(name: str, open_groups: OpenGroups) -> None:
    groups = open_groups()
    assert groups.find(name, auto_create=True) is None
    assert len(groups) == 7


def test_system_groups_are_always_created(open_groups: OpenGroups) -> None:
    assert open_groups().find("CID_RMQ_SYS_TRANS", auto_create=False) is not None


def test_changes_and_deletions_are_saved(open_groups: OpenGroups) -> None:
    groups = open_groups()
    config = replace(SubscriptionGroupConfig("g"), retry_max_times=3, consume_enable=False)
    groups.put(config)
    groups.save()
    assert open_groups().get("g") == config
    assert groups.delete("g")
    assert not groups.delete("g")
    groups.save()
    assert open_groups().get("g") is None
    assert groups.data_version.counter == 2


def test_a_slave_takes_over_the_groups_of_its_master(open_groups: OpenGroups) -> None:
    groups = open_groups()
    groups.put(SubscriptionGroupConfig("gone"))
    version = DataVersion(counter=7, timestamp=5)
    table = SubscriptionGroupTable(subscription_group_table={"g": SubscriptionGroupConfig("g")}, data_version=version)
    groups.replace_all(table)
    assert [group.group_name for group in groups] == ["g"]
    assert groups.table() == table
    groups.save()
    assert open_groups().data_version == version


def test_the_genuine_broker_s_files_are_read(tmp_path: Path) -> None:
    config = unpack("clean", tmp_path).root / "config"
    groups = Groups(JsonFile(config / "subscriptionGroup.json"), ManualClock(NOW))
    assert groups.get("gscg_retry") == SubscriptionGroupConfig("gscg_retry")
    offsets = CommittedOffsets(JsonFile(config / "consumerOffset.json"))
    assert offsets.of("gsAlpha", "gscg_one") == {0: 6, 1: 15, 2: 10, 3: 14}
    assert offsets.get("%RETRY%gscg_retry", "gscg_retry", 0) == 2


def test_commits_overwrite_also_backwards(open_offsets: OpenOffsets) -> None:
    offsets = open_offsets()
    assert offsets.get("t", "g", 0) is None
    offsets.commit("t", "g", 0, 9)
    offsets.commit("t", "g", 0, 4)
    assert offsets.get("t", "g", 0) == 4
    assert offsets.get("t", "g", 1) is None
    assert offsets.get("t", "h", 0) is None


def test_asking_does_not_fill_the_table(open_offsets: OpenOffsets) -> None:
    offsets = open_offsets()
    offsets.get("t", "g", 0)
    offsets.of("t", "g")
    assert offsets.table() == ConsumerOffsets(offset_table={})
    assert offsets.prepare_save() is None


def test_topics_and_groups_are_found_from_each_other(open_offsets: OpenOffsets) -> None:
    offsets = open_offsets()
    for topic, group in (("t", "g"), ("t", "h"), ("u", "g")):
        offsets.commit(topic, group, 0, 1)
    assert offsets.topics_of("g") == {"t", "u"}
    assert offsets.groups_of("t") == {"g", "h"}
    offsets.remove_group("g")
    assert offsets.topics_of("g") == set()
    assert offsets.groups_of("t") == {"h"}


def test_offsets_are_cloned_not_shared(open_offsets: OpenOffsets) -> None:
    offsets = open_offsets()
    offsets.commit("t", "g", 0, 5)
    offsets.clone("g", "copy", "t")
    offsets.clone("g", "nothing", "unknown")
    offsets.commit("t", "g", 0, 6)
    assert offsets.of("t", "copy") == {0: 5}
    assert offsets.topics_of("nothing") == set()


def test_offsets_are_saved_when_they_changed_and_only_then(open_offsets: OpenOffsets, tmp_path: Path) -> None:
    offsets = open_offsets()
    offsets.save()
    assert not (tmp_path / "consumerOffset.json").exists()
    offsets.commit("%RETRY%g", "g", 3, 7)
    write = offsets.prepare_save()
    assert write is not None
    offsets.commit("%RETRY%g", "g", 3, 8)
    write()
    assert open_offsets().get("%RETRY%g", "g", 3) == 7
    offsets.save()
    assert open_offsets().get("%RETRY%g", "g", 3) == 8
    assert offsets.prepare_save() is None


def test_a_save_under_way_does_not_win_over_the_last_one(open_offsets: OpenOffsets) -> None:
    offsets = open_offsets()
    offsets.commit("t", "g", 0, 1)
    under_way = offsets.prepare_save()
    offsets.commit("t", "g", 0, 2)
    offsets.save()
    assert under_way is not None
    under_way()
    assert open_offsets().get("t", "g", 0) == 2


def test_a_master_s_offsets_lie_over_ours(open_offsets: OpenOffsets) -> None:
    offsets = open_offsets()
    offsets.commit("t", "g", 0, 1)
    offsets.commit("t", "g", 1, 2)
    offsets.merge(ConsumerOffsets(offset_table={"t@g": {1: 9}, "u@g": {0: 3}}))
    assert offsets.table().offset_table == {"t@g": {0: 1, 1: 9}, "u@g": {0: 3}}
    offsets.save()
    offsets.merge(ConsumerOffsets(offset_table={"t@g": {1: 9}, "u@g": {0: 3}}))
    assert offsets.prepare_save() is None, "nothing changed"
