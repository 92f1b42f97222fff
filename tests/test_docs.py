"""The documentation: links and paths lead somewhere, and the glossary has the words of the API."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(
    [*DOCS.rglob("*.md")]
    + [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")]
)
CODE = sorted(
    path
    for folder in ("tfdist", "tests", "examples", "benchmarks")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".cc", ".h", ".cu", ".inc", ".sbatch")
)
FILES = [
    f"/{path.relative_to(ROOT)}"
    for folder in ("tfdist", "tests", "examples", "benchmarks", "docs")
    for path in [ROOT / folder, *(ROOT / folder).rglob("*")]
]
SURFACE = (ROOT / "tests/surface/surface.txt").read_text()
# Words of public names that the glossary need not explain: English, and the vocabulary of Python,
# Keras and TensorFlow.
ORDINARY = """
abort across after algorithm and args asynchronous auto b backend backup backward balance batches
begin block bool buffer build by bytes ca cache cached call callback candidate carries certificate
change checkpoint class clean client clip close cls collect communicates communication compile
compresses config context cost count cpu cross cuda data dataframe dataset delete derives describe
device dict differentiable dir directory draw dry dtype during end entries enumeration env epoch
every exception exclude explain f factor failed false file filepath first fit fixed float fn
follows for force forward from function get gpu grace h has help holds hostfile image in index
info initial int interval into is job json keep keras key kind kw kwargs last lasting launch
launches learning level library like load local logger loop m make max mean memory message metric
microbatches min mismatch mode model module momentum monitor monitoring multi n name namespace new
nnodes no node none norm num number object of old on only op optimizer option other output package
parallel param path peak per plan png port predict print processes profiler prometheus property
rate ratio receive received reopen reset restart restore result row run runtime same save scale
scaling second security select self send sent set setting shape shared shown size skip smallest
soon split ssh start state statistics step str sum summary take tensor tensorflow test text time
to total train training true tuple type unavailable union unsupported use validation value
variable verbose version volume wait warning weight with x
"""


def _text(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", _text(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _words(names: str) -> set[str]:
    """The words of names such as `PowerSGD`, `error_feedback` and `TFDIST_CACHE`."""
    found = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", names.replace("_", " "))
    return {word.lower() for word in found}


def _singular(words: set[str]) -> set[str]:
    return {word.removesuffix("s") for word in words}


def _glossary() -> list[str]:
    """The terms, in the order of the page."""
    rows = re.findall(r"^\| (.+?) \|", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    return [row for row in rows if row not in ("term", "---")]


def test_links_lead_somewhere():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", _text(page)):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if "://" not in link:
                assert target.exists(), (page, link)
                assert not anchor or anchor in _anchors(target), (page, link)


def test_code_names_pages_that_exist():
    for path in CODE:
        for name, anchor in re.findall(
            r"(?<![\w/])(docs/[\w/.-]+\.\w+)(#[\w-]+)?", path.read_text()
        ):
            page = ROOT / name
            # TensorFlow's notebooks are in its repository.
            assert page.exists() or name.startswith("docs/site/"), (path, name)
            assert not anchor or anchor[1:] in _anchors(page), (path, name, anchor)


def test_named_files_exist():
    for page in [*(DOCS / "design").glob("*.md"), ROOT / "CONTRIBUTING.md"]:
        for name in re.findall(r"`([\w./-]+(?:/|\.(?:py|cc|h|cu|inc|txt)))`", _text(page)):
            # Modules may be named without their folder.
            module = "/" not in name and name.endswith(".py") and not name.startswith("test_")
            end = "/" + name.strip("/")
            found = [file for file in FILES if file.endswith(end)]
            assert any(file.startswith("/tfdist/") or not module for file in found), (page, name)


def test_each_package_has_a_place_in_the_design():
    layers = (DOCS / "design/index.md").read_text()
    for path in (ROOT / "tfdist/_src").iterdir():
        if path.is_dir() and path.name != "__pycache__":
            assert f"`{path.name}/`" in layers
        elif path.suffix == ".py" and path.stem != "__init__":
            assert f"`{path.name}`" in layers


def test_each_public_module_has_a_reference():
    for path in (ROOT / "tfdist").glob("[a-z]*.py"):
        assert f"::: tfdist.{path.stem}\n" in (DOCS / f"reference/{path.stem}.md").read_text()


def test_the_glossary_covers_the_public_names():
    names = re.sub(r"'[^']*'", "", SURFACE)
    explained = {word for term in _glossary() for word in _words(term)}
    explained |= {name.lower() for term in _glossary() for name in term.split(", ")}
    known = _singular(explained | {*ORDINARY.split(), "tfdist"})
    missing = sorted(_singular(_words(names)) - known)
    assert missing == [], "Explain them in docs/glossary.md, or name them in the field's words."


def test_the_glossary_is_in_alphabetical_order():
    terms = [term.lower().replace("_", " ") for term in _glossary()]
    assert terms == sorted(terms)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100
