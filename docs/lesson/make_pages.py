#!/usr/bin/env python3
"""Writes the lesson's notebook, from its pages and programs, and draws its pictures:

python docs/lesson/make_pages.py    # needs matplotlib
"""

from __future__ import annotations

import json
import os
import re
from base64 import b64encode
from io import BytesIO
from pathlib import Path

FOLDER = Path(__file__).resolve().parent

# ---- The notebook

INTRODUCTION = """# The lesson as a notebook

It needs PyTorch and no GPU. On Colab, upload this file.
`docs/lesson/make_pages.py` writes it, from the pages and programs of the lesson.

A notebook is one process, and DDP needs several. So a cell with `%%writefile` writes a program,
and a cell with `!` starts it. Run all cells from the first one on.

- You write your program in the cell that begins with `%%writefile mine.py`. Change it, run it,
  then run the next cell.
- In an experiment, a cell with `change` writes a changed copy. There is nothing to undo."""
CHANGE = '''from pathlib import Path


def change(program, old, new):
    """Writes changed_plain.py or changed_ddp.py: the program with `new` in place of `old`."""
    text = Path(program).read_text()
    assert text.count(f"\\n{old}\\n") == 1, f"not once in {program}: {old}"
    Path(f"changed_{program}").write_text(text.replace(f"\\n{old}\\n", f"\\n{new}\\n"))'''
PROGRAM = re.compile(r"\b(?:plain|ddp)\.py")


def write(name: str, text: str) -> tuple[str, str]:
    return "code", f"%%writefile {name}\n{text.rstrip()}"


def run(commands: str, changed: set[str]) -> list[tuple[str, str]]:
    """Cells for the commands of a block: of programs that were changed, the changed ones."""
    commands = PROGRAM.sub(
        lambda found: f"changed_{found[0]}" if found[0] in changed else found[0], commands
    )
    plain, ddp = ((FOLDER / name).read_text() for name in ("plain.py", "ddp.py"))
    if commands.startswith("cp plain.py mine.py\n"):
        return [write("mine.py", plain), *run(commands.partition("\n")[2], changed)]
    before = [write("ddp.py", ddp)] if commands.startswith("diff plain.py ddp.py\n") else []
    return [*before, ("code", "\n".join(f"!{line}" for line in commands.splitlines()))]


def edit(diff: str, programs: set[str]) -> tuple[str, str]:
    """A cell that makes the change of a diff."""
    old, new = (
        "\n".join(line[1:] for line in diff.splitlines() if line[0] != other) for other in "+-"
    )
    # As ruff formats a notebook.
    old, new = (text.replace("\n", "\\n") for text in (old, new))
    old, new = (f"'{text}'" if '"' in text else f'"{text}"' for text in (old, new))
    calls = (f'change(\n    "{name}",\n    {old},\n    {new},\n)' for name in sorted(programs))
    return "code", "\n".join(calls)


def cells() -> list[tuple[str, str]]:
    """Kind and text of each cell of the notebook."""
    made = [("markdown", INTRODUCTION)]
    made += [write(name, (FOLDER / name).read_text()) for name in ("plain.py", "check.py")]
    made.append(("code", CHANGE))
    pages = [(FOLDER / name).read_text() for name in ("README.md", "homework.md")]
    pages[0] = re.sub(r"## Set-up\n.*?(?=## First run)", "", pages[0], flags=re.DOTALL)
    terminals = r"In one terminal:(.*?)It waits for node 1. In a second terminal:"
    pages[1] = re.sub(terminals, r"One cell starts both nodes:\1", pages[1], flags=re.DOTALL)
    nodes, changed = "", set()
    for part in re.split(
        r"^(```\w+\n.*?^```\n)", "\n".join(pages), flags=re.DOTALL | re.MULTILINE
    ):
        _, _, text = part.removeprefix("```").removesuffix("```\n").partition("\n")
        if part.startswith("```bash\ntorchrun --nnodes=2"):  # both nodes in one cell
            nodes += f"{text.strip()} &\n"
            if nodes.count("&") == 2:
                made.append(("code", f"%%bash\n{nodes}wait"))
        elif part.startswith("```bash"):
            made += run(text, changed)
        elif part.startswith("```diff"):
            programs = {*PROGRAM.findall(made[-1][1].rpartition("\n\n")[2])}
            changed |= programs
            made.append(edit(text, programs))
        elif part.startswith("```python"):
            made.append(write("calls.py", text))
        elif part.strip():
            changed = set() if re.search(r"^#", part, re.MULTILINE) else changed
            if made[-1][0] == "markdown":
                made[-1] = "markdown", f"{made[-1][1]}\n\n{part.strip()}"
            else:
                made.append(("markdown", part.strip()))
    return made


def ring_table() -> str:
    """ring.png as a table."""
    lines = [f"| | {' | '.join(f'rank {rank}' for rank in range(RANKS))} |", "|---" * 4 + "|"]
    for turn, (title, words, arrived) in enumerate(ring_states()):
        for rank, piece in arrived:
            words[rank][piece] = f"**{words[rank][piece]}**"
        what = ("", ": add", ": add", ": keep", ": keep")[turn]
        lines.append(f"| {title}{what} | {' | '.join(map(', '.join, words))} |")
    lines += ["", "Turns that add are the *reduce-scatter*, turns that keep the *all-gather*."]
    return "\n".join([*lines, "Bold: what has just arrived from the previous rank."])


NODES_TABLE = """| | ranks 0 and 1 are node 0; ⇒ crosses the cable | each node sends |
|---|---|---|
| ring | 0 → 1 ⇒ 2 → 3 ⇒ 0 | 6 × 1/4 = 1.5 × the gradients |
| tree, in small pieces | 0 ↔ 1 ⇔ 2 ↔ 3 | 1 × the gradients |"""


def notebook() -> str:
    """The text of lesson.ipynb: cells without output, in format 4.5.

    To keep the file small, it has tables in place of two pictures, and one string for each cell.
    """
    tables = {"ring.png": ring_table(), "nodes.png": NODES_TABLE}
    found = []
    for number, (kind, text) in enumerate(cells()):
        cell: dict[str, object] = {"cell_type": kind, "id": f"cell{number}", "metadata": {}}
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        for name, table in tables.items():
            text = re.sub(rf"!\[[^]]*\]\({name}\)", table, text)
        if pictures := re.findall(r"\]\((\w+\.png)\)", text):
            data = {name: b64encode((FOLDER / name).read_bytes()).decode() for name in pictures}
            cell["attachments"] = {name: {"image/png": data[name]} for name in pictures}
            text = re.sub(r"\]\((\w+\.png)\)", r"](attachment:\1)", text)
        cell["source"] = text
        found.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    pages = {
        "cells": found,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(pages, indent=1, ensure_ascii=False) + "\n"


# ---- The pictures

# Okabe and Ito's colours, light enough for black text. The letters say the same as the colours.
PIECES = {"a": "#F0E442", "b": "#9AD4F5", "c": "#F4B183"}
INK, CABLE = "#222222", "#B33C00"
RANKS = 3


def ring_states() -> list[tuple[str, list[list[str]], list[tuple[int, int]]]]:
    """Of each moment: title, what each rank has of each piece, what has arrived (rank, piece)."""
    parts = [[{rank} for _ in PIECES] for rank in range(RANKS)]  # whose gradients a piece has

    def state(title: str, arrived: list[tuple[int, int]]) -> None:
        words = []
        for row in parts:
            names = zip(PIECES, row, strict=True)
            whole = [
                name.upper()
                if len(whose) == RANKS
                else "+".join(f"{name}{rank}" for rank in sorted(whose))
                for name, whose in names
            ]
            words.append(whole)
        states.append((title, words, arrived))

    states: list[tuple[str, list[list[str]], list[tuple[int, int]]]] = []
    state("at first", [])
    for turn in range(2 * (RANKS - 1)):
        # Rank r sends piece r - turn to the next rank: first it is added there, then it is kept.
        sent = [((rank + 1) % RANKS, (rank - turn) % RANKS) for rank in range(RANKS)]
        whose = [set(parts[(rank - 1) % RANKS][piece]) for rank, piece in sent]
        for (rank, piece), ranks in zip(sent, whose, strict=True):
            parts[rank][piece] |= ranks
        state(f"turn {turn + 1}", sent)
    return states


def draw_ring(path: Path) -> None:
    """The pieces of three ranks, from turn to turn. An arrow is what a rank sends."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    states = ring_states()
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    axes = figure.subplots()
    left = [rank * 4.2 for rank in range(RANKS)]
    for rank in range(RANKS):
        axes.text(left[rank] + 1.5, 0.75, f"rank {rank}", ha="center", fontsize=13, weight="bold")
    for row, (title, words, arrived) in enumerate(states):
        y = -1.7 * row
        axes.text(-0.35, y, title, ha="right", va="center", fontsize=12)
        for rank in range(RANKS):
            for piece, color in enumerate(PIECES.values()):
                new = (rank, piece) in arrived
                whole = words[rank][piece].isupper()
                box = Rectangle(
                    (left[rank] + piece, y - 0.4),
                    1,
                    0.8,
                    facecolor=color if whole or new else "white",
                    edgecolor=INK,
                    linewidth=2.2 if new else 0.8,
                )
                axes.add_patch(box)
                axes.text(
                    left[rank] + piece + 0.5,
                    y,
                    words[rank][piece],
                    ha="center",
                    va="center",
                    fontsize=13 if whole else 9.5,
                    weight="bold" if whole else "normal",
                )
        for rank, piece in arrived:
            before = (rank - 1) % RANKS
            axes.annotate(
                "",
                xy=(left[rank] + piece + 0.5, y + 0.42),
                xytext=(left[before] + piece + 0.5, y + 1.28),
                arrowprops={"arrowstyle": "->", "color": "#555555", "linewidth": 1.3},
            )
    end = left[-1] + 3.3
    for first, last, text in (
        (1, 2, "reduce-scatter:\nadd what arrives"),
        (3, 4, "all-gather:\nkeep what arrives"),
    ):
        top, bottom = -1.7 * first + 0.4, -1.7 * last - 0.4
        axes.plot(
            [end, end + 0.2, end + 0.2, end], [top, top, bottom, bottom], color=INK, linewidth=1
        )
        axes.text(end + 0.4, (top + bottom) / 2, text, va="center", fontsize=12)
    axes.set(xlim=(-1.8, end + 3.6), ylim=(-1.7 * (len(states) - 1) - 0.6, 1.2), aspect="auto")
    axes.axis("off")
    save(figure, path)


def draw_nodes(path: Path) -> None:
    """What crosses the cable between two nodes of two ranks each, in a ring and in a tree."""
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch

    places = [(0.5, 1.6), (0.5, 0.2), (3.5, 0.2), (3.5, 1.6)]  # of ranks 0 to 3
    ring = [(0, 1), (1, 2), (2, 3), (3, 0)]
    tree = [(0, 1), (1, 0), (3, 2), (2, 3), (1, 2), (2, 1)]
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axes, title, hops in zip(
        figure.subplots(1, 2),
        ("Ring: 6 turns of a quarter of the gradients", "Tree: small pieces, up and down at once"),
        (ring, tree),
        strict=True,
    ):
        for node, x in ((0, -0.25), (1, 2.75)):
            axes.add_patch(
                FancyBboxPatch(
                    (x, -0.3),
                    1.5,
                    2.4,
                    boxstyle="round,pad=0.1",
                    facecolor="#EEEEEE",
                    edgecolor=INK,
                )
            )
            axes.text(x + 0.75, 2.35, f"node {node}", ha="center", fontsize=12)
        for rank, (x, y) in enumerate(places):
            axes.text(
                x,
                y,
                f"rank {rank}",
                ha="center",
                va="center",
                fontsize=11,
                bbox={"boxstyle": "round", "facecolor": "white", "edgecolor": INK},
            )
        for begin, end in hops:
            crosses = begin // 2 != end // 2
            both = (end, begin) in hops
            axes.annotate(
                "",
                xy=places[end],
                xytext=places[begin],
                arrowprops={
                    "arrowstyle": "->",
                    "color": CABLE if crosses else INK,
                    "linewidth": 2.6 if crosses else 1.4,
                    "shrinkA": 24,
                    "shrinkB": 24,
                    "connectionstyle": "arc3,rad=0.18" if both else "arc3",
                },
            )
        axes.set_title(title, fontsize=12)
        axes.set(xlim=(-0.5, 4.5), ylim=(-0.5, 2.7))
        axes.axis("off")
    ringed, treed = figure.axes
    ringed.text(
        2,
        0.9,
        "each way:\n6 × 1/4 =\n1.5 × the\ngradients",
        ha="center",
        va="center",
        fontsize=11,
        color=CABLE,
    )
    treed.text(
        2, 1.1, "each way:\n1 × the\ngradients", ha="center", va="center", fontsize=11, color=CABLE
    )
    save(figure, path)


def step_times() -> dict[str, list[tuple[str, float, float]]]:
    """Of each lane of the picture of a step: its parts, each with begin and length."""
    forward, buckets, transfer, update = 2.0, (1.3, 1.4, 1.3), 1.5, 0.8
    slower = (1.0, 1.3)  # how many times as long each rank computes
    ready = [
        [factor * (forward + sum(buckets[: n + 1])) for n in range(len(buckets))]
        for factor in slower
    ]
    ends, sent = 0.0, []
    for n in range(len(buckets)):  # a bucket starts when the last rank has it
        begin = max(ends, *(own[n] for own in ready))
        ends = begin + transfer
        sent.append((f"bucket {n + 1}", begin, transfer))
    lanes: dict[str, list[tuple[str, float, float]]] = {}
    for rank, factor in enumerate(slower):
        parts = [("forward", 0.0, factor * forward)]
        for n, length in enumerate(buckets):
            parts.append((f"backward {n + 1}", ready[rank][n] - factor * length, factor * length))
        parts.append(("exposed", ready[rank][-1], ends - ready[rank][-1]))
        parts.append(("optimizer", ends, update))
        lanes[f"rank {rank} computes"] = parts
    lanes["all-reduce"] = sent
    return lanes


COLORS = {"forward": PIECES["b"], "backward": PIECES["a"], "bucket": PIECES["c"]}


def draw_bars(
    axes, y: float, parts: list[tuple[str, float, float]], names: dict[str, str]
) -> None:
    """A lane of a time line. `names`: what stands in a part, in place of its own name."""
    for name, begin, length in parts:
        exposed = name == "exposed"
        axes.barh(
            y,
            length,
            left=begin,
            height=0.7,
            color=COLORS.get(name.split()[0], "white" if exposed else "#DDDDDD"),
            edgecolor=CABLE if exposed else INK,
            hatch="///" if exposed else None,
            linewidth=0.8,
        )
        text = axes.text(
            begin + length / 2,
            y,
            names.get(name, name),
            ha="center",
            va="center",
            fontsize=10.5,
        )
        if exposed:
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1.5})


def draw_step(path: Path) -> None:
    """A step of two ranks, of which one is slower."""
    from matplotlib.figure import Figure

    lanes = step_times()
    figure = Figure(figsize=(9, 3.1), layout="constrained")
    axes = figure.subplots()
    names = {f"backward {n}": f"backward,\nbucket {n}" for n in (1, 2, 3)}
    names |= {f"bucket {n}": f"bucket {n}" for n in (1, 2, 3)}
    names["exposed"], names["optimizer"] = "exposed", "opti-\nmizer"
    for row, parts in enumerate(lanes.values()):
        draw_bars(axes, -row, parts, names)
    for _, begin, _ in lanes["all-reduce"]:  # when both ranks have the bucket
        axes.plot([begin, begin], [-1.65, -0.62], color=CABLE, linewidth=1.3, linestyle=":")
    axes.set_yticks([-row for row in range(len(lanes))], list(lanes), fontsize=12)
    axes.set_xticks([])
    axes.set_xlabel("time", loc="right", fontsize=12)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)
    save(figure, path)


def pipeline(batches: int) -> list[list[tuple[str, float, float]]]:
    """The parts of two devices if a batch of length 4 is cut into so many."""
    length, lanes = 4 / batches, [[], []]
    for n in range(batches):
        for device in (0, 1):
            lanes[device].append((f"forward {n + 1}", (n + device) * length, length))
            begin = (batches + 1 + n + (1 - device)) * length
            lanes[device].append((f"backward {n + 1}", begin, length))
    return lanes


def draw_pipeline(path: Path) -> None:
    """Two devices with a half of the model each: with the whole batch, and with four parts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, batches, title in zip(
        figure.subplots(2, 1, sharex=True),
        (1, 4),
        ("The whole batch: each device works half of the time", "Four parts: 8 of 10 turns"),
        strict=True,
    ):
        parts = pipeline(batches)
        whole = {"forward 1": "forward", "backward 1": "backward"}
        short = {name: name.split()[1] for lane in parts for name, _, _ in lane}
        for device, lane in enumerate(parts):
            draw_bars(axes, -device, lane, whole if batches == 1 else short)
        axes.set_title(title, fontsize=12, loc="left")
        axes.set_yticks([0, -1], ["device 0", "device 1"], fontsize=12)
        axes.set_xticks([])
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.tick_params(length=0)
    axes.set_xlabel("time", loc="right", fontsize=12)
    save(figure, path)


def save(figure, path: Path) -> None:
    """With 16 colours, which makes the file four times smaller."""
    from PIL import Image

    drawn = BytesIO()
    figure.savefig(drawn, dpi=90)
    picture = Image.open(drawn).convert("RGB").quantize(16, kmeans=1, dither=Image.Dither.NONE)
    picture.save(path, optimize=True)


def main() -> None:
    os.environ["MPLBACKEND"] = "Agg"  # matplotlib may lack that of a notebook
    draw_ring(FOLDER / "ring.png")
    draw_nodes(FOLDER / "nodes.png")
    draw_step(FOLDER / "step.png")
    draw_pipeline(FOLDER / "pipeline.png")
    (FOLDER / "lesson.ipynb").write_text(notebook())  # with the pictures


if __name__ == "__main__":
    main()
