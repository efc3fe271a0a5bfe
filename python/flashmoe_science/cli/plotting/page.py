"""One HTML file with complete records: pictures, tables, environment, and how to repeat them.

It loads nothing, needs no script, follows the reader's light or dark setting, and scrolls wide
tables and pictures in their own box, so that it is readable on a phone.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from typing import Any

from flashmoe_science.cli.measure import OURS
from flashmoe_science.cli.plotting import record as rec
from flashmoe_science.cli.plotting.record import Record
from flashmoe_science.cli.plotting.theme import DARK, LIGHT, Theme
from flashmoe_science.cli.records import launches_of, summary_words

_MEBI = 2**20


def _variables(theme: Theme) -> str:
    faster, slower = theme.ours, theme.peers[0]
    return (
        f"--surface:{theme.surface};--ink:{theme.ink};--muted:{theme.muted};--rule:{theme.rule};"
        f"--faster:{faster};--slower:{slower};"
    )


_STYLE = f"""\
:root{{color-scheme:light dark;{_variables(LIGHT)}}}
@media (prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--surface);color:var(--ink);
 font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,sans-serif}}
main{{max-width:72rem;margin:0 auto;padding:1.5rem 1rem 4rem}}
h1{{font-size:1.6rem;line-height:1.2}}
h2{{font-size:1.25rem;line-height:1.25;margin-top:3rem;border-top:1px solid var(--rule);
 padding-top:1.5rem}}
h3{{font-size:1rem;margin:2rem 0 .5rem}}
p,li{{max-width:46rem}}
a{{color:var(--faster)}}
.muted{{color:var(--muted)}}
code,pre{{font:.85em/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}}
pre,.scroll{{overflow-x:auto;border:1px solid var(--rule);border-radius:6px}}
pre{{padding:.6rem .8rem}}
figure{{margin:1.5rem 0}}
.picture{{overflow-x:auto}}
.picture svg{{display:block;width:100%;min-width:36rem;height:auto}}
.dark{{display:none}}
@media (prefers-color-scheme:dark){{.light{{display:none}}.dark{{display:block}}}}
table{{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums;width:100%}}
th,td{{padding:.3rem .7rem;text-align:right;white-space:nowrap;vertical-align:top;
 border-bottom:1px solid var(--rule)}}
thead th{{color:var(--muted);font-weight:600}}
tr:last-child>*{{border-bottom:0}}
th:first-child,td.words{{text-align:left}}
tbody th{{font-weight:600;position:sticky;left:0;background:var(--surface)}}
td.words{{white-space:normal;min-width:16rem;overflow-wrap:anywhere}}
.faster{{color:var(--faster)}}
.slower,.void{{color:var(--slower)}}
.tie,.withheld,.none{{color:var(--muted)}}
.void{{font-weight:600}}
summary{{cursor:pointer;margin:1.5rem 0 .5rem;font-weight:600}}
"""


# ---- pieces ----------------------------------------------------------------------------------


def _text(value: object) -> str:
    return html.escape(str(value))


def _td(words: str, kind: str = "") -> str:
    return f'<td class="{kind}">{_text(words)}</td>' if kind else f"<td>{_text(words)}</td>"


def _table(headers: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f'<th scope="col">{_text(h)}</th>' for h in headers)
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>'
        "\n</table></div>"
    )


def _row_head(words: str) -> str:
    return f'<th scope="row">{_text(words)}</th>'


def inline_svg(picture: bytes, prefix: str, label: str) -> str:
    """An SVG file as an element of a page: with unique ids, and a label for readers who cannot see
    it."""
    svg = picture.decode("utf-8")
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<(metadata|title)>.*?</\1>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'href="#', f'href="#{prefix}-', svg)
    svg = svg.replace("url(#", f"url(#{prefix}-")
    svg = re.sub(r'width="([\d.]+)pt" height="[\d.]+pt"', r'style="max-width:\1pt"', svg, count=1)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{_text(label)}" ', 1).strip()


def _figure(record: Record, chart: str, looks: Mapping[str, bytes]) -> str:
    """One picture in both themes; the reader's setting shows one."""
    title = f"{record.document['title']}: {chart}"
    shown = [
        f'<div class="picture {name}">'
        f"{inline_svg(picture, f'{_slug(record.name)}-{chart}-{name}', title)}</div>"
        for name, picture in looks.items()
    ]
    return "<figure>\n" + "\n".join(shown) + "\n</figure>"


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name)


# ---- what was measured -----------------------------------------------------------------------


def _us(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.1f}"


def _ratio_words(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    mark = {"tie": " tie", "withheld": " noisy"}.get(found["verdict"], "")
    return f"{found['ratio']:.2f} [{found['low']:.2f}, {found['high']:.2f}]{mark}"


def _ratio_td(found: Mapping[str, Any] | None) -> str:
    return _td(_ratio_words(found), found["verdict"] if found else "none")


def _rows_table(record: Record) -> str:
    """A line for each shape: our time and speed, and the ratio over each peer."""
    unit, per_tera = rec.unit(record.document)
    peers = rec.peer_names(record.cells)
    rows = []
    for cell in record.cells:
        line = [_row_head(rec.extents_text(rec.extents(cell["shape"])))]
        ours = rec.contenders(cell).get(OURS)
        if ours is None:
            line.append(
                f'<td class="words" colspan="{2 + len(peers)}"><span class="void">void:</span> '
                f"{_text(cell.get('reason', ''))}</td>"
            )
        else:
            line += [_td(_us(ours["median_s"])), _td(rec.number(ours["tflops"] * per_tera))]
            line += [_ratio_td(rec.against(cell, peer)) for peer in peers]
        rows.append("".join(line))
    return _table(["shape", "median us", unit, *(f"over {p}" for p in peers)], rows)


_DETAILS = (
    "shape", "contender", "status", "median us", "quartiles us", "speed", "of the ceiling",
    "in a graph us", "eager us", "host us", "peak MiB", "tokens/s", "ratio", "ratio in a graph",
    "error / bound", "",
)  # fmt: skip


def _note(cell: Mapping[str, Any], name: str, entry: Mapping[str, Any]) -> str:
    if "reason" in entry:
        return str(entry["reason"])
    if name != OURS:
        return str(entry.get("version", ""))
    words = []
    for launch in launches_of(cell):
        grid, block = ("x".join(map(str, launch[key])) for key in ("grid", "block"))
        words.append(f"{launch['kernel']}, grid {grid}, block {block}")
    return "; ".join(words)


def _error_words(accuracy: Mapping[str, Any] | None) -> str:
    if not accuracy or accuracy["error"] is None or accuracy["bound"] is None:
        return ""
    return f"{accuracy['error']:.2g} / {accuracy['bound']:.2g}"


def _details_table(record: Record) -> str:
    """A line for each contender of each shape, with everything recorded about it."""
    unit, per_tera = rec.unit(record.document)
    rows = []
    for cell in record.cells:
        shape = _row_head(rec.extents_text(rec.extents(cell["shape"])))
        if cell["status"] != "ok":
            empty = _td("") * (len(_DETAILS) - 4)
            line = shape + _td(OURS) + _td("void", "void") + empty
            rows.append(line + _td(cell.get("reason", ""), "words"))
            continue
        for name, entry in cell["contenders"].items():
            timed = entry["status"] == "ok"
            share = entry.get("ceiling_fraction")
            peak, tokens = entry.get("peak_bytes"), entry.get("tokens_per_s")
            accuracy = cell.get("accuracy") if name == OURS else entry.get("accuracy")
            columns = [
                shape,
                _td(name),
                _td(entry["status"], "" if timed else "void"),
                _td(_us(entry.get("median_s"))),
                _td(f"{_us(entry['q1_s'])} to {_us(entry['q3_s'])}" if timed else ""),
                _td(f"{rec.number(entry['tflops'] * per_tera)} {unit}" if timed else ""),
                _td(f"{share:.0%}" if share is not None else ""),
                _td(_us(entry.get("graph_s"))),
                _td(_us(entry.get("eager_s"))),
                _td(_us(entry.get("host_s"))),
                _td(f"{peak / _MEBI:.1f}" if peak is not None else ""),
                _td(f"{tokens:.3g}" if tokens is not None else ""),
                _ratio_td(entry.get("against")),
                _ratio_td(entry.get("graph_against")),
                _td(_error_words(accuracy)),
                _td(_note(cell, name, entry), "words"),
            ]
            rows.append("".join(columns))
    return _table(_DETAILS, rows)


def _summary(record: Record) -> str:
    lines = [
        f"<li>over <b>{_text(peer)}</b>: {summary_words(s)}</li>"
        for peer, s in record.document["summary"].items()
    ]
    return f"<ul>\n{chr(10).join(lines)}\n</ul>" if lines else "<p>No peer was timed beside us.</p>"


# ---- what it was measured on -----------------------------------------------------------------


def _flat(value: Any, name: str = "") -> list[tuple[str, str]]:
    """A document's leaves, keyed by their paths."""
    if isinstance(value, Mapping):
        found = [(f"{name} {key}".strip(), item) for key, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        found = [(f"{name} {index}", item) for index, item in enumerate(value)]
    else:
        words = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        return [(name, words)] if words else []
    return [leaf for path, item in found for leaf in _flat(item, path)]


def _readings(document: Mapping[str, Any]) -> str:
    """nvidia-smi's readings before and after; "" without a GPU."""
    before = document.get("machine_before", document["environment"].get("nvidia_smi"))
    after = document.get("machine_after", document.get("nvidia_smi_after"))
    leaves = {when: dict(_flat(of)) for when, of in (("before", before), ("after", after)) if of}
    names = dict.fromkeys(name for of in leaves.values() for name in of)
    if not names:
        return ""
    rows = [_row_head(n) + "".join(_td(of.get(n, "")) for of in leaves.values()) for n in names]
    return f"<h3>Clocks, power, temperature</h3>\n{_table(['GPU', *leaves], rows)}"


_HOW_TO_READ = """\
<p>A ratio is the peer's median time over ours, with its 95 % bootstrap interval: above 1, ours is
faster; where the interval holds 1 it is a tie. It is noisy, and in no mean, where quartiles spread
too far for a verdict. A row of ours that was wrong, or was not run by the
planned kernel, is void and has no times.</p>"""
_SHOWN_ELSEWHERE = (
    "cells", "summary", "title", "machine_before", "machine_after", "nvidia_smi_after", "command",
)  # fmt: skip


def _environment(record: Record) -> str:
    document = {k: v for k, v in record.document.items() if k not in _SHOWN_ELSEWHERE}
    environment = {k: v for k, v in document["environment"].items() if k != "nvidia_smi"}
    leaves = [("file", record.path.name), ("file's sha256", record.digest)]
    leaves += _flat(document | {"environment": environment})
    rows = [_row_head(name) + _td(words, "words") for name, words in leaves]
    return (
        "<details>\n<summary>Environment: machine, versions, build, sampling</summary>\n"
        f"{_table(['', ''], rows)}\n</details>"
    )


def _section(
    record: Record, pictures: Mapping[str, Mapping[str, bytes]], missing: Mapping[str, str]
) -> str:
    document = record.document
    command = rec.command(document)
    parts = [
        f'<section id="{_slug(record.name)}">',
        f"<h2>{_text(document['title'])}</h2>",
        f'<p class="muted">{_text(rec.provenance(document))}</p>',
        f"<p>To measure it again:</p>\n<pre><code>{_text(command)}</code></pre>" * bool(command),
        _HOW_TO_READ,
        _summary(record),
        *(_figure(record, chart, looks) for chart, looks in pictures.items()),
        *(
            f'<p class="muted">No {_text(c)} picture: {_text(why)}.</p>'
            for c, why in missing.items()
        ),
        "<h3>Every shape</h3>",
        _rows_table(record),
        "<details>\n<summary>Every contender: quartiles, graph, eager and host time, memory, errors"
        f"</summary>\n{_details_table(record)}\n</details>",
        _readings(document),
        _environment(record),
        "</section>",
    ]
    return "\n".join(filter(None, parts))


def page(
    records: Sequence[Record],
    pictures: Mapping[str, Mapping[str, Mapping[str, bytes]]],
    missing: Mapping[str, Mapping[str, str]],
) -> str:
    """The whole page.

    `pictures[record name][chart][theme name]` is an SVG; `missing[record name][chart]` says why a
    record has no such picture.
    """
    links = [
        f'<li><a href="#{_slug(r.name)}">{_text(r.document["title"])}</a> '
        f'<span class="muted">{_text(rec.machine(r.document))}</span></li>'
        for r in records
    ]
    contents = f"<nav><ul>\n{chr(10).join(links)}\n</ul></nav>\n" if len(records) > 1 else ""
    sections = [_section(r, pictures.get(r.name, {}), missing.get(r.name, {})) for r in records]
    return f"""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>FlashMoE: {_text(records[0].document["title"])}</title>
<style>
{_STYLE}</style>
</head>
<body>
<main>
<h1>FlashMoE, measured</h1>
{contents}{chr(10).join(sections)}
</main>
</body>
</html>
"""
