"""A class that does something takes at most six things. More belong together: they get a class with a name.

Records are free: dataclasses that only hold fields, check them, and derive values from them by properties.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import downrange

MOST = 6
EXCEPTIONS: dict[str, str] = {
    "client/producer/blocking/transaction_producer.py: TransactionProducer": "as AsyncTransactionProducer",
    "client/producer/transaction_producer.py: AsyncTransactionProducer": "public: AsyncProducer's keywords and more",
    "console/plans.py: KeptPlan": "a row of the list of plans",
    "console/schedule.py: Pace": "the intervals of a console, one field for each",
    "console/snapshot.py: GroupState": "what is known of a group, filled answer by answer",
    "console/snapshot.py: Snapshot": "what is known of a cluster, filled answer by answer",
    "console/tables.py: Listing": "what a table on a page is asked to show, one field for each part of an address",
    "load/report.py: LoadReport": "the figures of a run, as `--json` prints them",
    "settings.py: Setting": "a row of the table of settings",
    "simulation/plan.py: Plan": "the options of `downrange simulate`",
    "spark/options.py: SourceOptions": "the options of the data source, one field for each",
    "spark/sink_options.py: SinkOptions": "the options of the sink, one field for each",
    "store/config.py: StoreConfig": "the settings of a store, one field for each",
}
SOURCE = Path(downrange.__file__).parent

Function = ast.FunctionDef | ast.AsyncFunctionDef


def decorators(node: ast.ClassDef | Function) -> set[str]:
    return {ast.unparse(decorator).partition("(")[0] for decorator in node.decorator_list}


def arguments(node: ast.ClassDef) -> int:
    """How many things one passes to make an object of this class, if the class does something; 0 for a record."""
    methods = [item for item in node.body if isinstance(item, Function)]
    for method in methods:
        if method.name == "__init__":
            return len([*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs]) - 1
    acts = any(
        not method.name.startswith("__")
        and not decorators(method) & {"property", "cached_property", "classmethod", "staticmethod"}
        for method in methods
    )
    if "dataclass" not in decorators(node) or not acts:
        return 0
    fields = [ast.unparse(item) for item in node.body if isinstance(item, ast.AnnAssign)]
    return sum("ClassVar" not in field and "init=False" not in field for field in fields)


def classes() -> Iterator[tuple[str, int]]:
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                yield f"{path.relative_to(SOURCE).as_posix()}: {node.name}", arguments(node)


def test_constructors_take_at_most_six_things() -> None:
    assert {name: count for name, count in classes() if count > MOST and name not in EXCEPTIONS} == {}


def test_every_exception_is_needed() -> None:
    counts = dict(classes())
    assert [name for name in EXCEPTIONS if counts.get(name, 0) <= MOST] == []


def test_things_are_counted() -> None:
    def count(text: str) -> int:
        (node,) = ast.parse(text).body
        assert isinstance(node, ast.ClassDef)
        return arguments(node)

    assert count("class A:\n def __init__(self, a, /, b, *rest, c=1): ...") == 3
    fields = "@dataclass(eq=False)\nclass A:\n a: int\n b: int = 0\n c: int = field(init=False)\n"
    assert count(f"{fields} def run(self): ...") == 2
    assert count(f"{fields} @property\n def total(self): ...\n def __repr__(self): ...") == 0
