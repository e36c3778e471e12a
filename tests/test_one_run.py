"""tools/compare_logs.py over a single run, its step lines as CSV, and their bad input."""

import csv
import io
import os
import re

import pytest
from pytest import approx

from test_compare_logs import (
    as_text,
    error_of,
    one_run,
    png_size,
    run_tool,
    talk_log,
    write_folder,
)


@pytest.fixture
def log(tmp_path):
    file = tmp_path / "a log.txt"
    file.write_text(as_text(one_run(world=4, busy=[1, 1, 1.5])))
    return file


def test_one_run_has_table_split_and_verdict(log):
    out, _ = run_tool(log)
    assert re.search(r"^\| +\| +a log \|$", out, re.MULTILINE)
    for row in (r"processes on nodes +\| +4 on 2", r"- data wait +\| +1.0 ms", "loss, epoch 2"):
        assert re.search(rf"^\| {row}", out, re.MULTILINE), row
    assert "\n\nVerdict\n-------\n\na log: Over TCP on veth0" in out and "Bound by compute" in out
    # nothing that takes a second run
    assert not re.search("against|times as long|The model against|Scaling", out)


def test_a_run_is_named_after_its_folder_or_file(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "eth", one_run())
    (tmp_path / "x=y.log").write_text(as_text(one_run()))
    monkeypatch.chdir(tmp_path)
    for path, name in (
        ("eth", "eth"),
        ("eth/", "eth"),
        (folder / "node0.log", "eth"),
        ("x=y.log", "x=y"),  # that file is there, so that = parts nothing
        ("x=eth", "x"),
    ):
        out, _ = run_tool(path)
        assert out.splitlines()[0].split() == ["|", "|", name, "|"], path
    monkeypatch.chdir(folder)
    assert " eth |" in run_tool(".")[0]
    assert re.search(r"\| +eth \| +x=y \|", run_tool(folder, "../x=y.log")[0])


def read_csv(file):
    return list(csv.DictReader(io.StringIO(file.read_text(), newline="")))


def test_step_lines_as_csv(log, tmp_path):
    """Of all runs, in the order of time; a line of the original demo lacks its speed."""
    talk, table = tmp_path / "talk.log", tmp_path / "steps.csv"
    talk.write_text(talk_log(60.0).replace("Loss: 1.0800", "Loss: nan"))
    (tmp_path / "failed.log").write_text("one without step lines is only left out\n")
    runs = [f'odd, "name"={log}', talk, tmp_path / "failed.log"]
    run_tool(*runs, "--csv", table, "--force", "--steps", 1850, code=1)
    text = table.read_bytes()
    assert text.startswith(b"run,rank,epoch,step,loss,img_per_s,data_ms,step_ms\n")
    assert b"\r" not in text
    rows = read_csv(table)
    ours, theirs = rows[:20], rows[20:]
    assert [(row["step"], row["rank"]) for row in ours[:5]] == [
        *(("1", str(rank)) for rank in range(4)),
        ("6", "0"),
    ]
    assert {row["run"] for row in ours} == {'odd, "name"'}
    assert float(ours[-1]["loss"]) == approx(4.5 - 2 + 0.03)
    # 16 images in 1 + 140 + 101 ms
    assert [float(ours[0][name]) for name in ("img_per_s", "data_ms", "step_ms")] == [66.1, 1, 242]
    assert len(theirs) == 8 and {row["run"] for row in theirs} == {"talk"}
    first = theirs[0]
    assert (first["step"], first["loss"], first["img_per_s"], first["step_ms"]) == (
        *("906", "nan"),
        *("", ""),
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no.log"], "no.log: no such file or folder; give a log, a run's folder, or NAME=PATH"),
        (["=a log.txt"], "=a log.txt: write NAME=PATH"),
        (["a log.txt", "other/a log.txt"], "a run is named a log already: write NAME=PATH"),
        (["none.log", "--csv", "x.csv"], "--csv x.csv: no step line in any of the logs"),
        (["a=.", "b=."], "no node0.log"),
        (["a log.txt", "--steps", "many"], "--steps many"),
        (["a log.txt", "--steps", "0"], "--steps 0"),
        (["a log.txt", "--link_gbps", "c=1"], "no run is named c"),
        (["a log.txt", "--latency_us", "nan"], "--latency_us nan"),
        *(
            (["a log.txt", option, "no/x"], f"{option} no/x: no such folder")
            for option in ("--csv", "--json", "--plot", "--report")
        ),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(log, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "none.log").write_text("nothing of ours\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / log.name).write_text(log.read_text())
    before = sorted(os.walk(tmp_path))
    assert said in error_of(*words)
    assert sorted(os.walk(tmp_path)) == before


def test_damaged_run_alone_is_scored_by_nothing(log):
    log.write_text(log.read_text()[:4000])
    out, _ = run_tool(log, code=1)
    assert "INCOMPLETE" in out and "a log: incomplete, not scored: " in out


# --- the picture --------------------------------------------------------------------------------


def test_picture_of_one_run(log, tmp_path, monkeypatch):
    """Parts of a step by rank, the job's images/s, the loss with its mean in each epoch."""
    plot = pytest.importorskip("analysis.plot", exc_type=ImportError)
    picture, drawn = tmp_path / "run.png", []
    make = plot.Figure
    monkeypatch.setattr(plot, "Figure", lambda **how: drawn.append(make(**how)) or drawn[0])
    run_tool(log, "--plot", picture)
    assert png_size(picture) == (1920, 624)
    figure = drawn[0]
    assert figure.get_suptitle() == "a log: 4 processes on 2 nodes"
    split, speed, loss = figure.axes
    assert [tick.get_text() for tick in split.get_xticklabels()] == [f"rank {n}" for n in range(4)]
    # compute of rank 2 is 140 ms * 1.5
    assert [bar.get_height() for bar in split.containers[0]] == approx([140, 140, 210, 140])
    named = [[line.get_label() for line in axis.get_lines()] for axis in (speed, loss)]
    # 64 images in 242 ms
    assert named[0] == ["images/s", "mean 264.5"]
    assert named[1][0] == "each rank" and named[1][4:6] == ["mean over ranks", "mean of an epoch"]
    epochs = [line.get_xydata().tolist() for line in loss.get_lines()[5:]]
    assert epochs == [
        [[0, approx(3.015)], [10, approx(3.015)]],
        [[10, approx(2.015)], [20, approx(2.015)]],
    ]


@pytest.mark.parametrize(
    "text",
    [as_text(one_run(world=1, nodes=1)), talk_log(60.0), "nothing\n", as_text(one_run())[:4000]],
    ids=["one process", "talk", "nothing", "cut"],
)
def test_picture_of_a_run_that_says_less(tmp_path, text):
    pytest.importorskip("matplotlib")
    (tmp_path / "run.log").write_text(text)
    code = int("Cleanup" not in text)
    run_tool(tmp_path / "run.log", "--plot", tmp_path / "run.png", code=code)
    assert png_size(tmp_path / "run.png") == (1920, 624)
