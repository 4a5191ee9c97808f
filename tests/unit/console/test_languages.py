"""The catalogue is whole, all texts of pages go through it, and sentences are said in the language of the reader."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterable
from datetime import UTC

import pytest
from jinja2 import Environment
from markupsafe import Markup

from downrange.client.admin.plans import PlanKind
from downrange.client.admin.timeline import EventKind
from downrange.client.admin.verdicts import Hidden, VerdictKind
from downrange.console import formats, jobs
from downrange.console.findings import Finding, Harm
from downrange.console.languages import CHINESE, ENGLISH, LANGUAGES, language_of
from downrange.console.pages import json_text
from downrange.console.users_file import Role
from downrange.console.words import word
from downrange.model.text import Text, as_is, joined, plural, said_by
from tests.support import catalogue

NAMES = frozenset(
    {
        *("Access key", "Secret key", "Offset ID", "ID", "Key", "MiB"),
        *("Group", "Tag", "Topic", "Broker", "NameServer"),
    }
)
"""What Chinese readers call by its English name."""


def used() -> dict[str, str]:
    return {**catalogue.of_source().patterns, **catalogue.of_templates().patterns}


def test_every_text_of_a_template_goes_through_the_catalogue() -> None:
    assert catalogue.of_templates().faults == []


def test_every_sentence_of_the_source_has_a_literal_pattern() -> None:
    assert catalogue.of_source().faults == []


def test_no_module_of_the_console_has_words_for_people_beside_its_sentences() -> None:
    assert catalogue.of_prose() == []


def test_scripts_take_their_texts_from_the_page() -> None:
    assert catalogue.of_scripts() == []


@pytest.mark.parametrize(
    "source",
    [
        "<p>Hello</p>",
        '<a title="Hello">{{ name }}</a>',
        '<input placeholder="your name">',
        "<p>{{ 'yes' if is_so }}</p>",
        "<p>{{ name or 'nobody' }}</p>",
        "{% if a %}<p>{{ a }}</p>{% else %}<b>None</b>{% endif %}",
        "{{ parts.post(address, token, 'Send it') }}",
        "<p>{{ _(variable) }}</p>",
    ],
)
def test_a_text_beside_the_catalogue_is_found(source: str) -> None:
    found = catalogue.Found()
    catalogue.of_template(Environment(autoescape=True).parse(source), "x.html", found)
    assert len(found.faults) == 1


def test_the_chinese_catalogue_has_every_sentence_and_no_other() -> None:
    known = used()
    missing = {pattern: place for pattern, place in known.items() if pattern not in CHINESE.patterns}
    assert missing == {}
    assert sorted(set(CHINESE.patterns) - set(known)) == [], "entries that nothing uses"


def test_placeholders_are_the_same_in_both_languages() -> None:
    unlike = [
        english
        for english, chinese in CHINESE.patterns.items()
        if catalogue.placeholders(english) != catalogue.placeholders(chinese)
    ]
    assert unlike == []


def test_no_placeholder_asks_for_a_repr() -> None:
    """A part may be HTML, whose repr is not what anybody wants to read."""
    assert [pattern for pattern in used() if re.search(r"![rsa]", "".join(catalogue.placeholders(pattern)))] == []


def test_chinese_entries_are_chinese() -> None:
    plain = {english: re.sub(r"\{[^}]*\}", "", chinese).strip() for english, chinese in CHINESE.patterns.items()}
    latin = [english for english, chinese in plain.items() if not re.search(r"[\u3000-\u9fff\uff00-\uffef]", chinese)]
    assert [english for english in latin if plain[english] not in NAMES and plain[english].strip("·/ ")] == []


def test_words_of_data_are_in_the_catalogue() -> None:
    states: Iterable[str] = (
        *(kind.value for kind in (*VerdictKind, *Hidden, *EventKind, *PlanKind)),
        *(role.word for role in Role),
        *(Finding(harm, as_is(""), "", "").word for harm in Harm),
        *(jobs.RUNNING, jobs.PAUSED, jobs.STOPPED, jobs.DONE, jobs.FAILED, jobs.WAITING),
    )
    assert [one for one in states if CHINESE.say(word(one)) == one] == []
    assert word("of-another-version") == "of-another-version"


def test_a_sentence_is_english_for_everybody_but_the_reader() -> None:
    text = Text("{name} is gone since {since}: no name server lists it.", name="broker-a", since="08:41")
    assert text == "broker-a is gone since 08:41: no name server lists it."
    assert json_text({"text": text}) == '{"text": "broker-a is gone since 08:41: no name server lists it."}'
    assert ENGLISH.say(text) == text
    assert CHINESE.say(text) == "broker-a 自 08:41 起消失：没有 NameServer 列出它。"


def test_parts_of_a_sentence_are_sentences_too() -> None:
    text = Text("the oldest waits for {span}", span=formats.span(26 * 60_000))
    assert text == "the oldest waits for 26 min"
    assert CHINESE.say(text) == "最早的一条已等待 26 分钟"
    assert CHINESE.say(formats.when(1_000_000, UTC, 1_090_000)) == "00:16:40（90 秒前）"
    assert CHINESE.say(joined(" · ", (Text("stuck"), "orders", Text("unknown")))) == "卡住 · orders · 未知"


@pytest.mark.parametrize(
    ("count", "english", "chinese"),
    [
        (0, "0 queues", "0 个队列"),
        (1, "1 queue", "1 个队列"),
        (2, "2 queues", "2 个队列"),
        (12_480, "12,480 queues", "12,480 个队列"),
    ],
)
def test_one_and_many(count: int, english: str, chinese: str) -> None:
    text = plural(count, "{count} queue", "{count} queues")
    assert (text, ENGLISH.say(text), ENGLISH.html(text)) == (english, english, english)
    assert (CHINESE.say(text), CHINESE.html(text)) == (chinese, chinese)


def test_html_of_a_sentence_is_escaped_but_for_parts_that_are_html() -> None:
    name = Markup("<strong>orders</strong>")
    text = Text("{server} could not be asked: {error}", server=name, error="<script>\u202e")
    assert ENGLISH.html(text) == "<strong>orders</strong> could not be asked: &lt;script&gt;⟨U+202E⟩"
    assert CHINESE.html(text) == "无法查询 <strong>orders</strong>：&lt;script&gt;⟨U+202E⟩"
    assert ENGLISH.html(Text("unequal is written <>, not !=")) == "unequal is written &lt;&gt;, not !="
    for language in LANGUAGES.values():  # a part that is no text, too
        assert "&lt;b&gt;⟨U+202E⟩" in language.html(
            Text("the form cannot be read: {error}", error=ValueError("<b>\u202e"))
        )
    assert ENGLISH.html(Text("{ahead} before it, about {seconds:.0f} s at the present rate", ahead=1, seconds=2.6)) == (
        "1 before it, about 3 s at the present rate"
    )
    assert CHINESE.html(as_is("{braces} & more")) == "{braces} &amp; more"


def test_a_sentence_can_be_copied() -> None:
    text = plural(1, "{count} queue", "{count} queues")
    for other in (copy.deepcopy(text), pickle.loads(pickle.dumps(text))):  # noqa: S301  # our own bytes
        assert (other, other.pattern, other.parts) == (text, text.pattern, text.parts)
        assert CHINESE.say(other) == "1 个队列"


def test_an_error_says_its_sentence() -> None:
    assert CHINESE.say(said_by(ValueError(Text("you have to log in")))) == "请先登录"
    assert CHINESE.say(said_by(ValueError("Connection refused"))) == "Connection refused"
    assert said_by(ValueError()) == ""


@pytest.mark.parametrize(
    ("kept", "accepted", "code"),
    [
        (None, None, "en"),
        (None, "", "en"),
        (None, "zh-CN,zh;q=0.9,en;q=0.8", "zh-CN"),
        (None, "zh", "zh-CN"),
        (None, "zh-Hans-SG", "zh-CN"),
        (None, "ZH-cn", "zh-CN"),
        (None, "en-GB,zh;q=0.5", "en"),
        (None, "en;q=0.5, zh;q=0.6", "zh-CN"),
        (None, "de,fr;q=0.9", "en"),
        (None, "de,zh;q=0.1", "zh-CN"),
        (None, "zh;q=0,en", "en"),
        (None, "zh;q=nonsense", "en"),
        (None, "*", "en"),
        (None, "," * 5000, "en"),
        ("en", "zh-CN", "en"),
        ("zh-CN", "en", "zh-CN"),
        ("klingon", "zh", "zh-CN"),
        ("<script>", None, "en"),
    ],
)
def test_the_language_is_chosen_by_cookie_then_by_browser(kept: str | None, accepted: str | None, code: str) -> None:
    assert language_of(kept, accepted).code == code
    assert language_of(kept, accepted) in LANGUAGES.values()
