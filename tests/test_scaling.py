"""Runs with different numbers of processes, made up with known answers: speed-up, efficiency, what
eats the rest, what is refused. The logs are made up (support/made_logs.py).
"""

from __future__ import annotations

import csv
import json
import re

import pytest

from support.made_logs import as_text, ethernet, one_run
from test_compare_logs import START, png_size, run_tool

STRONG, WEAK = {"batch": 64}, {"each": 16}


def made(processes, step, *, batch=None, each=None, **options):
    """The text of a run; `step` is data wait, compute and exposed communication in ms."""
    per_process = each or batch // processes
    facts = {"images": 6400, "threads": 1} | options.pop("facts", {})
    kind = options.pop("kind", "CPU")
    times = dict(zip(("data_ms", "compute_ms", "exposed_ms"), step, strict=True))
    options = {"nodes": 1, "probe": False, "epochs": 1} | options
    lines = one_run(world=processes, per_process=per_process, facts=facts, **times, **options)
    return as_text(lines, kind)


@pytest.fixture
def run(tmp_path):
    """run(*options, name=text, ...) -> what compare_logs.py prints of logs of these texts."""

    def compare(*options, code=0, **texts):
        words = []
        for name, text in texts.items():
            file = tmp_path / f"{name}.log"
            file.write_text(text)
            words.append(f"{name}={file}")
        return run_tool(*words, *options, code=code)[code == 2]  # the error, if it is one

    return compare


def rows(out):
    """The cells of the table by their title."""
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines()]
    return {line[0]: line[1:] for line in cells if len(line) > 2}


# Name: the runs; speed-ups over the first; efficiencies; what is said of each, in this order.
ANSWERS = {
    "strong": (
        {
            "p1": made(1, (4, 316, 0), **STRONG),
            "p2": made(2, (2, 158, 17.8), **STRONG),
            "p4": made(4, (31.7, 75, 0), **STRONG),
            "p8": made(8, (0.5, 79.5, 0), **STRONG),
        },
        ["1.80", "3.00", "4.00"],
        ["90%", "75%", "50%"],
        [
            "Strong scaling: a step has 64 images in every run, so each process gets fewer of "
            "them. The base is p1, with 1 process.",
            "p2: 1.80 times the images/s of p1 with 2 times the processes: an efficiency of 90%. "
            "A step is 17.8 ms longer than the ideal 160 ms. What eats the rest: 100% (17.8 ms) "
            "is exposed communication.",
            "p4: 3.00 times the images/s of p1 with 4 times the processes: an efficiency of 75%. "
            "A step is 26.7 ms longer than the ideal 80.0 ms. What eats the rest: 30.7 ms is "
            "data wait; compute is 4.0 ms shorter than ideal.",
            "p8: 4.00 times the images/s of p1 with 8 times the processes: an efficiency of 50%. "
            "A step is 40.0 ms longer than the ideal 40.0 ms. What eats the rest: 100% (40.0 ms) "
            "is compute that does not shrink with the batch (a step's fixed work, small batches, "
            "or cores that other processes use, for example).",
        ],
    ),
    "strong without loss": (
        {"p1": made(1, (4, 316, 0), **STRONG), "p2": made(2, (2, 158, 0), **STRONG)},
        ["2.00"],
        ["100%"],
        ["an efficiency of 100%. A step takes as long as is ideal."],
    ),
    "strong, accumulated": (
        {
            "p1": made(1, (4, 316, 0), **STRONG, facts={"accumulate_steps": 4}),
            "p2": made(2, (2, 158, 40), **STRONG, facts={"accumulate_steps": 2}),
        },
        ["1.60"],
        ["80%"],
        [
            "Strong scaling",
            "100% (40.0 ms) is exposed communication. (accumulate_steps is 4 in p1 and 2 here.)",
        ],
    ),
    "weak": (
        {
            "p1": made(1, (4, 96, 0), **WEAK),
            "p2": made(2, (4, 96, 25), **WEAK),
            "p4": made(4, (4, 121, 75), **WEAK),
        },
        ["1.60", "2.00"],
        ["80%", "50%"],
        [
            "Weak scaling: each process has 16 images in a step in every run. The global batch "
            "grows, so the models train differently; only the speed is compared.",
            "p2: 1.60 times the images/s of p1 with 2 times the processes: an efficiency of 80%. "
            "A step is 25.0 ms longer than the ideal 100 ms. What eats the rest: 100% (25.0 ms) "
            "is exposed communication.",
            "p4: 2.00 times",
            "75% (75.0 ms) is exposed communication, 25% (25.0 ms) is compute, which takes longer "
            "for the same images (processes share cores and memory, for example).",
        ],
    ),
    "a base of 2": (
        {
            "two": made(2, (2, 90, 8), batch=60, kind="GPU"),
            "six": made(6, (2, 30, 8), batch=60, kind="GPU"),
        },
        ["2.50"],
        ["83%"],
        [
            "The base is two, with 2 processes.",
            "six: 2.50 times the images/s of two with 3 times the processes: an efficiency of "
            "83%. A step is 6.7 ms longer than the ideal 33.3 ms. What eats the rest: 80% "
            "(5.3 ms) is exposed communication that does not shrink with the batch, 20% (1.3 ms) "
            "is data wait.",
        ],
    ),
    "a speed-up below 1": (
        {"p1": made(1, (4, 96, 0), **STRONG), "p2": made(2, (2, 48, 75), **STRONG)},
        ["0.80"],
        ["40%"],
        [
            "p2: 0.80 times the images/s of p1 with 2 times the processes, slower than its base: "
            "an efficiency of 40%. A step is 75.0 ms longer than the ideal 50.0 ms. What eats "
            "the rest: 100% (75.0 ms) is exposed communication."
        ],
    ),
    "an efficiency above 100%": (
        {"p1": made(1, (80, 120, 0), **STRONG), "p2": made(2, (10, 60, 10), **STRONG)},
        ["2.50"],
        ["125%"],
        [
            "an efficiency of 125%. A step is 20.0 ms shorter than the ideal 100 ms. What is "
            "saved: 30.0 ms is data wait; exposed communication is 10.0 ms longer than "
            "ideal. An efficiency above 100% usually means that something held up p1, "
            "here its data wait."
        ],
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_speed_up_and_what_eats_the_rest(run, name):
    texts, speed_ups, efficiencies, said = ANSWERS[name]
    out = run(**texts)
    base, *_ = texts
    table = rows(out)
    assert table["speed-up"] == ["base", *(f"{number} over {base}" for number in speed_ups)]
    assert table["efficiency"] == ["-", *efficiencies]
    place = 0
    for words in said:
        assert words in out[place:], out
        place = out.index(words, place)
    assert "wall time" in table
    assert all((row in table) == (name != "weak") for row in ("loss, epoch 1", "top-1 at the end"))
    assert ("times as long as" in out) == (name != "weak")


def test_images_per_second_are_those_of_a_mean_step(run):
    """Not the Summary's own, which are of all steps, warm-up too."""
    texts = {f"p{n}": made(n, (0, 320 / n, 0), **STRONG, summary={"img_per_s": n}) for n in (1, 2)}
    table = rows(run(**texts))
    assert table["img/s of a mean step"] == ["200.0", "400.0"] and "img/s, job" not in table


def test_the_base_is_the_lower_median_of_the_runs_with_the_fewest_processes(run):
    steps = {"a": 300, "b": 320, "c": 340, "d": 330}  # by images/s: c, d, b, a
    texts = {name: made(1, (0, step, 0), **STRONG) for name, step in steps.items()}
    table = rows(out := run(p2=made(2, (0, 165, 0), **STRONG), **texts))
    assert "The base is d, with 1 process, by its images/s the median of 4 such runs." in out
    assert "a: a repeat, with 1.10 times the images/s of d.\n" in out
    assert table["speed-up"] == [
        "2.00 over d",
        *(f"{330 / steps[x]:.2f} over d" for x in "abc"),
        "base",
    ]


def test_each_of_two_networks_has_its_own_base(run):
    def over(name, processes, step):
        return made(
            processes, step, **STRONG, nodes=2, probe=True, interfaces=ethernet(10, 9.0, name)
        )

    texts = {
        "eth2": over("eth0", 2, (0, 100, 60)),
        "ib2": over("ib0", 2, (0, 100, 20)),
        "eth4": over("eth0", 4, (0, 50, 110)),
        "ib4": over("ib0", 4, (0, 50, 30)),
    }
    out = run(**texts)
    assert rows(out)["speed-up"] == ["base", "base", "1.00 over eth2", "1.50 over ib2"]
    assert rows(out)["efficiency"] == ["-", "-", "50%", "75%"]
    assert "the same wire" not in out  # which is meant
    assert "has its own base, with 2 processes: eth2, ib2." in out
    one = made(1, (0, 200, 0), **STRONG)
    out = run(**texts, one=one)
    assert rows(out)["speed-up"][:2] == ["1.25 over one", "1.67 over one"]


def test_a_failed_and_an_unfinished_run_keep_their_columns(run):
    end = "launch_single.sh: error: [CPU 0] ERROR: out of memory"
    failed = made(1, (0, 160, 0), **WEAK).partition("[CPU 0] Summary")[0]
    cut = made(8, (0, 160, 0), **WEAK).partition("[CPU 7] Cleanup")[0]
    p2, p4 = made(2, (0, 160, 20), **WEAK), made(4, (0, 160, 65), **WEAK)
    out = run(code=1, p1=f"{START}{failed}{end}", p2=p2, p4=p4, p8=cut)
    assert rows(out)["status"] == ["failed", "complete", "complete", "INCOMPLETE"]
    assert rows(out)["speed-up"] == ["-", "base", "1.60 over p2", "-"]
    assert (
        "The base is p2, with 2 processes. Without a speed-up: p1 (failed), p8 (INCOMPLETE)."
        in out
    )
    out = run(code=1, p2=p2, p8=cut)
    assert (
        "No speed-up: that needs complete runs, with a Summary, of two numbers of processes."
        in out
    )
    assert "no such file" in run_tool("p2=nowhere.log", code=2)[1]


UNLIKE = [
    (
        {"p1": {"batch": 64}, "p2": {"batch": 96}},
        "global batch differs: 64 in p1, 96 in p2, and so do images per process and step: 64 in "
        "p1, 48 in p2",
    ),
    ({"p1": STRONG, "p2": STRONG | {"facts": {"images": 5}}}, "image count differs: 6400 in p1"),
    ({"p1": STRONG, "p2": STRONG | {"facts": {"precision": "fp32"}}}, "precision differs"),
    (
        {"p1": {"batch": 64}, "p2": {"batch": 64}, "p4": {"batch": 128}},
        "global batch differs: 64 in p1, 64 in p2, 128 in p4",
    ),
]


@pytest.mark.parametrize(("options", "said"), UNLIKE)
def test_what_is_neither_strong_nor_weak_is_refused(run, options, said):
    texts = {name: made(int(name[1:]), (0, 100, 0), **more) for name, more in options.items()}
    error = run(code=2, **texts)
    assert said in error and len(error.splitlines()) == 1
    out = run("--force", **texts)
    assert "FORCED, not like with like: " in out and said in out


def test_other_threads_on_a_cpu_are_said_first(run):
    texts = {
        name: made(
            n,
            (0, step, 0),
            **STRONG,
            facts={"threads": threads, "workers": n, "devices": ["x86_64"] * n},
        )
        for name, n, step, threads in (("p1", 1, 200, 2), ("p2", 2, 160, 1))
    }
    out = run(**texts)
    assert "Scaling\n-------\n\nThreads per process differ: 2 in p1, 1 in p2. So a part" in out
    assert "100% (60.0 ms) is compute, with 1 in place of 2 threads per process." in out
    assert "other settings than p1: workers, threads.\n" in out
    on_gpus = {name: text.replace("[CPU", "[GPU") for name, text in texts.items()}
    assert "Threads per process differ" not in run(**on_gpus)


def test_a_slow_rank_is_named_where_the_others_wait_for_it(run):
    ranks = [(20.0, 40.0), (60.0, 0.0)]
    parts = [
        {"rank": n, "data_ms": 0.0, "compute_ms": c, "exposed_ms": e}
        for n, (c, e) in enumerate(ranks)
    ]
    p2 = made(2, (0, 40, 20), **STRONG, summary={"ranks": parts})
    out = run(p1=made(1, (0, 80, 0), **STRONG), p2=p2)
    assert "100% (20.0 ms) is exposed communication, a part of it waiting for rank 1." in out


def test_more_processes_are_no_advice_where_they_do_not_help(run):
    texts = {f"p{n}": made(n, (0, step, 0), **STRONG) for n, step in ((1, 160), (2, 85), (4, 80))}
    out = run(**texts)
    for name, advised in (("p2", True), ("p4", False)):
        verdict = out[out.index(f"{name}: Bound by") :].partition("Bound by")[2]
        assert ("more machines" in verdict.partition("Bound by")[0]) == advised, name


def test_scaling_in_json_csv_report_and_picture(run, tmp_path):
    pytest.importorskip("matplotlib")
    texts, *_ = ANSWERS["strong"]
    files = {name: tmp_path / f"all.{name}" for name in ("json", "csv", "report", "plot")}
    files["plot"] = tmp_path / "all.png"
    out = run(*(word for name, file in files.items() for word in (f"--{name}", file)), **texts)
    scaling = json.loads(files["json"].read_text())["scaling"]
    assert (scaling["kind"], scaling["base"]) == ("strong", "p1")
    p8 = scaling["runs"]["p8"]
    assert (p8["speed_up"], p8["efficiency"], p8["ideal_s"]) == pytest.approx((4, 0.5, 0.04))
    assert sum(p8["lost_s"].values()) == pytest.approx(0.04)
    *_, last = csv.DictReader(files["csv"].open())
    shown = [last[key] for key in ("run", "processes", "speed_up", "efficiency")]
    assert shown == ["p8", "8", "4.0", "0.5"]
    report = files["report"].read_text()
    assert "![Speed-up, and parts of a step](all.png)" in report
    assert re.sub(r"!\[.*\n\n", "", report) == out
    assert png_size(files["plot"]) == (1440, 672)


def test_runs_with_one_number_of_processes_are_compared_as_before(run):
    out = run(a=made(2, (0, 100, 0), **STRONG), b=made(2, (0, 120, 0), **STRONG))
    assert "speed-up" not in out and "b took 1." in out and "img/s, job" in out
