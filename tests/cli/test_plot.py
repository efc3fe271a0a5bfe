"""`flashmoe plot`: every record can be drawn, the same twice, and a page holds all of it."""

from __future__ import annotations

import html.parser
import json
import re
import shlex
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import bench_records
import pytest
from flashmoe_science.cli import build_parser, main
from flashmoe_science.cli.plotting import charts, page, record, sheet, theme
from flashmoe_science.cli.plotting.ratio import arrange, readable, ticks
from flashmoe_science.cli.records import schema_violations
from flashmoe_science.cli.shapes import Shape, shape_from_options

RESULTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.json"))
RECORDS = [p for p in RESULTS if "schema" in json.loads(p.read_text())]


@pytest.fixture
def grid(tmp_path: Path) -> record.Record:
    return record.read_record(bench_records.write(tmp_path / "grid.json", bench_records.grid()))


@pytest.fixture
def a_list(tmp_path: Path) -> record.Record:
    return record.read_record(bench_records.write(tmp_path / "list.json", bench_records.a_list()))


def svg_words(picture: bytes) -> list[str]:
    found = ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")
    return [text.text or "" for text in found]


# ---- the made-up records are like the real ones ----------------------------------------------


@pytest.mark.parametrize("made", [bench_records.grid(), bench_records.a_list()])
def test_made_up_records_hold_the_schema(made: dict[str, Any]) -> None:
    pytest.importorskip("jsonschema")
    assert schema_violations(made) == []


# ---- records in words ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "words"), [(421.4, "421"), (10, "10"), (9.96, "10"), (9.94, "9.9"), (0.0369, "0.037")]
)
def test_numbers(value: float, words: str) -> None:
    assert record.number(value) == words


@pytest.mark.parametrize(
    "shape",
    [
        bench_records.shape(32),
        bench_records.shape(32, "bottom_right", seq_k=64, dim_v=128, batch=3),
        bench_records.shape(7, "top_left", heads_kv=8, dtype="fp16"),
        bench_records.shape(32) | {"window_left": 0, "window_right": None, "softcap": 0.125},
        bench_records.shape(32) | {"window_left": None, "window_right": 9, "softcap": None},
    ],
)
def test_a_rows_command_gives_its_shape(shape: dict[str, Any]) -> None:
    row = {"shape": shape, "status": "ok"}
    words = shlex.split(record.row_command(bench_records.grid(), row))
    arguments = build_parser().parse_args(words[1:])
    assert shape_from_options(arguments, "fp32") == Shape(**shape)
    assert arguments.device == "cuda"


def test_a_window_and_a_softcap_are_part_of_the_mask() -> None:
    plain = bench_records.shape(32, "bottom_right")
    windowed = plain | {"window_left": 1023, "window_right": None, "softcap": 50.0}
    assert record.extents(plain)["mask"] == "causal"
    assert record.extents(windowed)["mask"] == "causal window 1023,none softcap 50"
    assert record.panel_key(plain) != record.panel_key(windowed)
    assert record.panel_name(record.panel_key(windowed), {"bf16"}) == (
        "D 64 causal window 1023,none softcap 50"
    )


def test_the_command_of_a_record_is_the_one_it_states() -> None:
    assert record.command(bench_records.grid()) == "flashmoe bench --suite grid --device cuda"


def test_an_older_record_is_repeated_by_its_suite_or_its_row() -> None:
    older = bench_records.grid(schema=1)
    del older["command"]
    assert record.command(older) == "flashmoe bench --suite grid --device cuda"
    older["suite"] = None
    assert "--seq 32 --heads 8 --kv-heads 2" in record.command(older)


def test_a_grid_is_told_from_a_list(grid: record.Record, a_list: record.Record) -> None:
    assert record.is_grid(grid.cells)
    assert not record.is_grid(a_list.cells)  # two rows of one length
    assert not record.is_grid(grid.cells[:1])
    uneven = bench_records.cell(bench_records.shape(8, seq_k=16), 1, grid_ratio())
    assert not record.is_grid([*grid.cells, uneven])


def grid_ratio() -> dict[str, Any]:
    return bench_records.against(1.21, 1.1, 1.3)


# ---- looks -----------------------------------------------------------------------------------


def contrast(a: str, b: str) -> float:
    """WCAG 2's contrast ratio of two colours."""

    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("look", theme.THEMES.values(), ids=lambda t: t.name)
def test_every_word_can_be_read(look: theme.Theme) -> None:
    words = (look.ink, look.muted, look.ours, look.plain, *look.peers)
    assert min(contrast(colour, look.surface) for colour in words) >= 4.5


@pytest.mark.parametrize("look", theme.THEMES.values(), ids=lambda t: t.name)
def test_numbers_on_the_map_can_be_read(look: theme.Theme) -> None:
    colors = pytest.importorskip("matplotlib.colors")
    scale = colors.LinearSegmentedColormap.from_list("ratio", look.diverging)
    for step in range(101):
        colour = scale(step / 100)
        assert contrast(colors.to_hex(colour), readable(colour)) >= 4.0


def test_a_peer_looks_the_same_in_every_picture() -> None:
    few = theme.styles(["flashmoe", "torch-cudnn"], theme.LIGHT)
    many = theme.styles(["flashmoe", "torch-flash", "torch-cudnn", "new", "fa3"], theme.LIGHT)
    assert few["torch-cudnn"] == many["torch-cudnn"]
    assert len({s.colour for s in many.values()}) == len({s.mark for s in many.values()}) == 5


@pytest.mark.parametrize("look", theme.THEMES.values(), ids=lambda t: t.name)
def test_no_two_contenders_look_alike(look: theme.Theme) -> None:
    names = ["flashmoe", *(f"torch-{n}" for n in ("flash", "cudnn", "efficient", "math"))]
    names += ["fa2", "fa3", "fa4", "flashinfer", "jax-cudnn", "one", "two"]
    made = theme.styles(names, look)
    assert list(made) == names
    assert len({(s.colour, s.mark) for s in made.values()}) == len(names)
    assert len({s.colour for n, s in made.items() if n not in ("one", "two")}) == len(names) - 2
    assert len(set(look.peers)) == len(look.peers)


def test_labels_are_moved_apart_and_no_further() -> None:
    placed = sheet.spread([10.0, 10.0, 0.0, 50.0], 4.0)
    assert placed == [8.0, 12.0, 0.0, 50.0]
    placed = sheet.spread([1.0, 0.9, 1.1, 1.0], 1.0)
    assert min(b - a for a, b in zip(sorted(placed), sorted(placed)[1:], strict=False)) >= 1 - 1e-9
    assert placed[1] < placed[0] < placed[3] < placed[2]
    assert sum(placed) == pytest.approx(4.0)


def test_words_are_measured_and_wrapped() -> None:
    pytest.importorskip("matplotlib")
    assert sheet.inches("a") < sheet.inches("aa") < sheet.inches("aa", bold=True)
    assert sheet.inches("aa", 17.0) == pytest.approx(2 * sheet.inches("aa", 8.5), rel=0.02)
    words = "operations for each byte of q, k, v, output and LSE"
    lines = sheet.wrap(words, 1.0)
    assert " ".join(lines) == words
    assert all(sheet.inches(line) <= 1.0 for line in lines)
    assert sheet.wrap("incomprehensibilities of", 0.5) == ["incomprehensibilities", "of"]


def test_a_long_key_has_lines() -> None:
    pytest.importorskip("matplotlib")
    named = list(theme.styles(["flashmoe", "torch-flash", "torch-cudnn"], theme.LIGHT).values())
    assert [len(line) for line in sheet.key_lines(named, 9.0)] == [3]
    assert [len(line) for line in sheet.key_lines(named, 0.5)] == [1, 1, 1]


def test_axes_have_round_ticks_with_room() -> None:
    assert sheet.decade_ticks(3, 700) == [5, 10, 20, 50, 100, 200, 500]
    assert sheet.decade_ticks(0.3, 700) == [1, 10, 100]
    assert ticks(0.82, 1.22, 2.25) == [1.0, 0.9, 1.1]
    assert 1.0 in ticks(0.25, 4.0, 2.25)
    assert len(ticks(0.25, 4.0, 2.25)) < len(ticks(0.25, 4.0, 9.0))


@pytest.mark.parametrize(("panels", "shape"), [(1, (1, 1)), (3, (3, 1)), (4, (2, 2)), (7, (3, 3))])
def test_panels_are_arranged(panels: int, shape: tuple[int, int]) -> None:
    assert arrange(panels, 3.0) == shape


# ---- pictures --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", RECORDS, ids=lambda p: p.stem)
@pytest.mark.parametrize("chart", charts.CHARTS)
def test_every_recorded_result_is_drawn(path: Path, chart: str) -> None:
    pytest.importorskip("matplotlib")
    kept = record.read_record(path)
    try:
        picture = charts.draw(kept, chart, theme.DARK, "svg")
    except charts.NothingToDraw as reason:
        expected = {
            "speed": not record.is_grid(kept.cells),
            "roofline": "no ceilings" in str(reason),
            "ratio": all(
                set(cell["contenders"]) <= {"flashmoe"} for cell in kept.document["cells"]
            ),
        }
        assert expected[chart]
    else:
        assert kept.document["title"] in " ".join(svg_words(picture))  # it may take two lines


@pytest.mark.parametrize("chart", charts.CHARTS)
def test_a_rerun_gives_the_same_bytes(grid: record.Record, chart: str) -> None:
    pytest.importorskip("matplotlib")
    first, second = (charts.draw(grid, chart, theme.LIGHT, "svg") for _ in range(2))
    assert first == second
    assert f"grid.json sha256:{grid.digest}".encode() in first
    assert b"date" not in first
    assert charts.draw(grid, chart, theme.DARK, "svg") != first


def test_a_png_is_a_png_that_names_its_record(grid: record.Record) -> None:
    pytest.importorskip("matplotlib")
    picture = charts.draw(grid, "ratio", theme.LIGHT, "png")
    assert picture.startswith(b"\x89PNG")
    assert grid.source.encode() in picture


def test_the_map_has_every_ratio(grid: record.Record) -> None:
    pytest.importorskip("matplotlib")
    words = svg_words(charts.draw(grid, "ratio", theme.LIGHT, "svg"))
    assert {"1.21", "1.00", "0.83", "void", "over torch-flash", "mean 1.10"} <= set(words)


def test_points_have_every_ratio_and_mark_ties(a_list: record.Record) -> None:
    pytest.importorskip("matplotlib")
    words = svg_words(charts.draw(a_list, "ratio", theme.LIGHT, "svg"))
    assert {"1.21", "0.87", "25.5", "1.02 tie", "B1 S1/8192"} <= set(words)
    assert "Hollow: in a CUDA graph." in " ".join(words)


def test_a_withheld_verdict_is_noisy_and_in_no_mean(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    nothing = {"rows": 0, "withheld": 1, "geometric_mean": None, "least": None, "most": None}
    for name, made in (("grid", bench_records.grid()), ("list", bench_records.a_list())):
        made["cells"][0]["contenders"]["torch-flash"]["against"]["verdict"] = "withheld"
        made["summary"]["torch-flash"] |= nothing
        assert schema_violations(made) == []
        drawn = record.read_record(bench_records.write(tmp_path / f"{name}.json", made))
        words = svg_words(charts.draw(drawn, "ratio", theme.LIGHT, "svg"))
        assert {"noisy", "1.21 noisy"} & set(words)
        assert "1.21" not in words
        assert not any(word.startswith("mean ") for word in words)
        assert "no verdict in 1: quartiles" in " ".join(words)
        shown = page.page([drawn], {}, {})
        assert "1.21 [1.10, 1.30] noisy" in shown
        assert "over <b>torch-flash</b>: no verdict in 1: quartiles" in shown


def test_lines_follow_the_numbers(grid: record.Record) -> None:
    pytest.importorskip("matplotlib")
    figure = charts.CHARTS["speed"](grid, theme.LIGHT)
    causal = next(a for a in figure.axes if "causal" in a.get_title(loc="left"))
    ours = [line for line in causal.lines if line.get_color() == theme.LIGHT.ours]
    assert ours[0].get_xydata().tolist() == [[32, 300.0], [64, 310.0]]
    (ceiling,) = [line for line in causal.lines if line.get_linestyle() == "--"]
    assert ceiling.get_ydata()[0] == 700.0


def test_the_band_is_between_quartiles(grid: record.Record) -> None:
    pytest.importorskip("matplotlib")
    figure = charts.CHARTS["speed"](grid, theme.LIGHT)
    causal = next(a for a in figure.axes if "causal" in a.get_title(loc="left"))
    edges = causal.collections[0].get_paths()[0].vertices  # ours come first
    at_64 = [y for x, y in edges if x == 64]
    assert min(at_64) == pytest.approx(310 / 1.03)
    assert max(at_64) == pytest.approx(310 / 0.98)


def test_ties_are_framed(grid: record.Record) -> None:
    pytest.importorskip("matplotlib")
    (axes,) = charts.CHARTS["ratio"](grid, theme.LIGHT).axes
    (frame,) = [patch for patch in axes.patches if not patch.get_fill()]
    x, y = frame.get_xy()
    assert (int(x), int(y)) == (0, 1)  # of S 32, causal


def test_points_have_their_interval_and_stay_on_the_axis(a_list: record.Record) -> None:
    pytest.importorskip("matplotlib")
    (axes,) = charts.CHARTS["ratio"](a_list, theme.LIGHT).axes
    drawn = [line.get_xydata().tolist() for line in axes.lines]
    for interval, y in (([1.1, 1.3], -0.17), ([0.8, 0.9], 0.17), ([0.98, 1.05], 2)):
        assert [[x, y] for x in interval] in drawn
    (arrow,) = [line for line in axes.lines if line.get_marker() == ">"]
    assert arrow.get_ydata()[0] == 1  # the ratio of 25.5 is in the second row
    low, high = axes.get_xlim()
    assert low < 0.8 < 1.3 < high < 25


def test_a_void_row_breaks_the_line(grid: record.Record) -> None:
    pytest.importorskip("matplotlib")
    figure = charts.CHARTS["speed"](grid, theme.LIGHT)
    full = next(a for a in figure.axes if "full" in a.get_title(loc="left"))
    ours = [line for line in full.lines if line.get_color() == theme.LIGHT.ours]
    (first, missing) = ours[0].get_ydata()
    assert first == pytest.approx(400.4)
    assert missing != missing  # not a number


def test_the_roof_is_what_was_measured(a_list: record.Record) -> None:
    pytest.importorskip("matplotlib")
    figure = charts.CHARTS["roofline"](a_list, theme.LIGHT)
    slope, level = figure.axes[0].lines[:2]
    (x, y) = slope.get_xydata()[1]
    assert x == pytest.approx(175.0)  # 700 TFLOP/s at 4 TB/s
    assert y == pytest.approx(700.0)
    assert level.get_ydata().tolist() == [700.0, 700.0]
    drawn = [line for line in figure.axes[0].lines if line.get_color() == theme.LIGHT.ours]
    intensities = [c["flops"] / c["bytes"] for c in a_list.cells]
    assert drawn[0].get_xdata().tolist() == intensities


def test_without_ceilings_there_is_no_roof(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    nothing = {"copy_bytes_per_s": None, "matmul_flops_per_s": {"bf16": None}}
    path = bench_records.write(tmp_path / "x.json", bench_records.grid(ceilings=nothing))
    with pytest.raises(charts.NothingToDraw, match="no ceilings: none were measured"):
        charts.draw(record.read_record(path), "roofline", theme.LIGHT, "svg")
    charts.draw(record.read_record(path), "speed", theme.LIGHT, "svg")  # only the line is missing


@pytest.mark.parametrize(
    ("copied", "product", "lacking"),
    [(4e12, None, "matrix product of its element types"), (None, 7e14, "copy")],
)
def test_the_ceiling_that_is_lacking_is_named(
    tmp_path: Path, copied: float | None, product: float | None, lacking: str
) -> None:
    found = {"copy_bytes_per_s": copied, "matmul_flops_per_s": {"bf16": product}}
    path = bench_records.write(tmp_path / "x.json", bench_records.grid(ceilings=found))
    reason = charts.why_not(record.read_record(path), "roofline")
    assert reason == f"the record has no ceiling of a {lacking}"


# ---- the page --------------------------------------------------------------------------------

_VOID_TAGS = {"meta", "br", "img", "link", "input", "hr"}


class Reader(html.parser.HTMLParser):
    """Notes what opens and closes, ids, what is asked for from elsewhere, and the words."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.words = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in _VOID_TAGS:
            self.open.append(tag)
        self._note(attributes)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self._note(attributes)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data

    def _note(self, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src", "xlink:href", "srcset", "data", "action"):
                self.links.append(value or "")


def read_page(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    assert len(set(reader.ids)) == len(reader.ids)
    assert {link for link in reader.links if not link.startswith("#")} == set()
    referred = {link[1:] for link in reader.links} | set(re.findall(r"url\(#([^)]+)\)", text))
    assert referred <= set(reader.ids)
    assert reader.tags.isdisjoint({"script", "link", "img", "iframe", "object"})
    assert re.search(r"url\((?!#)|@import", text) is None
    return reader


def test_a_page_holds_the_records_whole(
    tmp_path: Path, grid: record.Record, a_list: record.Record
) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "report.html"
    assert main(["plot", str(grid.path), str(a_list.path), "--html", str(file)]) == 0
    text = file.read_text(encoding="utf-8")
    reader = read_page(text)
    assert text.count("<svg ") == 2 * 5  # in both looks: three of the grid, two of the list
    assert text.count('class="picture dark"') == text.count('class="picture light"') == 5
    assert 'name="viewport" content="width=device-width' in text
    assert "@media (prefers-color-scheme:dark)" in text
    for words in (
        "bf16 B1 S64 H8/2 D64 full",
        "the launched kernel is not the planned one",
        "1.21 [1.10, 1.30]",
        "1.00 [0.90, 1.10] tie",
        "no such kernel",
        "attention_forward_sm89_bf16_d64_dv64, grid 4x1x1, block 128x1x1",
        "flashmoe bench --suite grid --device cuda",
        "1755 MHz",
        "No speed picture: the rows are not lines over the sequence length.",
        grid.digest,
    ):
        assert words in reader.words


def test_words_of_a_record_are_no_markup(tmp_path: Path) -> None:
    evil = '<script>alert("1")</script>&amp;'
    rows = [bench_records.cell(bench_records.shape(8), 1.0, grid_ratio(), refused=evil)]
    made = bench_records.document([*rows, bench_records.void(bench_records.shape(9), evil)])
    made["title"] = made["command"][0] = made["environment"]["cpu"] = evil
    path = bench_records.write(tmp_path / 'a "b" <c>.json', made)
    kept = record.read_record(path)
    reader = read_page(page.page([kept], {}, {kept.name: {"speed": evil}}))
    assert reader.words.count(evil) >= 6


# ---- the command -----------------------------------------------------------------------------


def test_the_files_are_named(
    tmp_path: Path, grid: record.Record, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    options = ["--theme", "dark", "--format", "svg", "--picture", "ratio", "--picture", "speed"]
    assert main(["plot", str(grid.path), "--out", str(out), *options, "--json"]) == 0
    names = ["grid-ratio-dark.svg", "grid-speed-dark.svg"]
    assert sorted(p.name for p in out.iterdir()) == names
    document = json.loads(capsys.readouterr().out)
    assert document == {"written": [str(out / name) for name in names], "not_drawn": {}}


def test_what_bench_writes_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "row.json"
    shape = ["--seq", "32", "--heads", "2", "--dim", "64", "--device", "cpu", "--seconds", "0.01"]
    assert main(["bench", *shape, "--json", str(file)]) == 0
    assert main(["plot", str(file), "--html", str(tmp_path / "row.html")]) == 0
    reader = read_page((tmp_path / "row.html").read_text(encoding="utf-8"))
    assert "fp32 B1 S32 H2 D64 full" in reader.words


def test_nothing_to_draw_is_said(
    tmp_path: Path, a_list: record.Record, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    options = ["--out", str(tmp_path / "out"), "--picture", "speed"]
    assert main(["plot", str(a_list.path), *options]) == 1
    assert "list: no speed picture: the rows are not lines" in capsys.readouterr().out


def test_without_matplotlib_there_is_still_a_page(
    tmp_path: Path,
    grid: record.Record,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", str(grid.path), "--out", str(tmp_path / "out")]) == 1
    assert "pip install 'flashmoe-science[bench]'" in capsys.readouterr().err
    assert main(["plot", str(grid.path), "--html", str(tmp_path / "x.html")]) == 0
    assert "pip install 'flashmoe-science[bench]'" in capsys.readouterr().out
    reader = read_page((tmp_path / "x.html").read_text(encoding="utf-8"))
    assert "No ratio picture: pictures need matplotlib" in reader.words
    assert "1.21 [1.10, 1.30]" in reader.words


def test_bad_requests_say_what_is_accepted(
    tmp_path: Path, grid: record.Record, capsys: pytest.CaptureFixture[str]
) -> None:
    def complaint(*arguments: str) -> str:
        assert main(["plot", *arguments]) == 1
        return capsys.readouterr().err

    file = str(grid.path)
    assert "--out: give a folder for pictures, or --html" in complaint(file)
    again = bench_records.write(tmp_path / "other" / "grid.json", bench_records.grid())
    assert "two files are named grid" in complaint(file, str(again), "--html", "x.html")
    assert "nothing.json cannot be read" in complaint("nothing.json", "--out", "x")
    other = bench_records.write(tmp_path / "other.json", {"what": "something else"})
    assert "is not a record of flashmoe bench" in complaint(str(other), "--out", "x")
    if "matplotlib" in sys.modules:
        under_a_file = str(grid.path / "out")
        assert f"--out: {under_a_file}" in complaint(file, "--out", under_a_file)
    with pytest.raises(SystemExit) as caught:
        main(["plot", file, "--out", "x", "--format", "gif"])
    assert caught.value.code == 2
    assert "got gif, accepted are svg, png" in capsys.readouterr().err
