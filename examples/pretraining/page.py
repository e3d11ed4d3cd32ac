# SPDX-License-Identifier: Apache-2.0
"""Stored results: one row per run, and the pages of tables made from them.

gaps.json, tables.md       runs from fresh weights
branched.json, branched.md  branched runs (see `branching`), without step times: they share devices

The tables are a function of the rows alone; the pictures are made of the runs' folders. Runs on
different corpora stand in one file and are never compared: a corpus is its hash.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pretraining.gaps import BASELINE, OWN_SPREAD, Gap, by_name, gaps, pooled_spread
from pretraining.gaps import pair as paired
from pretraining.record import Result, without_folders
from pretraining.results import (
    PICTURES,
    draw_errors,
    draw_gaps,
    finished,
    picture,
    run_folder,
)
from pretraining.runs import RUNS

# Fields of a run that its row has if they are set.
IF_ANY = ("late", "late_at", "backwards", "perturbed", "linear", "against", "about")
DIGITS = 6  # of a loss in gaps.json: a hundredth of the smallest standard error there is

# Quartet II (arXiv 2601.22813 v2): gap of the validation loss to BF16, nats a token on C4, by the
# authors' runs at 25 and at 800 tokens a parameter.
PAPER = {
    "30M": {
        "NVIDIA": (0.0548, 0.1046),
        "NVIDIA + 4/6": (0.0565, 0.1001),
        "TetraJet-v2": (0.0541, 0.0875),
        "Quartet II": (0.0430, 0.0749),
    },
    "100M": {
        "NVIDIA": (0.0569, 0.0800),
        "NVIDIA + 4/6": (0.0518, 0.0742),
        "TetraJet-v2": (0.0554, 0.0630),
        "Quartet II": (0.0420, 0.0541),
    },
}


# ------------------------------------------------------------------------------------------ rows


def rows(folder: Path, untimed: Collection[Path] = ()) -> list[dict[str, Any]]:
    """gaps.json of the comparisons in a folder: a mapping a run.

    untimed: folders of runs whose times say nothing, because other work shared the device.
    """
    found = []
    for comparison in sorted(path for path in folder.iterdir() if path.is_dir()):
        of_one = [run.result for run in finished(comparison)]
        timed = [
            without_times(r)
            if "branch" in r.provenance or run_folder(comparison, r.name, r.seed) in untimed
            else r
            for r in of_one
        ]
        found += [row(result, timed) for result in timed]
    return found


def without_times(result: Result) -> Result:
    nan = math.nan
    return replace(result, step_seconds=nan, first_step_seconds=nan, tokens_per_second=nan)


def row(result: Result, beside: Sequence[Result]) -> dict[str, Any]:
    """beside: the runs of the same comparison, for gap and ratios."""
    baseline = [other for other in beside if other.name == BASELINE]
    found = paired([result], baseline)
    setup, data = result.setup, result.provenance["data"]
    return {
        "run": result.name,
        "recipe": recipe_of(result),
        "options": {**setup["compile_options"], **result.run["options"]},
        **{key: result.run[key] for key in IF_ANY if result.run.get(key)},
        "size": setup["size"],
        "tokens": data["tokens"],
        "epochs": data["epochs"],
        "batch": setup["batch"],
        "seq": setup["seq"],
        "seed": result.seed,
        **{key: result.provenance[key] for key in ("branch", "stem") if key in result.provenance},
        "diverged_at": result.diverged_at,
        "val_loss": None if result.diverged_at else round(result.val_loss, DIGITS),
        "gap": round(found.mean, DIGITS) if found else None,
        "step_seconds": known(result.step_seconds, 6),
        "step_ratio": ratio(result, baseline, "step_seconds"),
        "tokens_per_second": known(result.tokens_per_second),
        "peak_bytes": result.peak_bytes,
        "peak_ratio": ratio(result, baseline, "peak_bytes"),
        "first_step_seconds": known(result.first_step_seconds, 1),
        "corpus": data["corpus"],
        "corpus_name": data["name"],
        **{key: result.provenance[key] for key in ("device", "versions", "date")},
        "command": without_folders(result.provenance["command"]),
        "val_losses": [round(loss, DIGITS) for loss in result.val_losses],
    }


def recipe_of(result: Result) -> str:
    recipe = result.run["options"]["recipe"]
    return recipe if isinstance(recipe, str) else recipe.get("base", recipe.get("recipe"))


def known(value: float, digits: int | None = None) -> float | None:
    """Rounded; None for one that was not measured."""
    return round(value, digits) if math.isfinite(value) else None


def ratio(result: Result, baseline: Sequence[Result], field: str) -> float | None:
    """To the median of the baseline's runs that were measured; None where there is none."""
    values = [getattr(other, field) for other in baseline]
    measured = [value for value in values if math.isfinite(value)]
    if not measured or not statistics.median(measured):
        return None
    return known(getattr(result, field) / statistics.median(measured), 4)


def results(rows: Iterable[dict[str, Any]]) -> dict[tuple[str, int, int], list[Result]]:
    """The runs of the rows by comparison: (size, tokens, branch step or 0)."""
    found: dict[tuple[str, int, int], list[Result]] = {}
    for r in rows:
        of_table = RUNS[r["run"]].__dict__ if r["run"] in RUNS else {}
        of_run = {key: r.get(key, of_table.get(key)) for key in ("against", "about")}
        result = Result(
            run={"name": r["run"], **of_run},
            setup=r,
            seed=r["seed"],
            diverged_at=r["diverged_at"],
            val_loss=r["val_loss"],
            val_losses=r["val_losses"],
            step_seconds=r["step_seconds"],
            first_step_seconds=r["first_step_seconds"],
            tokens_per_second=r["tokens_per_second"],
            peak_bytes=r["peak_bytes"],
            provenance=r,
        )
        found.setdefault((r["size"], r["tokens"], r.get("branch", 0)), []).append(result)
    return dict(sorted(found.items(), key=lambda item: item[0][1]))


# ------------------------------------------------------------------------------------------ page


def page(rows: Sequence[dict[str, Any]]) -> str:
    """tables.md."""
    parts = [
        "# The gaps, measured",
        "Made of `gaps.json` by `python examples/pretrain.py page`, and explained in "
        "`examples/pretraining/README.md`. `runs.py` says what each run changes. Runs on different "
        "texts are not compared. A cell is empty where nothing was measured, or where other work "
        "on the device made it untrue.",
        *(part for corpus in dict.fromkeys(r["corpus"] for r in rows) for part in on(corpus, rows)),
        papers_table(),
    ]
    return "\n\n".join(parts) + "\n"


def branched_page(rows: Sequence[dict[str, Any]]) -> str:
    """branched.md."""
    parts = [
        "# The gaps of branched runs",
        "Made of `branched.json`, which has the losses, by `python examples/pretrain.py page`, "
        "and explained in `examples/pretraining/BRANCHED.md`. `plans.toml` says what each run "
        "changes. Differences are paired by stem; each has its standard error, and `none` marks "
        "one smaller than two of them.",
        *(part for corpus in dict.fromkeys(r["corpus"] for r in rows) for part in on(corpus, rows)),
    ]
    return "\n\n".join(parts) + "\n"


def on(corpus: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """The parts of the page about the runs on one corpus, by its hash."""
    own = [row for row in rows if row["corpus"] == corpus]
    compared = results(own)
    spread = spread_over_seeds(compared.values())
    sections = [section(*key, runs, spread) for key, runs in compared.items()]
    return [f"## {own[0]['corpus_name']}, {corpus[:12]}", provenance(own), *sections]


def spread_over_seeds(comparisons: Iterable[Sequence[Result]]) -> float | None:
    """The spread of the gaps to BF16, pooled over comparisons with a seed for each run."""
    pairs = []
    for runs in comparisons:
        named = by_name(runs)
        for name, of_name in named.items():
            found = paired(of_name, named.get(BASELINE, [])) if name != BASELINE else None
            pairs += [found] if found else []
    return pooled_spread(pairs)


def provenance(rows: Sequence[dict[str, Any]]) -> str:
    def all_of(key: str) -> str:
        return ", ".join(sorted({str(row[key]) for row in rows}))

    versions = sorted({f"{k} {v}" for row in rows for k, v in row["versions"].items()})
    return (
        f"{len(rows)} runs on {all_of('device')}, {all_of('date')}; {', '.join(versions)}. "
        f"The corpus's SHA-256: {all_of('corpus')}."
    )


def section(
    size: str, tokens: int, branch: int, runs: Sequence[Result], spread: float | None
) -> str:
    named = by_name(runs)
    named = {name: named[name] for name in sorted(named, key=rank)}
    against = {name: of_name[0].run["against"] or BASELINE for name, of_name in named.items()}
    wanted = [(name, BASELINE) for name in named]
    wanted += [(name, other) for name, other in against.items() if other != BASELINE]
    found = gaps(runs, wanted, spread)
    first = runs[0].setup
    title = (
        f"### Llama {size}, {tokens / 1e6:.0f}M tokens ({first['epochs']:g} epochs), "
        f"{first['batch']} x {first['seq']} a step"
    )
    columns = ["run", "stems", "gap to BF16"]
    if branch:
        title += f", branched after step {branch} of {tokens // (first['batch'] * first['seq'])}"
    else:
        columns = ["run", "seeds", "validation loss", "gap to BF16"]
        columns += ["step over BF16's", "peak over BF16's"]
    others = {name: gap for (name, other), gap in found.items() if other != BASELINE}
    if others:
        columns.append("difference")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, of_name in named.items():
        if branch and name == BASELINE:
            continue
        cells = table_row(name, of_name, found.get((name, BASELINE)))
        if others:
            gap = others.get(name)
            cells.append(f"{gap} to `{gap.against}`" if gap else "")
        lines.append(f"| {' | '.join(cells)} |")
    parts = [title, "\n".join(lines)]
    if branch:
        own = [
            gap
            for (name, other), gap in found.items()
            if against[name] == other == BASELINE != name
        ]
        parts += order_table(runs, [gap for gap in own if gap.seeds >= OWN_SPREAD])
    return "\n\n".join(parts)


def order_table(runs: Sequence[Result], found: Sequence[Gap]) -> list[str]:
    """Each run against the one with the next smaller gap to BF16; nothing for fewer than two."""
    names = [gap.run for gap in sorted(found, key=lambda gap: gap.mean)]
    steps = gaps(runs, list(zip(names[1:], names, strict=False)))
    if not steps:
        return []
    lines = ["| run | the next below | difference |", "|---|---|---|"]
    lines += [f"| `{gap.run}` | `{gap.against}` | {gap} |" for gap in steps.values()]
    return ["The order, of those with four stems or more:", "\n".join(lines)]


def rank(name: str) -> tuple[int, str]:
    """The order of runs.RUNS, then one's own."""
    return (list(RUNS).index(name), name) if name in RUNS else (len(RUNS), name)


def table_row(name: str, runs: Sequence[Result], gap: Gap | None) -> list[str]:
    """The cells of a run, up to its difference to another one than BF16."""
    diverged = [f"NaN at step {r.diverged_at} (seed {r.seed})" for r in runs if r.diverged_at]
    losses = [r.val_loss for r in runs if not r.diverged_at]
    loss = f"{statistics.fmean(losses):.4f}" if losses else ""
    shown = "; ".join([*([str(gap)] if gap and name != BASELINE else []), *diverged])

    def median(field: str) -> str:
        values = [r.setup[field] for r in runs if r.setup[field] is not None]
        return f"{statistics.median(values):.2f}" if values else ""

    if branched(runs):
        return [f"`{name}`", str(len(runs)), shown]
    ratios = [median("step_ratio"), median("peak_ratio")]
    return [f"`{name}`", str(len(runs)), loss, shown, *ratios]


def branched(runs: Sequence[Result]) -> bool:
    return "branch" in runs[0].setup


def papers_table() -> str:
    lines = [
        "## The papers' table",
        "",
        "Quartet II (arXiv 2601.22813 v2), gap to BF16 on C4 by the authors' runs, at 25 and 800 "
        "tokens a parameter:",
        "",
        "| recipe | 30M, 25 | 30M, 800 | 100M, 25 | 100M, 800 |",
        "|---|---|---|---|---|",
    ]
    for name in PAPER["30M"]:
        values = [f"{gap:.4f}" for size in PAPER for gap in PAPER[size][name]]
        lines.append(f"| {name} | {' | '.join(values)} |")
    return "\n".join(lines)


def write(into: Path, folder: Path | None, untimed: Collection[str] = ()) -> list[Path]:
    """Write the rows and the pictures of the comparisons in ``folder``, and the pages; returns the
    pages.

    A row that is there of the same run is replaced; the others stay. Without a folder the pages
    alone, of the rows that are there.

    untimed: runs whose times are left out, as COMPARISON/RUN-seedN. Raises ValueError for one that
    is not in the folder, or has not ended.
    """
    into.mkdir(parents=True, exist_ok=True)
    if folder is not None:
        new = rows(folder, folders_of(untimed, folder))
        add([row for row in new if "branch" not in row], into / "gaps.json")
        add([row for row in new if "branch" in row], into / "branched.json")
        for comparison in sorted(p for p in folder.iterdir() if p.is_dir()):
            add_pictures(comparison, into)
    elif untimed:
        raise ValueError("--untimed: the runs it names are in a folder; give that as --of")
    pages = {"gaps.json": ("tables.md", page), "branched.json": ("branched.md", branched_page)}
    written = []
    for name, (title, made) in pages.items():
        if (into / name).exists():
            text = made(json.loads((into / name).read_text(encoding="utf-8")))
            (into / title).write_text(text, encoding="utf-8")
            written.append(into / title)
    return written


def add_pictures(comparison: Path, into: Path) -> None:
    """Adds the pictures of a comparison. From fresh weights: those that exist. Branched, with many
    runs: the gaps of all comparable rows, and the curves of the runs whose gap to BF16 is of
    interest, if BF16 is one of its runs."""
    name = comparison.name
    done = finished(comparison)
    if not done or "branch" not in done[0].result.provenance:
        for kind in PICTURES:
            if (comparison / f"{kind}.png").exists():
                shutil.copy(comparison / f"{kind}.png", into / f"{kind}-{name}.png")
        return
    own = row(done[0].result, [])
    there = json.loads((into / "branched.json").read_text(encoding="utf-8"))
    like = results(r for r in there if r["corpus"] == own["corpus"])
    every = like[own["size"], own["tokens"], own["branch"]]
    found = gaps(every, [(run, BASELINE) for run in by_name(every) if run != BASELINE])
    title = f"Llama {own['size']}, branched after step {own['branch']}"
    if found:
        height = max(5.0, 0.2 * len(found))  # a line for each run
        picture(draw_errors, list(found.values()), title, into / f"errors-{name}.png", height)
    few = [run for run in done if run.result.run["against"] == BASELINE]
    if {run.result.name for run in few} > {BASELINE}:
        picture(draw_gaps, few, title, into / f"gaps-{name}.png")


def add(new: Sequence[dict[str, Any]], file: Path) -> None:
    """Put rows into a file, in place of those of the same runs (of the same stem, if any)."""
    if not new:
        return

    def run_of(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(k) for k in ("corpus", "size", "tokens", "stem", "run", "seed"))

    replaced = {run_of(row) for row in new}
    there = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    others = [row for row in there if run_of(row) not in replaced]
    text = ",\n".join(json.dumps(row) for row in [*others, *new])
    file.write_text(f"[\n{text}\n]\n", encoding="utf-8")


def folders_of(untimed: Collection[str], folder: Path) -> list[Path]:
    """The folders of the runs that are named, which must have ended."""
    ended = sorted(str(f.parent.relative_to(folder)) for f in folder.glob("*/*/result.json"))
    if unknown := [name for name in untimed if name not in ended]:
        raise ValueError(
            f"--untimed {','.join(unknown)}: no run of {folder} that ended; those are "
            f"{', '.join(ended)}"
        )
    return [folder / name for name in untimed]
