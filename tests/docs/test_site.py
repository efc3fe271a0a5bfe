"""The site builds without a warning, and has every public function of Python, C and C++."""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
import subprocess
import sys
import urllib.parse
import zlib
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest
from pages import DOCS, ROOT

# sphinx by a module of its own: of a folder that is left of it Python makes a package of that name,
# which stays among the modules, and scipy, finding it there, cannot be imported any more.
for _package in ("myst_parser", "furo", "breathe", "sphinx.application"):
    pytest.importorskip(_package)
if shutil.which("doxygen") is None:
    pytest.skip("needs doxygen on the PATH", allow_module_level=True)


def build(folder: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--quiet", DOCS, folder]
    result = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build(folder)
    return folder


class Links(HTMLParser):
    """What a page of the site leads to, and what others may lead to on it."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in {"href", "src"}:
                self.targets.append(value or "")
            elif name == "srcset":
                self.targets += [choice.split()[0] for choice in (value or "").split(",")]
            elif name == "id":
                self.anchors.add(value or "")


@pytest.fixture(scope="module")
def entries(site: Path) -> set[tuple[str, str]]:
    """(kind, name) of all that the site describes."""
    data = (site / "objects.inv").read_bytes()
    lines = zlib.decompress(data.split(b"\n", 4)[4]).decode().splitlines()
    found = (re.match(r"(.+?) ([\w:]+) -?\d+ ", line) for line in lines)
    return {(match[2], match[1]) for match in found if match}


def names(entries: set[tuple[str, str]], domain: str) -> set[str]:
    return {name for kind, name in entries if kind.startswith(f"{domain}:")}


def public_names(module: ModuleType) -> set[str]:
    """What its __all__ has; without one, the functions and classes that it defines itself."""
    if hasattr(module, "__all__"):
        return set(module.__all__) - {"__version__"}
    return {
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) or inspect.isclass(value)
        if not name.startswith("_") and value.__module__ == module.__name__
    }


@pytest.mark.parametrize(
    ("module", "least"),
    [
        ("flashmoe_science", 35),
        ("flashmoe_science.torch", 10),
        ("flashmoe_science.hf", 8),
        ("flashmoe_science.flash_attn", 3),
    ],
)
def test_every_public_name_of_python(
    entries: set[tuple[str, str]], module: str, least: int
) -> None:
    wanted = {f"{module}.{name}" for name in public_names(importlib.import_module(module))}
    assert len(wanted) >= least
    assert wanted - names(entries, "py") == set(), "docs/reference/python.md lacks them"


def test_the_module_for_jax(entries: set[tuple[str, str]]) -> None:
    """The package's functions call it; what it has for people, if anything, is in its __all__."""
    module = importlib.import_module("flashmoe_science.jax")
    wanted = {f"flashmoe_science.jax.{name}" for name in getattr(module, "__all__", ())}
    wanted.add("flashmoe_science.jax")
    assert wanted - names(entries, "py") == set(), "docs/reference/python.md lacks them"


def test_every_name_of_c(entries: set[tuple[str, str]]) -> None:
    symbols = (ROOT / "tests/packaging/exported_symbols.txt").read_text().split()
    headers = "".join(path.read_text() for path in (ROOT / "include/flashmoe").glob("*.h"))
    types = re.findall(r"^typedef (?:struct|enum) (\w+) \{", headers, re.MULTILINE)
    pointers = re.findall(r"^typedef \w+ \(\*(\w+)\)", headers, re.MULTILINE)
    inline = re.findall(r"^static inline \w+\s(\w+)\(", headers, re.MULTILINE)
    macros = re.findall(r"^#define (FLASHMOE_\w+) \S", headers, re.MULTILINE)
    hidden = {"FLASHMOE_API"}  # marks what is exported
    assert len(types) > 15 and len(pointers) == 1 and len(inline) >= 8 and len(macros) >= 4
    wanted = {*symbols, *types, *pointers, *inline, *macros} - hidden
    code = re.sub(r"/\*.*?\*/", "", headers, flags=re.DOTALL)
    assert set(re.findall(r"\bflashmoe_\w+", code)) <= wanted, "a declaration of another form"
    assert wanted - names(entries, "c") == set(), "docs/reference/c.md lacks them"


def test_every_type_and_function_of_cpp(entries: set[tuple[str, str]]) -> None:
    header = (ROOT / "include/flashmoe/flashmoe.hpp").read_text()
    header = re.sub(
        r"namespace detail \{.*?^\}  // namespace detail", "", header, flags=re.M | re.S
    )
    public = set(re.findall(r"^(?:class|struct|enum class|using) (\w+)", header, re.MULTILINE))
    public |= set(
        re.findall(r"^(?:inline )?[\w:<>][\w:<> ]* (\w+)\([^;]*\{$", header, re.MULTILINE)
    )
    public -= {"__half", "__nv_bfloat16"}
    assert {"run", "plan", "TensorView", "AttentionForward", "Error"} <= public
    described = {name.removeprefix("flashmoe::") for name in names(entries, "cpp")}
    assert public - described == set(), "docs/reference/cpp.md lacks them"


def test_every_page_is_in_the_contents(site: Path) -> None:
    contents = (site / "index.html").read_text(encoding="utf-8")
    pages = {path.relative_to(DOCS).with_suffix(".html").as_posix() for path in DOCS.rglob("*.md")}
    assert {page for page in pages if f'href="{page}' not in contents} == {"index.html"}


def test_pictures_are_there(site: Path) -> None:
    text = (DOCS / "measurements.md").read_text(encoding="utf-8")
    pictures = re.findall(r'src(?:set)?="(pictures/[^"]+)"', text)
    assert pictures and all((site / picture).exists() for picture in pictures)


def test_links_lead_somewhere(site: Path) -> None:
    pages = {path: Links(path) for path in site.rglob("*.html")}
    followed, dead = 0, []
    for page, links in pages.items():
        for link in links.targets:
            url = urllib.parse.urlsplit(link)
            if url.scheme or url.netloc:
                continue
            followed += 1
            path = (page.parent / urllib.parse.unquote(url.path)).resolve() if url.path else page
            anchor = urllib.parse.unquote(url.fragment)
            if not path.is_file() or (anchor and anchor not in pages[path].anchors):
                dead.append(f"{page.relative_to(site)}: {link}")
    assert followed > 1000 and dead == []


def test_a_second_build(site: Path) -> None:
    """Into the folder of the first, as who writes pages builds: Sphinx reads what has changed."""
    index = site / "index.html"
    index.unlink()
    build(site)
    assert index.exists()
