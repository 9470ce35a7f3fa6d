"""A comparison as one HTML page that needs nothing else: no network, no other files."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import numpy as np

from recipes.comparison.charts import Line, line_chart, number
from recipes.comparison.runs import SAMPLES, Run, differing_keys
from recipes.config.differences import value_at

AXES = ("batches", "samples", "hours")
FIRST = ("loss/", "metrics/", "images/")  # figures whose charts come first
THROUGHPUT, SHARES = "throughput/", "time/share/"
PARTS = ("data", "forward", "backward", "optimizer", "ema")  # of a step, in their order
COUNTERS = "time/"  # figures that only say where a run is
HERE = Path(__file__).resolve().parent


def page(runs: Sequence[Run]) -> str:
    """The whole page. Everything that comes from runs is escaped, and no script but the page's own may run."""
    style, script = ((HERE / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    title = "Comparison of " + ", ".join(run.label for run in runs) if len(runs) > 1 else f"Run {runs[0].label}"
    names = sorted({name for run in runs for name in run.curves if not name.startswith(COUNTERS)})
    main = [name for name in names if name.startswith(FIRST)]
    speed = [name for name in names if name.startswith(THROUGHPUT)]
    rest = [name for name in names if name not in (*main, *speed)]
    sections = [
        _section("Results", _facts(runs)),
        _section("Pictures", _pictures(runs)),
        _section("Losses and metrics", _charts(runs, main)),
        _section("Throughput", _charts(runs, speed)),
        _section("Where the time of a step goes", _shares(runs)),
        _section("Differences of the configs", _differences(runs)),
    ]
    if rest:
        sections.append(f"<details><summary>{len(rest)} more figures</summary>{_charts(runs, rest)}</details>")
    axes = "".join(
        f'<label><input type="radio" name="axis" id="axis-{axis}" value="{axis}"{" checked" if not i else ""}>'
        f"{axis.capitalize()}</label>"
        for i, axis in enumerate(AXES)
    )
    keys = "".join(f"<li>{_key(i)}{escape(run.label)}</li>" for i, run in enumerate(runs))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{escape(title)}</h1>\n<ul class="keys" aria-label="Runs">{keys}</ul>\n'
        f"<fieldset><legend>Progress is measured in</legend>{axes}</fieldset>\n"
        + "\n".join(sections)
        + f"\n</main>\n<script>{script}</script>\n</body>\n</html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n{content}\n</section>"


def _key(run: int) -> str:
    return f'<svg viewBox="0 0 32 12" aria-hidden="true"><path class="line run{run % 8}" d="M0 6H32"/></svg>'


def _table(title: str, head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that scrolls where it is too wide. Cells are HTML; the first of a row is its heading."""
    columns = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    lines = [f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>' for row in rows]
    return (
        f'<div class="scroll" role="region" aria-label="{title}" tabindex="0"><table>'
        f"<thead><tr>{columns}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _heads(runs: Sequence[Run]) -> list[str]:
    return ["", *(f"{_key(i)}{escape(run.label)}" for i, run in enumerate(runs))]


def _facts(runs: Sequence[Run]) -> str:
    """Lengths, speeds, and the last and best value of each figure of validation."""
    rows = [["Model", *(escape(str(value_at(run.config, "model.name"))) for run in runs)]]
    rows.append(["Engine", *(escape(str(value_at(run.config, "training.engine") or "")) for run in runs)])
    for axis in AXES:
        ends = (float(run.position(run.batches, axis)) for run in runs)
        rows.append([axis.capitalize(), *(f"{end:,.0f}" if axis != "hours" else f"{end:.3g}" for end in ends)])
    names = sorted({name for run in runs for name in run.curves if name.startswith(FIRST)})
    for name in names:
        rows.append([f"{escape(name)}, at the end", *(_end(run, name) for run in runs)])
    for name, title in (("samples_per_sec", "Samples per second"), ("device/tflops_per_sec", "TFLOP/s per device"),
                        ("device/mfu", "MFU")):  # fmt: skip
        if any(THROUGHPUT + name in run.curves for run in runs):
            rows.append([f"{title}, median", *(_median(run, THROUGHPUT + name) for run in runs)])
    note = (
        "At the end: the mean of the last 5% of what was logged, for validation the last value. Hours count from the "
        "first logged figure, without pauses between a stop and the resume; samples are those that the run counted."
    )
    return _table("Results", _heads(runs), rows) + f'<p class="faint">{note}</p>'


def _end(run: Run, name: str) -> str:
    if name not in run.curves:
        return "not logged"
    values = run.curves[name].values
    tail = values[-max(1, len(values) // 20) :] if name.startswith("loss/") else values[-1:]
    return f"{tail.mean():.5g}"  # nan where the run has diverged


def _median(run: Run, name: str) -> str:
    return number(float(np.median(run.curves[name].values))) if name in run.curves else "not logged"


def _charts(runs: Sequence[Run], names: Sequence[str]) -> str:
    """A chart per figure, drawn over each axis; the style shows the one that is chosen."""
    figures = []
    for name in names:
        lines = {
            axis: [
                Line(i, run.label, run.position(run.curves[name].batches, axis), run.curves[name].values)
                for i, run in enumerate(runs)
                if name in run.curves
            ]
            for axis in AXES
        }
        values = np.concatenate([line.y for line in lines[AXES[0]]])
        lost = int((~np.isfinite(values)).sum())
        note = f' <span class="faint">({lost} values are not finite and left out)</span>' if lost else ""
        drawn = "".join(
            f'<div class="on-{axis}">{line_chart(name, lines[axis], axis)}</div>' for axis in AXES
        ) if lost < len(values) else ""  # fmt: skip
        figures.append(f"<figure><figcaption>{escape(name)}{note}</figcaption>{drawn}</figure>")
    return f'<div class="charts">{"".join(figures)}</div>' if figures else "<p>None were logged.</p>"


def _shares(runs: Sequence[Run]) -> str:
    """A bar per run and the shares as numbers: means over the run."""
    order = {f"{SHARES}{part}": place for place, part in enumerate(PARTS)}
    found = sorted({name for run in runs for name in run.curves if name.startswith(SHARES)})
    names = sorted(found, key=lambda name: order.get(name, len(PARTS)))
    inside = [name for name in names if name != f"{SHARES}communication"]  # that is part of the passes
    if not inside:
        return "<p>None were logged; the callback <code>throughput</code> does.</p>"
    rows = []
    for i, run in enumerate(runs):
        means = {name: float(np.nanmean(run.curves[name].values)) for name in names if name in run.curves}
        bars, left = [], 0.0
        for part, name in enumerate(inside):
            share = min(max(means.get(name, 0.0), 0.0), 1.0 - left)
            label = f"{escape(name.removeprefix(SHARES))} {share:.0%}"
            bars.append(f'<rect class="part{part % 6}" x="{100 * left:.2f}" width="{100 * share:.2f}" height="10">'
                        f"<title>{label}</title></rect>")  # fmt: skip
            left += share
        size = 'viewBox="0 0 100 10" preserveAspectRatio="none"'
        bar = f'<svg class="bar" {size} aria-hidden="true">{"".join(bars)}</svg>'
        numbers = [f"{means[name]:.1%}" if name in means else "not logged" for name in names]
        rows.append([f"{_key(i)}{escape(run.label)}", bar, *numbers])
    parts = [inside.index(name) if name in inside else None for name in names]
    heads = [_swatch(part) + escape(name.removeprefix(SHARES)) for part, name in zip(parts, names, strict=True)]
    note = "Means over the run. Communication is a part of the passes, and is measured by profiles alone."
    return _table("Shares of time", ["", "of a step", *heads], rows) + f'<p class="faint">{note}</p>'


def _swatch(part: int | None) -> str:
    if part is None:
        return ""
    return f'<svg viewBox="0 0 32 12" aria-hidden="true"><rect class="part{part % 6}" width="24" height="12"/></svg>'


def _differences(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return "<p>There is one run.</p>"
    rows = [[f"<code>{escape(key)}</code>", *map(escape, values)] for key, values in differing_keys(list(runs))]
    if not rows:
        return "<p>The configs are the same, but for the name and the folder of the run.</p>"
    return _table("Differences of the configs", _heads(runs), rows)


def _pictures(runs: Sequence[Run]) -> str:
    """The pictures of the prompts that all runs have drawn; without a script, the last ones."""
    prompts = [prompt for prompt in runs[0].pictures if all(prompt in run.pictures for run in runs)]
    others = {prompt for run in runs for prompt in run.pictures} - set(prompts)
    if not prompts:
        return "<p>No prompt was drawn by all runs.</p>" if others else "<p>No pictures were drawn.</p>"
    slider = (
        '<div id="slider" class="slider" hidden><label for="moment">Pictures after '
        '<output id="moment-said" for="moment"></output></label>'
        '<input type="range" id="moment" min="0" max="0" value="0" step="1"></div>'
    )
    cells = []
    for prompt in prompts:
        sets = [f"<div data-pictures>{_set(prompt, run)}</div>" for run in runs]
        whole = " whole" if runs[0].pictures[prompt][0].size[0] > 400 else ""
        cells.append(f'<div class="prompt{whole}"><h3>{escape(prompt)}</h3><div>{"".join(sets)}</div></div>')
    note = f'<p class="faint">{len(others)} prompts that not all runs have drawn are left out.</p>' if others else ""
    return f'{slider}<div class="prompts">{"".join(cells)}</div>{note}'


def _set(prompt: str, run: Run) -> str:
    """A run's pictures of a prompt, all but the last hidden."""
    pictures = run.pictures[prompt]
    found = []
    for i, picture in enumerate(pictures):
        places = {axis: float(run.position(picture.batch, axis)) for axis in AXES}
        data = " ".join(f'data-{axis}="{place:g}"' for axis, place in places.items())
        counted = f", {places['samples']:,.0f} samples" if SAMPLES in run.curves else ""
        caption = f"{escape(run.label)}, batch {picture.batch:,}{counted}, {places['hours']:.2g} h"
        width, height = picture.size
        found.append(
            f"<figure {data}{' hidden' if i + 1 < len(pictures) else ''}>"
            f'<img src="{picture.uri}" width="{width}" height="{height}" alt="{escape(prompt)}" decoding="async">'
            f"<figcaption>{caption}</figcaption></figure>"
        )
    return "".join(found)
