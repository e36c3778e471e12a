"""No two runs share folder, log or checkpoint; what goes on with an earlier one finds its own."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import supervise
from analysis.logs import read_log
from analysis.runs import make_run
from launcher import series, supervisor
from launcher.errors import Refused
from support.nodes import small_disk
from support.processes import LONG, Started, start
from test_compare_logs import as_text, one_run
from test_launchers import Folder


class Single(Folder):
    """launch_single.sh with torchrun's stand-in."""

    def start(self, *arguments: str, **variables: object) -> Started:
        return super().start("launch_single.sh", *arguments, **variables)

    def logs(self) -> dict[str, str]:
        return {
            str(path.relative_to(self.path / "logs")): path.read_text()
            for path in sorted((self.path / "logs").glob("*/node0.log*"))
        }


@pytest.fixture
def folder(tmp_path: Path) -> Single:
    return Single(tmp_path)


def test_starts_of_one_moment_have_their_own_folders_and_checkpoints(folder):
    """Whose names would be made of the same second."""
    folder.program("date", "echo 20250101-120000")
    started = [folder.start(f"run {n}", RESTARTS=1) for n in range(3)]
    for run in started:
        run.finish(40)
    names = ["20250101-120000", "20250101-120000-2", "20250101-120000-3"]
    logs = folder.logs()
    assert [*logs] == [f"{name}/node0.log" for name in names]
    assert all(text.count("REPORT") == 1 for text in logs.values())
    for name in names:
        assert f"--checkpoint logs/{name}/checkpoint.pt" in logs[f"{name}/node0.log"]


def test_name_that_was_given_is_kept_and_what_an_earlier_run_left_gets_another(folder):
    folder.run("first", RUN_NAME="mine")
    run = folder.run("second", RUN_NAME="mine")
    new, old = folder.logs().items()
    assert new[0] == "mine/node0.log" and '"second"' in new[1] and '"first"' not in new[1]
    assert re.fullmatch(r"mine/node0\.log\.\d{8}-\d{6}", old[0]) and '"first"' in old[1]
    said = [line for line in run.out.splitlines() if "has logs of an earlier run" in line]
    assert len(said) == 1 and said[0].startswith("launch_multinode.sh: logs/mine has logs")


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        pytest.param(["--resume"], {}, id="resume"),
        pytest.param([], {"SLURM_JOB_ID": 7, "SLURM_RESTART_COUNT": 1}, id="requeued", marks=LONG),
    ],
)
def test_start_that_goes_on_has_the_same_log(folder, arguments, variables):
    for more, env in (([], {}), (arguments, variables)):
        folder.run("x", *more, RUN_NAME="mine", **env)
    ((_, text),) = folder.logs().items()
    assert text.count("REPORT") == 2


def test_folder_of_a_live_run_is_refused_and_stays_as_it_is(folder):
    folder.plan("wait")
    with folder.start("first", RUN_NAME="mine") as live:
        live.wait_for(r"\] waiting")
        before = folder.logs()
        (line,) = folder.run("second", RUN_NAME="mine", expect=1).out.splitlines()
        assert folder.logs() == before
    assert f"logs/mine is the folder of a run that goes on (pid {live.pid} on " in line
    assert line.endswith("give another RUN_NAME")


@pytest.mark.parametrize(
    ("goes_on", "name"), [(False, "net-3"), (True, "net-2")], ids=["new", "goes on"]
)
def test_name_of_a_network_is_that_of_its_last_run_where_it_goes_on(tmp_path, goes_on, name):
    for there in ("net", "net-2"):
        (tmp_path / there).mkdir()
    assert series.new_folder(tmp_path, "net", goes_on).name == name


def test_checkpoint_that_a_live_run_writes_is_not_renamed(tmp_path):
    """By rank 0's own lock; the script's is in test_demo.py."""
    path = tmp_path / "c.pt"
    path.touch()
    assert not supervisor.is_in_use(str(path))
    lock = f"import fcntl; f = open({str(path) + '.lock'!r}, 'w'); fcntl.lockf(f, fcntl.LOCK_EX); "
    with start(
        [sys.executable, "-c", lock + "print('held', flush=True); import time; time.sleep(60)"]
    ) as other:
        other.wait_for("held")
        argv = ["--log", str(tmp_path / "log"), "--restarts=1", "--", "torchrun", "train.py"]
        options, command = supervise.parse_arguments([*argv, "--checkpoint", str(path)])
        kept = supervise.Supervisor(options, command, supervise.Output("x", options.log))
        with pytest.raises(Refused, match=r"c\.pt is in use by another run"):
            kept._keep_checkpoint()
        assert path.exists()
    assert not supervisor.is_in_use(str(path))
    kept._keep_checkpoint()
    assert not path.exists() and [*tmp_path.glob("c.pt.2*")]


# --- What compare_logs.py makes of a log that several runs have written -------------------------


def attempt(resume: bool, first: int = 0) -> str:
    options = {"world": 1, "nodes": 1, "steps": 4, "epochs": 1, "start_step": first}
    return as_text(one_run(**options, facts={"resume": resume}))


WHOLE = attempt(False)
CUT = WHOLE[: WHOLE.index("[CPU 0] Epoch 1 | Step 4")]


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (CUT + attempt(True, first=2), "restarted 1 time(s), the last time from"),
        (CUT + attempt(True), "restarted 1 time(s)"),  # without a checkpoint yet
        (WHOLE + WHOLE, "1 other run(s) before it in the same log"),
    ],
    ids=["restarted", "from the beginning", "another run"],
)
def test_restart_is_told_from_another_run_in_the_same_log(tmp_path, text, note):
    (tmp_path / "node0.log").write_text(text)
    run = make_run("x", read_log([tmp_path]), {})
    assert run.complete, run.problems
    assert len(run.notes) == 1 and note in run.notes[0], run.notes
    assert run.attempted_again == ("restarted" in note)


def test_full_disk_leaves_the_folder_to_this_run(tmp_path):
    """As docs/faults.md has it, the run goes on."""
    with small_disk(tmp_path / "disk", "64k") as disk:
        with pytest.raises(OSError, match="No space left"):
            (disk / "else").write_bytes(bytes(2**17))
        series.lock_folder(disk, "first")
        with pytest.raises(Refused, match=r"goes on \(\?\)"):
            series.lock_folder(disk, "second")
