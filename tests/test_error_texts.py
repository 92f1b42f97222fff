"""Programs read the core's errors as data: no Python file searches a text for the core's words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import tfdist

ROOT = Path(tfdist.__file__).parent
LITERAL = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
WORDS = re.compile(r"[A-Za-z]+ [A-Za-z]+")
# Functions and methods that search a text for another one.
SEARCHES = {
    *("split", "rsplit", "partition", "rpartition", "startswith", "endswith", "find", "rfind"),
    *("index", "rindex", "removeprefix", "removesuffix", "count", "compile", "search", "match"),
    *("fullmatch", "findall", "finditer", "sub"),
}


def words_of_core() -> set[str]:
    """The texts of at least two words in the core's sources."""
    sources = [*ROOT.glob("csrc/**/*.cc"), *ROOT.glob("csrc/**/*.h")]
    assert sources
    texts = (text.strip() for path in sources for text in LITERAL.findall(path.read_text()))
    return {text for text in texts if WORDS.search(text)}


def searched(tree: ast.AST) -> Iterator[str]:
    """The texts that a module searches others for."""
    constants = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        given: list[ast.expr] = []
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            given = [node.left]
        elif isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Attribute) and called.attr in SEARCHES:
                given = node.args[:1]
        for one in given:
            value = constants.get(one.id, one) if isinstance(one, ast.Name) else one
            parts = value.values if isinstance(value, ast.JoinedStr) else [value]
            for part in parts:
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value.strip()


def parsed(tree: ast.AST, core: set[str]) -> list[str]:
    """The texts of the core that a module searches others for."""
    return [
        text
        for text in searched(tree)
        if WORDS.search(text) and any(text in said or said in text for said in core)
    ]


def test_no_file_parses_a_sentence_of_the_core():
    core = words_of_core()
    found = {
        str(path.relative_to(ROOT)): texts
        for path in sorted(ROOT.glob("**/*.py"))
        if (texts := parsed(ast.parse(path.read_text()), core))
    }
    assert not found


def test_such_a_file_is_found():
    core = words_of_core()
    for line in (
        'lost = f"{worker} is lost" in message',
        'cause = message.split(" Detected in ")[0]',
        'SEEN = "Detected in "\ncause = message.partition(SEEN)',
    ):
        assert parsed(ast.parse(line), core), line
