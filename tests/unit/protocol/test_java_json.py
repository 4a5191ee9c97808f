from __future__ import annotations

from typing import Any

import pytest

from downrange.protocol.java_json import MAX_DEPTH, MAX_REFERENCED_VALUES, JavaJsonError, loads

QUEUE_KEY = '{"brokerName":"broker-a","queueId":0,"topic":"TopicA"}'


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a":[1,-2.5,1e3,true,false,null,"x"]}', {"a": [1, -2.5, 1000.0, True, False, None, "x"]}),
        ('{0:"a",1:"b"}', {"0": "a", "1": "b"}),
        ("{-1:{2:[3]}}", {"-1": {"2": [3]}}),
        ("{true:1,null:2}", {"true": 1, "null": 2}),
        ('{{"topic":"TopicA","queueId":0,"brokerName":"broker-a"}:7}', {QUEUE_KEY: 7}),
        ('{"t":{{"b":1,"a":[2, 3]} : 5 , "plain":6}}', {"t": {'{"a":[2,3],"b":1}': 5, "plain": 6}}),
        (" { 0 : [ ] , 1 : { } }\r\n\t", {"0": [], "1": {}}),
        ('{0:"\\u4f60\\n\\"\\\\ \\ud83d\\ude00"}', {"0": '你\n"\\ 😀'}),
        ('{0:"raw\x01control"}', {"0": "raw\x01control"}),
        ('{0:"half a \\ud83d pair"}', {"0": "half a \ufffd pair"}),
        ("{0:1,0:2}", {"0": 2}),
        ("{}", {}),
        ("7", 7),
    ],
)
def test_java_text_is_read(text: str, value: Any) -> None:
    assert loads(text) == value
    assert loads(text.encode()) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a":{"x":1},"b":{"$ref":"$.a"}}', {"a": {"x": 1}, "b": {"x": 1}}),
        ('{"a":[{"x":1}],"b":{"$ref":"$.a[0]"}}', {"a": [{"x": 1}], "b": {"x": 1}}),
        ('{"a":{0:{"x":1}},"b":{"$ref":"$.a[0]"}}', {"a": {"0": {"x": 1}}, "b": {"x": 1}}),
        ('{"a":{"b.c":{"x":1}},"d":{"$ref":"$.a.b\\\\.c"}}', {"a": {"b.c": {"x": 1}}, "d": {"x": 1}}),
        ('{"a":{"b.c":{"x":1}},"d":{"$ref":"$.a[\'b.c\']"}}', {"a": {"b.c": {"x": 1}}, "d": {"x": 1}}),
        ('{"a":{"$ref":"$.b"},"b":[{"$ref":"$.c"}],"c":{"x":1}}', {"a": [{"x": 1}], "b": [{"x": 1}], "c": {"x": 1}}),
        # Circles: nothing finite stands for them.
        (
            '{"a":{"self":{"$ref":"@"},"up":{"$ref":".."},"top":{"$ref":"$"}}}',
            {"a": dict.fromkeys(("self", "up", "top"))},
        ),
        ('{"a":{"b":{"$ref":"$.a"}}}', {"a": {"b": None}}),
        ('{"a":{"$ref":"$.b"},"b":{"$ref":"$.a"}}', {"a": None, "b": None}),
        # Nowhere.
        ('[{"$ref":"$.nowhere"},{"$ref":"$[7]"},{"$ref":"$[-1]"},{"$ref":"what?"},{"$ref":"$!"}]', [None] * 5),
        # Not references.
        ('{"$ref":"$.a","a":1}', {"$ref": "$.a", "a": 1}),
        ('{"a":{"$ref":5}}', {"a": {"$ref": 5}}),
    ],
)
def test_references_are_replaced_by_what_they_point_at(text: str, value: Any) -> None:
    assert loads(text) == value


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "expected a value at character 0"),
        (b"nonsense", "unreadable at character 0"),
        (b"{0:1", "expected ','"),
        (b"{0:1,}", "expected a value at character 5, found '}'"),
        (b"{0:1}{", "expected the end at character 5"),
        (b'{0:"open', "unreadable at character 3"),
        (b'{0:"bad \\x escape"}', "bad escape in the string at character 3"),
        (b"{0:01}", "expected ','"),
        (b"\xff\xfe", "not UTF-8 at byte 0"),
        (b"{0:" + b"9" * 5000 + b"}", "number too long"),
        (b"[" * 100_000, "nested deeper than"),
        (b"{0:" * 100_000, "nested deeper than"),
        (b"{" * 100, "an object key inside an object key"),
    ],
)
def test_garbage_is_refused_with_its_place(data: bytes, problem: str) -> None:
    with pytest.raises(JavaJsonError, match=problem.replace("[", r"\[")):
        loads(data)


def test_nesting_is_allowed_up_to_the_limit() -> None:
    assert loads("{0:" * MAX_DEPTH + "1" + "}" * MAX_DEPTH)
    with pytest.raises(JavaJsonError, match="nested deeper"):
        loads("{0:" * (MAX_DEPTH + 1) + "1" + "}" * (MAX_DEPTH + 1))


def test_references_cannot_blow_a_small_text_up() -> None:
    doubling = ",".join(f'"a{n + 1}":[{{"$ref":"$.a{n}"}},{{"$ref":"$.a{n}"}}]' for n in range(60))
    with pytest.raises(JavaJsonError, match=f"more than {MAX_REFERENCED_VALUES} values"):
        loads('{"a0":[1,2],' + doubling + "}")


def test_references_cannot_nest_endlessly() -> None:
    chain = ",".join(f'"a{n}":[{{"$ref":"$.a{n + 1}"}}]' for n in range(1000))
    with pytest.raises(JavaJsonError, match="through references"):
        loads("{" + chain + "}")
