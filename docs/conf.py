"""The documentation as a site: `sphinx-build -W docs build/site`, with the package installed.

Needs `pip install '.[docs]'` and the program doxygen, which reads the headers.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.addnodes import pending_xref

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent

project = "FlashMoE"
copyright = "the FlashMoE authors"
html_title = "FlashMoE"
html_theme = "furo"
extensions = ["myst_parser", "breathe", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
nitpicky = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_typehints = "none"  # they are in the signatures, or, of native functions, in the text
autodoc_member_order = "bysource"
add_module_names = False

# ---- what doxygen reads from the headers --------------------------------------------------------

_DOXYFILE = """
PROJECT_NAME = flashmoe
INPUT = {inputs}
OUTPUT_DIRECTORY = {output}
GENERATE_XML = YES
GENERATE_HTML = NO
GENERATE_LATEX = NO
INPUT_FILTER = "{python} {docs}/doxygen_filter.py"
EXTRACT_ALL = YES
EXTRACT_STATIC = YES
MARKDOWN_SUPPORT = NO
AUTOLINK_SUPPORT = NO
TYPEDEF_HIDES_STRUCT = YES
MACRO_EXPANSION = YES
EXPAND_ONLY_PREDEF = YES
PREDEFINED = FLASHMOE_API= __cplusplus=0 {defined}
EXCLUDE_SYMBOLS = flashmoe::detail flashmoe::detail::* __half __nv_bfloat16
OPTIMIZE_OUTPUT_FOR_C = {for_c}
WARN_IF_UNDOCUMENTED = NO
QUIET = YES
"""


def _doxygen(output: Path, inputs: list[Path], *, for_c: bool) -> str:
    """The folder of the XML that doxygen makes of some headers."""
    output.mkdir(parents=True, exist_ok=True)
    doxyfile = _DOXYFILE.format(
        inputs=" ".join(f'"{path}"' for path in inputs),
        output=output,
        python=sys.executable,
        docs=DOCS,
        defined="" if for_c else "__cpp_exceptions=1",
        for_c="YES" if for_c else "NO",
    )
    subprocess.run(["doxygen", "-"], input=doxyfile, text=True, check=True)
    return str(output / "xml")


_INCLUDE = ROOT / "include" / "flashmoe"
breathe_default_project = "c"
breathe_domain_by_extension = {"h": "c", "hpp": "cpp"}


def _read_headers(app: Any, config: Any) -> None:
    """Gives breathe the headers' XML. It is beside the pages that Sphinx keeps from build to build,
    and no file of it is ever removed: these pages remember by path which of it they show."""
    xml = Path(app.doctreedir) / "doxygen"
    config.breathe_projects = {
        "c": _doxygen(xml / "c", sorted(_INCLUDE.glob("*.h")), for_c=True),
        "cpp": _doxygen(xml / "cpp", [_INCLUDE / "flashmoe.hpp"], for_c=False),
    }


# ---- the headers' sections ----------------------------------------------------------------------


class HeaderWords(Directive):
    """The words of a header's section: `{header-words} flashmoe.h Attention, forward`.

    Without a title, those that the header begins with. Indented lines stay as they are.
    """

    required_arguments = 1
    optional_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        header, *titles = self.arguments
        path = _INCLUDE / header
        self.state.document.settings.env.note_dependency(str(path))
        text = path.read_text(encoding="utf-8")
        if titles:
            begin = rf"^/\* -+\n \* {re.escape(titles[0])}\n"
            section = re.search(rf"{begin}(.*?)^ \* -+ \*/", text, re.M | re.S)
        elif path.suffix == ".hpp":
            section = re.search(r"\A((?://.*\n)+)", text)
        else:
            section = re.search(r"\A/\*.*?\n(.*?)^ \*/", text, re.M | re.S)
        if section is None:
            raise self.error(f"{header} has no section {titles}")
        lines = [line[3:] for line in section[1].splitlines()]  # behind " * " or "// "
        paragraphs = re.split(r"\n(?:[ \t]*\n)+", "\n".join(lines).strip("\n"))
        language = "cpp" if path.suffix == ".hpp" else "text"
        return [self._node(paragraph, language) for paragraph in paragraphs if paragraph.strip()]

    @staticmethod
    def _node(paragraph: str, language: str) -> nodes.Node:
        if paragraph.startswith(" - "):
            texts = re.split(r"^ - ", paragraph, flags=re.M)[1:]
            items = [nodes.list_item("", nodes.paragraph(text, text)) for text in texts]
            return nodes.bullet_list("", *items)
        if re.search(r"^ {2}", paragraph, re.M):
            return nodes.literal_block(paragraph, paragraph, language=language)
        return nodes.paragraph(paragraph, paragraph)


# ---- what Sphinx does not do by itself ----------------------------------------------------------


def _mark_formulas(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """An indented block behind a paragraph of a docstring is a formula, to be shown as it is."""
    previous = ""
    marked: list[str] = []
    for line in lines:
        heading = re.fullmatch(r"\w+:", previous) is not None
        if line.startswith("    ") and previous and not previous.startswith(" ") and not heading:
            marked += ["::", ""]
        marked.append(line)
        previous = line if line.strip() else previous
    lines[:] = marked


def _unlink_sources(app: Any, doctree: nodes.document) -> None:
    """Leaves the text of links to files and folders that are not of the site: they lead somewhere
    where the repository is read. What leads nowhere stays, for MyST to warn of."""
    here = (DOCS / app.env.docname).parent
    for link in list(doctree.findall(pending_xref)):
        if link["reftype"] == "myst":
            of_page = link["refdomain"] == "doc"
            target = link["reftarget"].partition("#")[0]
            path = DOCS / f"{target}.md" if of_page else here / target
            if target and target not in app.env.found_docs and path.exists():
                link.replace_self(link.children)


def _copy_pictures(app: Any, exception: Exception | None) -> None:
    """Pages show pictures by plain HTML, which Sphinx does not follow."""
    if exception is None and app.builder.name == "html":
        shutil.copytree(DOCS / "pictures", Path(app.outdir) / "pictures", dirs_exist_ok=True)


def setup(app: Any) -> None:
    app.add_directive("header-words", HeaderWords)
    app.connect("config-inited", _read_headers)
    app.connect("doctree-read", _unlink_sources)
    app.connect("autodoc-process-docstring", _mark_formulas, priority=400)  # before napoleon
    app.connect("build-finished", _copy_pictures)
