"""The history checker finds every kind of fault we plant, and none in a history that has none."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.history import Event, HistoryWriter, Rule, check, load

MILLI = 1_000_000


class Story:
    """A history told line by line; time moves on by a millisecond with each."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.now = 0

    def add(self, process: str, op: str, phase: str, **members: object) -> None:
        self.now += MILLI
        self.events.append(
            Event(time=self.now, process=process, op=op, phase=phase, **{"topic": "t", **members})  # type: ignore[arg-type]
        )

    def sent(self, message_id: str, offset: int, *, queue: str = "a/0", process: str = "p1", crc: int = 7) -> None:
        self.add(process, "send", "invoke", id=message_id, crc=crc)
        self.add(process, "send", "ok", id=message_id, crc=crc, queue=queue, offset=offset)

    def read(self, message_id: str, offset: int, *, queue: str = "a/0", process: str = "c1", crc: int = 7) -> None:
        self.add(process, "read", "ok", id=message_id, crc=crc, queue=queue, offset=offset)

    def rules(self, **options: bool) -> list[Rule]:
        return [fault.rule for fault in check(self.events, **options).faults]


@pytest.fixture
def story() -> Story:
    return Story()


def honest() -> Story:
    """Three producers, two queues, everything read, some twice; one refused, one unanswered and stored, one not."""
    story = Story()
    for number in range(60):
        story.sent(f"m{number}", number // 2, queue=f"a/{number % 2}", process=f"p{number % 3}", crc=number)
    story.add("p1", "send", "invoke", id="refused", crc=1)
    story.add("p1", "send", "fail", id="refused", crc=1)
    for name in ("maybe stored", "maybe not"):
        story.add("p2", "send", "invoke", id=name, crc=2)
        story.add("p2", "send", "info", id=name, crc=2)
    for number in range(60):
        story.read(f"m{number}", number // 2, queue=f"a/{number % 2}", crc=number)
    story.read("maybe stored", 30, queue="a/0", crc=2)
    story.read("m58", 29, queue="a/0", crc=58)
    for offset in (3, 3, 30):
        story.add("c1", "commit", "ok", group="g", queue="a/0", offset=offset)
    return story


def test_an_honest_history_has_no_fault() -> None:
    report = check(honest().events, ordered_reads=True)
    assert report.faults == []
    assert (report.sends, report.unanswered, report.reads, report.duplicates) == (60, 2, 62, 1)


def test_an_acknowledged_message_nobody_read_is_lost(story: Story) -> None:
    story.sent("m1", 0)
    story.sent("m2", 1)
    story.read("m2", 1)
    assert story.rules() == [Rule.LOST]
    assert story.rules(drained=False) == []


def test_a_message_nobody_sent_is_invented(story: Story) -> None:
    story.sent("m1", 0)
    story.read("m1", 0)
    story.read("ghost", 1)
    assert story.rules() == [Rule.INVENTED]


def test_a_message_of_another_topic_is_invented(story: Story) -> None:
    story.sent("m1", 0)
    story.read("m1", 0)
    story.add("c1", "read", "ok", id="m1", topic="other", queue="a/0", offset=0, crc=7)
    assert story.rules() == [Rule.INVENTED]


def test_a_message_read_before_it_was_sent_is_invented(story: Story) -> None:
    story.read("m1", 0)
    story.sent("m1", 0)
    assert story.rules() == [Rule.INVENTED]


def test_a_refused_message_must_not_be_read(story: Story) -> None:
    story.add("p1", "send", "invoke", id="m1", crc=7)
    story.add("p1", "send", "fail", id="m1", crc=7)
    story.read("m1", 0)
    assert story.rules() == [Rule.INVENTED]


def test_a_changed_body_is_found(story: Story) -> None:
    story.sent("m1", 0, crc=7)
    story.read("m1", 0, crc=8)
    assert story.rules() == [Rule.INVENTED]


def test_one_offset_holds_one_message(story: Story) -> None:
    story.sent("m1", 0)
    story.sent("m2", 1)
    story.read("m1", 0)
    story.read("m2", 0, process="c2")
    assert story.rules() == [Rule.SPLIT_OFFSET]


def test_two_acknowledgements_for_one_offset_are_found_before_anything_is_read(story: Story) -> None:
    story.sent("m1", 5)
    story.sent("m2", 5, process="p2")
    assert story.rules(drained=False) == [Rule.SPLIT_OFFSET]


def test_a_producer_whose_messages_changed_places_is_found(story: Story) -> None:
    story.sent("m1", 1)
    story.sent("m2", 0)
    story.sent("m3", 7, queue="a/1")
    assert story.rules(drained=False) == [Rule.PRODUCER_ORDER]


def test_messages_of_two_producers_that_changed_places_are_found(story: Story) -> None:
    story.sent("m1", 1, process="p1")
    story.sent("m2", 0, process="p2")
    assert story.rules(drained=False) == [Rule.REAL_TIME_ORDER]


def test_sends_at_the_same_time_may_lie_either_way(story: Story) -> None:
    story.add("p1", "send", "invoke", id="m1", crc=7)
    story.add("p2", "send", "invoke", id="m2", crc=7)
    story.add("p1", "send", "ok", id="m1", crc=7, queue="a/0", offset=1)
    story.add("p2", "send", "ok", id="m2", crc=7, queue="a/0", offset=0)
    assert story.rules(drained=False) == []


def test_an_ordered_reader_must_not_leave_a_message_out(story: Story) -> None:
    for offset in range(4):
        story.sent(f"m{offset}", offset)
    for offset in (0, 2, 1, 2, 3):
        story.read(f"m{offset}", offset)
    assert story.rules(ordered_reads=True) == [Rule.READ_ORDER]
    assert story.rules() == []


def test_two_ordered_readers_at_one_queue_are_found(story: Story) -> None:
    for offset in range(5):
        story.sent(f"m{offset}", offset)
    for process, offset in (("c1", 0), ("c1", 1), ("c1", 2), ("c2", 1), ("c1", 3), ("c2", 2), ("c2", 3), ("c2", 4)):
        story.read(f"m{offset}", offset, process=process)
    assert story.rules(ordered_reads=True) == [Rule.READ_ORDER]


def test_an_ordered_reader_may_start_again_after_another_died(story: Story) -> None:
    for offset in range(5):
        story.sent(f"m{offset}", offset)
    for process, offset in (("c1", 0), ("c1", 1), ("c1", 2), ("c2", 1), ("c2", 2), ("c2", 3), ("c2", 4)):
        story.read(f"m{offset}", offset, process=process)
    assert story.rules(ordered_reads=True) == []


def test_a_commit_goes_back_only_after_a_reset(story: Story) -> None:
    def commit(offset: int, op: str = "commit", group: str = "g") -> None:
        story.add("c1", op, "ok", group=group, queue="a/0", offset=offset)

    commit(5)
    commit(1, group="another group")
    commit(2, op="reset")
    commit(3)
    assert story.rules() == []
    commit(2)
    assert story.rules() == [Rule.COMMIT_BACKWARDS]


def test_a_member_that_lost_its_queue_may_commit_behind_another(story: Story) -> None:
    def commit(process: str, offset: int) -> None:
        story.add(process, "commit", "ok", group="g", queue="a/0", offset=offset)

    commit("c1", 5)
    commit("c2", 9)
    commit("c1", 6)  # c1 does not know of c2 yet
    commit("c2", 6)  # c2 begins anew where the group is
    assert story.rules() == []
    commit("c1", 5)
    assert story.rules() == [Rule.COMMIT_BACKWARDS]


def test_the_result_of_a_pipeline_has_every_message_once(story: Story) -> None:
    for offset in range(3):
        story.sent(f"m{offset}", offset)
        story.read(f"m{offset}", offset)

    def keep(offset: int) -> None:
        story.add("pipeline", "keep", "ok", group="pipeline", id=f"m{offset}", crc=7, queue="a/0", offset=offset)

    keep(0)
    keep(2)
    assert story.rules() == [Rule.UNDELIVERED]
    keep(1)
    assert story.rules() == []
    keep(2)
    assert story.rules() == [Rule.TWICE]


def test_a_delayed_message_must_not_be_early(story: Story) -> None:
    story.add("p1", "send", "invoke", id="m1", crc=7, delay_nanos=10 * MILLI)
    story.add("p1", "send", "ok", id="m1", crc=7, queue="a/0", offset=0)
    story.now = 10 * MILLI
    story.read("m1", 44)
    assert story.rules() == []
    story.now = 9 * MILLI
    story.read("m1", 44)
    assert story.rules() == [Rule.EARLY]


@pytest.mark.parametrize("outcome", ["", "rollback"])
def test_a_half_message_must_not_be_read_without_commit(story: Story, outcome: str) -> None:
    story.add("p1", "half", "invoke", id="m1", crc=7)
    story.add("p1", "half", "ok", id="m1", crc=7, queue="a/0", offset=0)
    assert story.rules() == [Rule.ORPHAN]
    assert story.rules(drained=False) == []  # and nobody is owed it
    if outcome:
        story.add("p1", "decide", "invoke", id="m1", outcome=outcome)
    story.read("m1", 3)
    assert story.rules(drained=False) == [Rule.UNDECIDED]


def test_a_half_message_must_be_read_after_commit_and_not_before(story: Story) -> None:
    story.add("p1", "half", "invoke", id="m1", crc=7)
    story.add("p1", "half", "ok", id="m1", crc=7, queue="a/0", offset=0)
    story.add("p1", "decide", "invoke", id="m1", outcome="commit")
    assert story.rules() == [Rule.LOST]
    story.read("m1", 3)
    assert story.rules() == []
    first = story.events[0]
    early = Event(
        time=first.time + 1, process="c2", op="read", phase="ok", topic="t", queue="a/0", id="m1", offset=3, crc=7
    )
    assert [fault.rule for fault in check([first, early, *story.events[1:]]).faults] == [Rule.UNDECIDED]


def test_a_group_that_missed_a_message_is_found_although_another_got_it(story: Story) -> None:
    for offset in range(2):
        story.sent(f"m{offset}", offset)
        story.add("c1", "read", "ok", group="g1", id=f"m{offset}", crc=7, queue="a/0", offset=offset)
    story.add("c2", "read", "ok", group="g2", id="m1", crc=7, queue="a/0", offset=1)
    assert story.rules() == [Rule.UNDELIVERED]
    assert story.rules(drained=False) == []


def cut(story: Story, window: int, stuck: int = 0) -> None:
    story.add("a", "process", "died")
    story.add("a", "cut", "ok", window_nanos=window, stuck_nanos=stuck)


def test_a_power_cut_may_take_what_was_acknowledged_shortly_before(story: Story) -> None:
    for offset in range(3):
        story.sent(f"m{offset}", offset)
        if offset < 2:
            story.read(f"m{offset}", offset)
    cut(story, window=10 * MILLI)
    story.sent("after", 2)
    story.read("after", 2)
    assert story.rules() == []


@pytest.mark.parametrize("window", [0, 2 * MILLI])
def test_a_power_cut_must_not_take_what_was_safe(story: Story, window: int) -> None:
    story.sent("m0", 0)
    story.sent("m1", 1, queue="b/0")
    story.read("m1", 1, queue="b/0")
    cut(story, window)
    assert story.rules() == [Rule.LOST]


@pytest.mark.parametrize(("before_failure", "found"), [(5, []), (15, [Rule.LOST])])
def test_what_a_disk_that_failed_had_not_synced_may_go_in_a_later_power_cut(
    story: Story, before_failure: int, found: list[Rule]
) -> None:
    story.sent("m0", 0)
    story.now += before_failure * MILLI  # now the disk begins to fail
    began = story.now
    story.now += 60 * MILLI
    cut(story, window=10 * MILLI, stuck=story.now + 2 * MILLI - began)
    assert story.rules() == found


def test_a_broker_must_not_acknowledge_for_longer_than_the_window_when_its_disk_fails(story: Story) -> None:
    story.sent("m0", 0)
    story.now += 6 * MILLI
    story.sent("m1", 1)
    cut(story, window=10 * MILLI, stuck=100 * MILLI)
    assert story.rules() == []
    story.now += 200 * MILLI
    story.sent("m2", 0)
    story.now += 12 * MILLI
    story.sent("m3", 1)
    cut(story, window=10 * MILLI, stuck=100 * MILLI)
    assert story.rules() == [Rule.LOST]


def test_a_power_cut_of_one_broker_excuses_no_other(story: Story) -> None:
    story.sent("m0", 0, queue="b/0")
    cut(story, window=10 * MILLI)
    assert story.rules() == [Rule.LOST]


def test_a_power_cut_takes_the_end_of_a_queue_and_nothing_in_front_of_it(story: Story) -> None:
    for offset in range(3):
        story.sent(f"m{offset}", offset)
        if offset != 1:
            story.read(f"m{offset}", offset)
    cut(story, window=100 * MILLI)
    assert story.rules() == [Rule.GAP]


@pytest.mark.parametrize(("end", "found"), [(1, []), (3, [Rule.GAP])])
def test_a_message_that_was_read_before_a_power_cut_may_be_gone_after_it(
    story: Story, end: int, found: list[Rule]
) -> None:
    story.sent("m0", 0)
    story.read("m0", 0)
    story.sent("m1", 1)
    story.sent("m2", 2)
    story.read("m2", 2)
    cut(story, window=100 * MILLI)
    story.add("a", "end", "ok", queue="a/0", offset=end)
    assert story.rules() == found


def test_a_group_may_miss_what_got_the_offset_of_a_message_that_was_lost(story: Story) -> None:
    story.sent("m0", 0)
    story.add("c1", "read", "ok", group="g1", id="m0", crc=7, queue="a/0", offset=0)
    cut(story, window=100 * MILLI)
    story.now += 200 * MILLI
    story.sent("m1", 0)
    story.add("c2", "read", "ok", group="g2", id="m1", crc=7, queue="a/0", offset=0)
    assert story.rules() == []
    story.sent("m2", 1)
    story.add("c2", "read", "ok", group="g2", id="m2", crc=7, queue="a/0", offset=1)
    assert story.rules() == [Rule.UNDELIVERED]


@pytest.mark.parametrize(("end", "found"), [(0, set()), (1, {Rule.SPLIT_OFFSET, Rule.UNDELIVERED})])
def test_a_slave_may_show_a_message_long_after_the_power_cut_that_took_it_from_its_master(
    story: Story, end: int, found: set[Rule]
) -> None:
    """Unless the master had the message when it came back."""
    story.sent("m0", 0)
    cut(story, window=100 * MILLI)
    story.add("a", "end", "ok", queue="a/0", offset=end)
    story.now += 200 * MILLI
    story.add("c1", "read", "ok", group="g1", id="m0", crc=7, queue="a/0", offset=0)
    story.sent("m1", 0)
    story.add("c2", "read", "ok", group="g2", id="m1", crc=7, queue="a/0", offset=0)
    assert set(story.rules()) == found


@pytest.mark.parametrize(("has_passed", "found"), [(True, []), (False, [Rule.UNDELIVERED])])
def test_a_delayed_message_counts_where_it_was_delivered_in_the_end(
    story: Story, has_passed: bool, found: list[Rule]
) -> None:
    """A cut takes m0 from offset 0, and the delayed message from offset 1. It is delivered again, to offset 0."""
    story.add("p1", "send", "invoke", id="later", crc=7, delay_nanos=100 * MILLI)
    story.add("p1", "send", "ok", id="later", crc=7, queue="a/0", offset=0)
    story.now += 200 * MILLI
    story.sent("m0", 0)
    if has_passed:
        story.add("c1", "read", "ok", group="g1", id="m0", crc=7, queue="a/0", offset=0)
    story.add("c2", "read", "ok", group="g2", id="later", crc=7, queue="a/0", offset=1)
    cut(story, window=100 * MILLI)
    story.add("a", "end", "ok", queue="a/0", offset=0)
    story.add("c2", "read", "ok", group="g2", id="later", crc=7, queue="a/0", offset=0)
    story.now += 200 * MILLI
    story.sent("m1", 1)
    for member, group in (("c1", "g1"), ("c2", "g2")):
        story.add(member, "read", "ok", group=group, id="m1", crc=7, queue="a/0", offset=1)
    assert story.rules() == found


def test_a_message_that_was_safe_before_the_power_cut_keeps_its_offset(story: Story) -> None:
    story.sent("m0", 0)
    story.read("m0", 0)
    story.now += 200 * MILLI
    cut(story, window=100 * MILLI)
    story.add("a", "end", "ok", queue="a/0", offset=0)
    story.sent("m1", 0)
    story.read("m1", 0)
    assert story.rules() == [Rule.SPLIT_OFFSET]


def test_a_message_that_was_read_and_not_acknowledged_may_go_in_a_power_cut(story: Story) -> None:
    story.add("p1", "send", "invoke", id="m0", crc=7)
    story.read("m0", 0)
    cut(story, window=0)
    story.sent("m1", 0)
    story.read("m1", 0)
    assert story.rules() == []
    cut(story, window=0)
    story.sent("m2", 0)
    story.read("m2", 0)
    assert set(story.rules()) == {Rule.SPLIT_OFFSET}


def consumed(story: Story, process: str, phase: str, offset: int, queue: str = "a/0") -> None:
    story.add(process, "consume", phase, group="g", queue=queue, offset=offset)


def test_two_members_at_one_orderly_queue_are_found(story: Story) -> None:
    consumed(story, "c1", "begin", 0)
    consumed(story, "c2", "begin", 0, queue="a/1")
    consumed(story, "c2", "end", 0, queue="a/1")
    assert story.rules() == []
    consumed(story, "c2", "begin", 0)
    assert story.rules() == [Rule.OVERLAP]


def test_two_callbacks_of_one_member_at_one_orderly_queue_are_found(story: Story) -> None:
    consumed(story, "c1", "begin", 0)
    consumed(story, "c1", "begin", 1)
    assert story.rules() == [Rule.OVERLAP]


@pytest.mark.parametrize("how", ["died", "stopped"])
def test_a_member_that_is_gone_overlaps_with_nobody(story: Story, how: str) -> None:
    consumed(story, "c1", "begin", 0)
    story.add("c1", "process", how)
    consumed(story, "c2", "begin", 0)
    consumed(story, "c1", "end", 0)
    assert story.rules() == []
    consumed(story, "c3", "begin", 0)
    assert story.rules() == [Rule.OVERLAP]


@pytest.mark.parametrize("offsets", [(1,), (0, 2), (0, 1, 0, 2)])
def test_an_orderly_group_that_leaves_a_message_out_is_found(story: Story, offsets: tuple[int, ...]) -> None:
    for offset in offsets:
        consumed(story, "c1", "begin", offset)
        consumed(story, "c1", "end", offset)
    assert story.rules() == [Rule.ORDERLY]


def test_an_orderly_group_may_go_back(story: Story) -> None:
    for offset in (0, 1, 2, 1, 2, 3):
        consumed(story, "c1", "begin", offset)
        consumed(story, "c1", "end", offset)
    assert story.rules() == []


def test_a_commit_may_go_back_to_what_a_broker_saved_before_it_died(story: Story) -> None:
    story.add("c1", "commit", "ok", group="g", queue="a/0", offset=5)
    story.add("c1", "commit", "ok", group="g", queue="b/0", offset=5)
    story.add("a", "process", "died")
    story.add("c1", "commit", "ok", group="g", queue="a/0", offset=4)
    assert story.rules() == []
    story.add("c1", "commit", "ok", group="g", queue="b/0", offset=4)
    assert story.rules() == [Rule.COMMIT_BACKWARDS]


def test_a_member_goes_back_once_when_a_power_cut_made_its_queue_shorter(story: Story) -> None:
    def commit(offset: int) -> None:
        story.add("c1", "commit", "ok", group="g", queue="a/0", offset=offset)

    story.add("a", "cut", "ok")
    commit(5)  # it had read so far, and does not know yet
    commit(3)
    commit(4)
    assert story.rules() == []
    commit(3)
    assert story.rules() == [Rule.COMMIT_BACKWARDS]


@pytest.mark.parametrize(("planned", "found"), [(2, []), (1, [Rule.UNDELIVERED])])
def test_a_pipeline_misses_what_got_the_offsets_of_messages_that_it_planned_to_read_before_a_power_cut(
    story: Story, planned: int, found: list[Rule]
) -> None:
    for offset in range(2):
        story.sent(f"m{offset}", offset)
        story.read(f"m{offset}", offset)
        story.add("q", "keep", "ok", group="lake", queue="a/0", offset=offset, id=f"m{offset}", crc=7)
    story.add("q", "plan", "ok", group="lake", queue="a/0", offset=planned)
    story.add("a", "cut", "ok")
    story.sent("new", 2)
    story.read("new", 2)
    assert story.rules() == found


@pytest.mark.parametrize(("cut", "found"), [("a", []), ("b", [Rule.TWICE])])
def test_a_pipeline_may_read_a_queue_again_that_a_power_cut_made_shorter(
    story: Story, cut: str, found: list[Rule]
) -> None:
    story.sent("m0", 0)
    story.read("m0", 0)
    story.add("q", "keep", "ok", group="lake", queue="a/0", offset=0, id="m0", crc=7)
    story.add(cut, "cut", "ok")
    story.add("q", "keep", "ok", group="lake", queue="a/0", offset=0, id="m0", crc=7)
    assert story.rules() == found


@pytest.mark.parametrize(("planned", "found"), [(1, []), (0, [Rule.TWICE])])
def test_a_pipeline_may_read_a_queue_again_if_a_slave_showed_it_a_message_that_a_power_cut_had_taken(
    story: Story, planned: int, found: list[Rule]
) -> None:
    story.sent("m0", 0)
    story.read("m0", 0)
    story.add("a", "cut", "ok")
    story.add("a", "end", "ok", queue="a/0", offset=1)
    story.add("q", "plan", "ok", group="lake", queue="a/0", offset=planned)
    for _ in range(2):
        story.add("q", "keep", "ok", group="lake", queue="a/0", offset=0, id="m0", crc=7)
    assert story.rules() == found


def test_a_later_power_cut_is_no_reason_to_read_a_queue_again(story: Story) -> None:
    story.sent("m0", 0)
    story.read("m0", 0)
    story.add("q", "plan", "ok", group="lake", queue="a/0", offset=1)
    for _ in range(2):
        story.add("q", "keep", "ok", group="lake", queue="a/0", offset=0, id="m0", crc=7)
    story.add("a", "cut", "ok")
    story.add("a", "end", "ok", queue="a/0", offset=1)
    assert story.rules() == [Rule.TWICE]


@pytest.mark.parametrize(("end", "crc", "found"), [(100, 3, []), (90, 3, [Rule.REPLICA]), (100, 4, [Rule.REPLICA])])
def test_a_slave_with_more_or_other_bytes_than_its_master_is_found(
    story: Story, end: int, crc: int, found: list[Rule]
) -> None:
    story.add("a-slave", "replica", "ok", queue="a", offset=95, crc=3, other_offset=end, other_crc=crc)
    assert story.rules() == found


def _drop_reads_of_one(story: Story, choice: random.Random) -> set[Rule]:
    victim = f"m{choice.randrange(60)}"
    story.events = [event for event in story.events if event.op != "read" or event.id != victim]
    return {Rule.LOST}


def _read_something_else(story: Story, choice: random.Random) -> set[Rule]:
    at = choice.choice([index for index, event in enumerate(story.events) if event.op == "read"])
    event = story.events[at]
    story.events[at] = Event(
        time=event.time, process="c1", op="read", phase="ok", topic="t", queue=event.queue, id="ghost", offset=99
    )
    return {Rule.INVENTED}


def _swap_two_acknowledgements(story: Story, choice: random.Random) -> set[Rule]:
    acknowledged = [index for index, event in enumerate(story.events) if event.op == "send" and event.phase == "ok"]
    first, second = sorted(choice.sample([i for i in acknowledged if story.events[i].queue == "a/0"], 2))
    one, two = story.events[first], story.events[second]
    for at, event, offset in ((first, one, two.offset), (second, two, one.offset)):
        story.events[at] = Event(
            time=event.time, process=event.process, op="send", phase="ok", topic="t",
            queue=event.queue, id=event.id, offset=offset, crc=event.crc,
        )  # fmt: skip
    return {Rule.PRODUCER_ORDER, Rule.REAL_TIME_ORDER}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("plant", [_drop_reads_of_one, _read_something_else, _swap_two_acknowledgements])
def test_a_fault_planted_anywhere_is_found(plant: Callable[[Story, random.Random], set[Rule]], seed: int) -> None:
    story = honest()
    expected = plant(story, random.Random(seed))
    assert expected & set(story.rules())


def test_histories_of_several_processes_are_read_as_one(tmp_path: Path) -> None:
    producer = HistoryWriter(tmp_path / "p.jsonl", "p1")
    consumer = HistoryWriter(tmp_path / "c.jsonl", "c1")
    producer.write("send", "invoke", topic="t", id="m1", crc=7)
    producer.write("send", "ok", topic="t", id="m1", crc=7, queue="a/0", offset=0)
    consumer.write("read", "ok", topic="t", id="m1", crc=7, queue="a/0", offset=0)
    producer.write("send", "invoke", topic="t", id="m2", crc=7)
    producer.close()
    consumer.close()
    events = load(tmp_path / "c.jsonl", tmp_path / "p.jsonl")
    assert [event.op for event in events] == ["send", "send", "read", "send"]
    report = check(events)
    assert report.faults == []
    assert report.unanswered == 1
    assert str(report).startswith("1 sends acknowledged, 1 unanswered, 1 reads, 0 duplicates, 0 faults")


def test_a_history_with_one_id_twice_cannot_be_judged(story: Story) -> None:
    story.sent("m1", 0)
    story.sent("m1", 1)
    with pytest.raises(ValueError, match="m1 is sent twice"):
        check(story.events)
