"""Every program and command on a page runs, or is held to what it names; links lead somewhere."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from pages import (
    BUILDS_A_PROGRAM,
    DOCS,
    PAGES,
    ROOT,
    Block,
    blocks,
    link_targets,
    run,
    run_behind_torch,
    says,
    sentences,
)

LANGUAGES = {"", "python", "sh", "c", "cpp", "cuda", "cmake", "{toctree}", "{eval-rst}"}
TROUBLESHOOTING = DOCS / "troubleshooting.md"
API = DOCS / "api.md"


PROGRAMS = [block for block in blocks("python") if block.page not in (TROUBLESHOOTING, API)]


@pytest.mark.parametrize("block", PROGRAMS, ids=str)
def test_a_python_program_runs(block: Block, tmp_path: Path) -> None:
    # The first pages' in an interpreter of their own, as a reader's.
    first = block.page.parent in (ROOT, DOCS / "start")
    result = (run if first else run_behind_torch)(block.text, tmp_path)
    assert result.returncode == 0, result.stderr
    assert block.complaint(result.stdout) == ""


def test_the_beginnings_have_a_program_each() -> None:
    """So that a fence that is written otherwise does not take a page out of the tests."""
    of = {page.name: len(blocks("python", page=page)) for page in (DOCS / "start").glob("*.md")}
    assert of["torch.md"] == 2 and of["jax.md"] == 2 and of["huggingface.md"] == 1
    assert of["numpy.md"] == 3
    assert len(blocks("python", page=ROOT / "README.md")) == 1
    assert len(blocks("python", page=DOCS / "moe.md")) == 5
    assert len(blocks("python", page=DOCS / "producers.md")) == 4
    assert len(blocks("c", page=ROOT / "README.md")) == 1


@pytest.mark.parametrize("block", blocks(), ids=str)
def test_a_block_is_of_a_known_language(block: Block) -> None:
    directive = r"\{(doxygen\w+|header-words|literalinclude)\}"
    known = block.language in LANGUAGES or re.match(directive, block.language)
    assert known, block.language
    if block.language == "":  # a drawing
        assert not re.match(r"(flashmoe|python|pip|cmake|cc) ", block.text), "say ```sh"
        with pytest.raises(SyntaxError):  # else say ```python
            ast.parse(textwrap.dedent(block.text))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_block_escapes(page: Path) -> None:
    """Every fence is one that pages.blocks finds: three backticks where a line begins."""
    text = page.read_text(encoding="utf-8")
    outside = "".join(re.split(r"^```[^\n`]*\n.*?^```$", text, flags=re.MULTILINE | re.DOTALL))
    assert not re.search(r"^[\s>]*(```|~~~)", outside, re.MULTILINE)


# ---- troubleshooting ----------------------------------------------------------------------------


# Those that need a GPU are for tests/gpu/test_pages.py.
SHOWN = {title: code for title, code in sentences().items() if code and "cuda" not in code}


@pytest.mark.parametrize("sentence", SHOWN)
def test_a_sentence_is_what_its_program_raises(sentence: str, tmp_path: Path) -> None:
    result = run_behind_torch(SHOWN[sentence], tmp_path)
    assert says(result, sentence), result.stderr


@pytest.mark.parametrize("sentence", [title for title in sentences() if title not in SHOWN])
def test_a_sentence_without_a_program_is_in_the_sources(sentence: str) -> None:
    sources = [
        path.read_text(encoding="utf-8")
        for folder in ("core", "cuda", "bindings", "python")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".cpp", ".h", ".py"}
    ]
    text = re.sub(r'"\s*\n\s*"', "", "\n".join(sources))  # literals that go on in the next line
    form = re.sub(r"^sm89: ", "", sentence)  # a family, before its reason
    form = re.sub(r"^(q|k|kernel): ", "…: ", form)
    form = re.sub(r"cuda:0|(?<=is on )cpu|\b0 CUDA devices", "…", form)
    form = form.replace("but q is", "but … is").replace("of dtype fp32, ", "of dtype …")
    for piece in form.split("…"):
        assert piece.strip() in text, piece


# ---- signatures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("block", blocks("python", page=API), ids=str)
def test_a_signature_is_the_functions(block: Block) -> None:
    name = block.text.partition("(")[0]
    function = getattr(importlib.import_module("flashmoe_science"), name)
    signature = inspect.signature(function)
    empty = inspect.Parameter.empty
    bare = [p.replace(annotation=empty) for p in signature.parameters.values()]
    signature = signature.replace(parameters=bare, return_annotation=empty)
    shown = re.sub(r"\s+", "", block.text).replace('"', "'")
    assert shown == name + re.sub(r"\s+", "", str(signature))


# ---- commands -----------------------------------------------------------------------------------

SHELL = [(block, command) for block in blocks("sh") for command in block.commands]


def simple_commands() -> list[tuple[str, str]]:
    """Commands that build no program, one at a time, with where they stand."""
    found = {}
    for block, line in SHELL:
        if not BUILDS_A_PROGRAM.match(line):
            for command in line.split(" && "):
                found.setdefault(command.strip(), str(block))
    return list(found.items())


def options_of(command: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in command if word.startswith("--")]


def check_python(words: list[str]) -> None:
    if words[1] == "-m":  # pytest runs this; venv and build are Python's own
        assert words[2] in {"pytest", "venv", "build", "flashmoe_science"}
        return
    assert (ROOT / words[1]).is_file()
    if words[1].startswith("benchmarks/") and len(words) > 2:
        text = (ROOT / words[1]).read_text(encoding="utf-8")
        for option in options_of(words[2:]):
            assert f'"{option}"' in text, option


def check_pip(words: list[str]) -> None:
    assert words[1] == "install"
    for word in words[2:]:
        if word.startswith("./"):
            assert (ROOT / word / "pyproject.toml").is_file()
        for extra in re.findall(r"^\.\[(.*)\]$", word):
            pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
            assert re.search(rf"^{extra} = \[", pyproject, re.MULTILINE), extra
        if "==" in word:  # another place says the same
            said = (path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py"))
            assert any(f'"{word}"' in text for text in said), word
        for option in re.findall(r"^-Ccmake\.define\.(FLASHMOE_\w+)=", word):
            cmake = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
            assert f"option({option} " in cmake, option


def check_preset(words: list[str]) -> None:
    presets = json.loads((ROOT / "CMakePresets.json").read_text(encoding="utf-8"))
    if "--preset" in words:
        name = words[words.index("--preset") + 1]
        assert name in {preset["name"] for preset in presets["configurePresets"]}
        if words[0] == "ctest":
            assert name in {preset["name"] for preset in presets["testPresets"]}
    else:
        assert words[1] in {"--build", "--install"}


def check_flashmoe(words: list[str], command: str) -> None:
    """The cheap ones run; of the others, options are what the command line accepts."""
    from flashmoe_science import cli

    if words[1] in {"plan", "plan-moe", "info", "config"}:
        if not {"--device", "--gpu"} & set(words) and words[1].startswith("plan"):
            words = [*words, "--device", "cpu"]
        program = [sys.executable, "-m", "flashmoe_science", *words[1:]]
        result = subprocess.run(program, capture_output=True, text=True, check=False)
        if "--gpu" in words and result.returncode != 0:
            import flashmoe_science

            assert not flashmoe_science.build_info().cuda_architectures
            assert "this library was built without CUDA and has no plans" in result.stderr
            return
        assert result.returncode == 0, result.stderr
        return
    try:
        cli.build_parser().parse_args(words[1:])
    except SystemExit:
        pytest.fail(f"not accepted: {command}")


def check_file(words: list[str]) -> None:
    assert (ROOT / words[0]).is_file()


@pytest.mark.parametrize(
    "command", [pytest.param(c, id=f"{where} {c[:40]}") for c, where in simple_commands()]
)
def test_a_command_is_accepted(command: str) -> None:
    """What a command names is there. pip, cmake and pytest themselves are run by .ci/run."""
    words = shlex.split(command)
    while re.match(r"[A-Z_]+=", words[0]):  # the environment of this command alone
        words = words[1:]
    if words[0] == "flashmoe":
        check_flashmoe(words, command)
    elif words[0] in {"python", "python3"}:
        check_python(words)
    elif words[0] == "pip":
        check_pip(words)
    elif words[0] in {"cmake", "ctest"}:
        check_preset(words)
    elif words[0].startswith(".ci/"):
        check_file(words)
    else:
        # tests/docs/test_site.py runs sphinx-build.
        assert words[0] in {"source", "pre-commit", "sphinx-build"}, (
            f"nothing holds this to account: {command}"
        )


# ---- links --------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors of its headings, as hosts of repositories and MyST make them from their text."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        words = re.sub(r"\]\([^)]*\)", "", heading).lower().strip()  # a link's text alone
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        again = sum(re.fullmatch(rf"{slug}(-\d+)?", other) is not None for other in found)
        found.add(f"{slug}-{again}" if again else slug)
    return found


LINKING = [*PAGES, *sorted((ROOT / "benchmarks").rglob("*.md"))]


@pytest.mark.parametrize("page", LINKING, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in link_targets(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(path), f"{page.name}: {target}"


def test_sources_name_pages_that_are_there() -> None:
    folders = ("core", "cpu", "cuda", "bindings", "include", "python", "cmake", "examples")
    files = [ROOT / "CMakeLists.txt", ROOT / "pyproject.toml"]
    files += [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    named = {}
    for path in files:
        if path.suffix != ".pyc":
            text = path.read_text(encoding="utf-8", errors="replace")
            named |= dict.fromkeys(re.findall(r"\bdocs/[\w/]+\.md\b", text), path)
    assert len(named) > 5
    assert {page: by for page, by in named.items() if not (ROOT / page).exists()} == {}


def test_the_map_of_the_sources_is_true() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    folders = "core|cpu|cuda|cmake|bindings|python|include|tests"
    named = re.findall(rf"(?<![\w/.])((?:{folders})/[\w./]*\w)", text)
    missing = [path for path in named if not (ROOT / path).exists()]
    assert missing == []
