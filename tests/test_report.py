"""The report of tools/compare_logs.py as a person reads it: printed, and kept as Markdown."""

import re
from urllib.parse import unquote

import pytest

from analysis.units import digits, megabytes, rate, short
from test_compare_logs import (
    FREE,
    GIGABIT,
    START,
    as_text,
    carried,
    compared,
    error_of,
    one_run,
    probed_run,
    report,
    run_tool,
)


@pytest.fixture
def pair(tmp_path):
    """Two runs, as the command's words."""
    words = []
    for name, options in (("slow", GIGABIT), ("fast", FREE)):
        (tmp_path / f"{name}.log").write_text(as_text(one_run(**options)))
        words.append(f"{name}={tmp_path / name}.log")
    return words


def test_report_is_kept_as_markdown_that_names_its_picture(pair, tmp_path, monkeypatch):
    """From where the report lies, whatever folder the command was called in."""
    pytest.importorskip("matplotlib")
    kept = tmp_path / "kept here" / "compare.md"
    kept.parent.mkdir()
    monkeypatch.chdir(tmp_path)
    out, _ = run_tool(*pair, "--report", kept, "--plot", "of both.png")
    text = kept.read_text()
    (line,) = re.findall(r"^!\[.*\n", text, re.MULTILINE)
    address = re.fullmatch(r"!\[.+\]\((\S+)\)\n", line)[1]
    assert (kept.parent / unquote(address)).resolve() == tmp_path / "of both.png"
    assert text.replace(f"{line}\n", "") == out
    run_tool(*pair, "--report", kept)
    assert kept.read_text() == out  # without a picture it names none


def test_report_holds_what_markdown_takes(pair):
    """Tables, lists and headings that any viewer tells from the text around them."""
    out, _ = run_tool(*pair, "--project")
    assert not re.search("^ ", out, re.MULTILINE)
    kinds = (r"\|", r"\d+\. ", "- ", "[^|\\d-]")  # table, both lists, text
    blocks = out.strip().split("\n\n")
    assert len(blocks) > 10
    for block in blocks:
        lines = block.splitlines()
        if re.fullmatch("-+", lines[-1]):  # a heading is underlined
            assert len(lines) == 2 and len(lines[0]) == len(lines[1])
            continue
        (kind,) = (kind for kind in kinds if re.match(kind, block))
        assert all(re.match(kind, line) for line in lines), block


def test_foreign_text_does_not_break_it(tmp_path):
    """A cell holds no bar of its own, and what looks like HTML is shown."""
    log, kept = tmp_path / "x.log", tmp_path / "x.md"
    cause = "[CPU 1] ERROR: in <module>"
    log.write_text(f"{START}{as_text(one_run())[:3000]}\nlaunch_multinode.sh: error: {cause}\n")
    out, _ = run_tool(f"a|b={log}", "--report", kept, code=1)
    assert re.match(r"\| +\| +a\\\|b \|\n", out) and f"root cause: {cause}." in out
    assert "root cause: [CPU 1] ERROR: in &lt;module>." in kept.read_text()


# --- the projection -----------------------------------------------------------------------------


def test_projection_is_printed_where_it_is_asked_for(pair):
    out, _ = run_tool(*pair)
    assert "Projection" not in out and len(out.splitlines()) < 60
    assert "--project shows what to expect" in out
    for words, name in (([], "fast"), (["slow"], "slow")):
        out, _ = run_tool(*pair, "--project", *words)
        assert f"\nProjection\n----------\n\nFrom {name}, by the model" in out
        assert re.search(r"^\| 1,024 +\|", out, re.MULTILINE)
    # of those whose link was probed
    text = as_text(one_run(**FREE, probe=False))
    assert "From run0, by" in report(compared(as_text(one_run(**GIGABIT)), text, project=""))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--project", "eth"], "--project eth: no such run"),
        (["--project", "eth=x.log"], "without a name, put --project at the end"),
    ],
)
def test_projection_of_no_run_is_one_line(pair, words, said):
    assert said in error_of(*pair, *words)


def test_projection_without_figures_is_one_line(tmp_path):
    log = tmp_path / "x.log"
    log.write_text("[GPU 0] Cleanup complete. Total wall time: 1m 0s (60.000s)\n")
    lacking = "lack step time, bytes a step, processes or nodes"
    assert f"--project: the logs {lacking}" in error_of(log, "--project")
    assert f"--project: x {lacking}" in error_of(log, "--project", "x")


# --- figures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "text"),
    [
        *((digits(n), text) for n, text in ((0.1234, "0.123"), (99.949, "99.9"), (99.96, "100"))),
        *((digits(n), text) for n, text in ((1234567, "1,234,567"), (1e-9, "0"), (0, "0"))),
        (short(14e-6), "14 us"),
        (short(1.86e-3), "1.86 ms"),
        (short(2.5), "2,500 ms"),
        (rate(3200), "3,200 Gb/s"),
        (rate(0.00851), "8.51 Mb/s"),
        (megabytes(1.28e9), "1,280 MB"),
    ],
)
def test_figures_are_for_people(found, text):
    assert found == text


def test_no_figure_is_a_power_of_ten():
    """Eight rails of 400 Gb/s, a latency of ms, and many errors."""
    errors = {"packet_seq_err": 12_345_678}
    rails = [carried(f"mlx5_{n}:1", "infiniband", 400, 380.0, errors=errors) for n in range(8)]
    link = {"latency_ms": 3720.0, "bandwidth_GBps": 1500.0}
    run = probed_run(rails, gbps=3000, link=link)
    text = report(compared(run, project=""))
    assert not re.search(r"\de[+-]\d", text), text
    for said in ("3,200 Gb/s", "packet_seq_err 12,345,678", "1,500 GB/s", "1,860 ms a message"):
        assert said in text, said
