"""What the console says to people: the sentences of the source and of the templates, and texts that are none."""

from __future__ import annotations

import ast
import re
import string
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Final

from jinja2 import Environment, nodes

import downrange
from downrange.console.words import word

SOURCE: Final = Path(downrange.__file__).parent
TEMPLATES: Final = SOURCE / "console" / "templates"
SCRIPTS: Final = SOURCE / "console" / "static"
SHOWN_ATTRIBUTES: Final = ("aria-label", "title", "placeholder", "alt", "content")
NAMES: Final = frozenset(
    {
        *("Downrange", "JSON", "CSV", "true", "false"),
        *("Normal", "Super", "enable", "disable", "Allow", "Deny"),  # values that brokers know
        *("Topic:orders", "Pub,Sub", "alice", "amount > 100 AND region = 'eu'"),  # examples in fields
        *("width=device-width, initial-scale=1", "light dark"),  # of browsers
    }
)
"""Words that are the same in every language."""


def placeholders(pattern: str) -> list[str]:
    """The placeholders of a pattern with their formats, sorted."""
    return sorted(
        name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
        for _, name, spec, conversion in string.Formatter().parse(pattern)
        if name is not None
    )


class Found:
    """Sentences by the place where they are, and what is wrong with others."""

    def __init__(self) -> None:
        self.patterns: dict[str, str] = {}
        self.faults: list[str] = []

    def add(self, pattern: str, place: str) -> None:
        if pattern:
            self.patterns.setdefault(pattern, place)


def of_source() -> Found:
    """`Text("…")`, `plural(count, "…", "…")` and the separators of `joined` of the whole package."""
    found = Found()
    for path in sorted(SOURCE.rglob("*.py")):
        source = path.read_text("utf-8")
        if "from downrange.model.text import" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "joined":
                separator = node.args[0]
                place = f"{path.relative_to(SOURCE)}:{node.lineno}"
                if isinstance(separator, ast.Constant) and isinstance(separator.value, str):
                    found.add(f"{{one}}{separator.value}{{other}}", place)
                else:
                    found.faults.append(f"{place}: the separator is no literal")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("Text", "plural"):
                place = f"{path.relative_to(SOURCE)}:{node.lineno}"
                patterns = node.args[:1] if node.func.id == "Text" else node.args[1:3]
                texts = [one.value for one in patterns if isinstance(one, ast.Constant) and isinstance(one.value, str)]
                if len(texts) != (1 if node.func.id == "Text" else 2):
                    found.faults.append(f"{place}: the pattern is no literal")
                    continue
                if len(texts) == 2 and placeholders(texts[0]) != placeholders(texts[1]):
                    found.faults.append(f"{place}: one and many differ in placeholders")
                found.add(texts[-1], place)
    return found


def of_templates() -> Found:
    """`_('…')` and `plural(…)` of the templates. Any other text with letters that a reader would see is a fault."""
    found = Found()
    environment = Environment(autoescape=True)
    for path in sorted(TEMPLATES.glob("*.html")):
        of_template(environment.parse(path.read_text("utf-8")), path.name, found)
    return found


def of_template(template: nodes.Template, name: str, found: Found) -> None:
    """Add the sentences and the faults of one template."""
    for call in template.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name in ("_", "plural"):
            patterns = call.args[:1] if call.node.name == "_" else call.args[1:3]
            texts = [one.value for one in patterns if isinstance(one, nodes.Const) and isinstance(one.value, str)]
            if len(texts) != (1 if call.node.name == "_" else 2):
                found.faults.append(f"{name}:{call.lineno}: the pattern is no literal")
                continue
            found.add(texts[-1], f"{name}:{call.lineno}")
    reader = _Reader(name, found)
    reader.feed("".join(reader.flat(template.body)))
    reader.close()


class _Reader(HTMLParser):
    """Reads a template as HTML. An expression is one character of the private use area, in its place."""

    def __init__(self, name: str, found: Found) -> None:
        super().__init__()
        self._name = name
        self._found = found
        self._expressions: list[nodes.Node] = []
        self._inside: list[str] = []

    def flat(self, body: Sequence[nodes.Node]) -> Iterator[str]:
        """All branches of a template, one after another."""
        for node in body:
            if isinstance(node, nodes.TemplateData):
                yield node.data
            elif isinstance(node, nodes.Output):
                yield from self.flat(node.nodes)
            elif isinstance(node, nodes.Expr):
                self._expressions.append(node)
                yield chr(0xE000 + len(self._expressions) - 1)
            else:
                for part in (getattr(node, "body", []), getattr(node, "elif_", []), getattr(node, "else_", [])):
                    yield from self.flat(part)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("input", "meta", "link", "img", "br"):
            self._inside.append(tag)
        if tag == "meta" and dict(attrs).get("name") == "htmx-config":
            return
        for name, value in attrs:
            if name in SHOWN_ATTRIBUTES and value:
                self._check(value)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._inside:
            del self._inside[len(self._inside) - 1 - self._inside[::-1].index(tag) :]

    def handle_data(self, data: str) -> None:
        if not {"kbd", "code", "script", "style"} & set(self._inside):
            self._check(data)

    def _check(self, text: str) -> None:
        for number in (ord(one) - 0xE000 for one in text if 0xE000 <= ord(one) < 0xF8FF):
            for said in _said(self._expressions[number]):
                self._fault(said)
        self._fault(re.sub(r"[\ue000-\uf8ff]", " ", text))

    def _fault(self, text: str) -> None:
        plain = text.strip(" \n·:\u203a")
        if plain not in NAMES and re.search(r"[A-Za-z]", plain):
            self._found.faults.append(f"{self._name}: {plain!r} does not go through the catalogue")


def _said(node: nodes.Node) -> Iterator[str]:
    """Texts that an expression may print, and those that it hands to a macro that prints them."""
    match node:
        case nodes.Const(value=str(text)):
            yield text
        case nodes.CondExpr():
            yield from _said(node.expr1)
            if node.expr2 is not None:
                yield from _said(node.expr2)
        case nodes.Or() | nodes.And() | nodes.Add():
            yield from _said(node.left)
            yield from _said(node.right)
        case nodes.Concat():
            for one in node.nodes:
                yield from _said(one)
        case nodes.Call(node=nodes.Getattr(node=nodes.Name(name="parts"))):
            for one in (*node.args, *(keyword.value for keyword in node.kwargs)):
                yield from (text for text in _said(one) if " " in text or text[:1].isupper())
        case _:
            pass


def of_scripts() -> list[str]:
    """Texts of our scripts that look like words for people: those come from the page."""
    text = r"[\"`']([^\"`';(]*[A-Za-z]{2}[^\"`';(]*)[\"`']"
    shown = re.compile(rf"(?:textContent = (?:[^;\"`']*[\"`'][\"`'])*[^;\"`']*|announce\(|label: ){text}")
    return [
        f"{path.name}: {found!r}"
        for path in sorted(SCRIPTS.glob("*.js"))
        for found in shown.findall(re.sub(r"^\s*//.*$|\s// .*$", "", path.read_text("utf-8"), flags=re.MULTILINE))
    ]


SILENT: Final = frozenset(
    {
        *("audit", "write", "told"),  # the audit log
        *("debug", "info", "warning", "error", "exception"),  # the log
        *("execute", "execute_many", "executescript"),  # SQL
        *("ConfigError", "NotImplementedError", "AssertionError", "ConsoleCannotListen"),  # for whoever starts it
        *("Text", "plural", "setting", "compile", "findall", "namedtuple"),
    }
)
"""Calls whose texts no reader of a page sees, or that make sentences."""
NOT_SAID: Final = (
    *("charset=", "max-age=", "no-cache", "accept-encoding", "filename*", "event: "),  # of HTTP
    *("CREATE TABLE", "<"),  # of the database; what a debugger shows
    *("cannot listen on", "--history ", "This host is not served", "in memory"),  # for whoever starts the console
    *("job …", "sampler …"),  # names of tasks
    *("wipe write permission", "add write permission"),  # of the audit log
    *("not support", "too many"),  # looked for in errors
    *("SLAVE …", "…: … bytes"),  # a role as RocketMQ writes it; fields of Protobuf
)
"""Texts in the console's modules that no reader of a page sees."""


def of_prose() -> list[str]:
    """Texts of two words or more in the console's own modules that are no sentences."""
    found = []
    for path in sorted((SOURCE / "console").rglob("*.py")):
        prose = _Prose()
        prose.visit(ast.parse(path.read_text("utf-8")))
        found += [
            f"{path.relative_to(SOURCE)}:{line}: {text!r}"
            for line, text in prose.found
            if not any(one in text for one in NOT_SAID) and word(text).pattern != text
        ]
    return found


class _Prose(ast.NodeVisitor):
    """Texts that look like words for people; those of docstrings and of `SILENT` calls are left out."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []

    def visit_Expr(self, node: ast.Expr) -> None:  # ast names it
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name not in SILENT:
            self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        text = "".join(str(one.value) if isinstance(one, ast.Constant) else "…" for one in node.values)
        self._look(node.lineno, text)
        for one in node.values:
            if isinstance(one, ast.FormattedValue):
                self.visit(one.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self._look(node.lineno, node.value)

    def _look(self, line: int, text: str) -> None:
        if re.search(r"[A-Za-z]{2,}[,;:.]? [a-z(…]|… [a-z]{2}", text):
            self.found.append((line, text))
