"""The launchers start torchrun with what was chosen, log what it prints, and refuse the rest."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.datasets import make_set
from support.launchers import (
    COMMAND,
    FAST,
    LOG,
    MULTINODE,
    SAVED,
    SINGLE,
    STEP_3,
    TwoNodes,
    copy_project,
    finish_all,
    launch,
    starts,
    two_nodes,
)
from support.nodes import require_namespaces, small_disk
from support.processes import LONG, ROOT, SCRIPT, Run, Started, processes, start, wait_until

NO_SAMPLE = ["--annotation_path", "none"]  # with a path the launchers make no sample set
HERE = {"PYTHON": sys.executable, "RUN_NAME": "run", "NNODES": "1", "PROBE": "0"}


def command(started: Started) -> set[str]:
    """The words of the torchrun command, as it is printed before it runs."""
    return set(shlex.split(started.wait_for(COMMAND.pattern)[1]))


def chosen(started: Started) -> set[str]:
    """What that command sets for NCCL and Gloo, except NCCL's debug text."""
    return {word for word in command(started) if re.match("(NCCL|GLOO)_(?!DEBUG)", word)}


def refused(started: Started, words: str) -> None:
    """The launcher has to end with one line that has these words."""
    run = started.finish(30, expect=None)
    (line,) = run.lines()
    assert run.returncode not in (0, SAVED) and re.search(f"error: .*{words}", line), run.tail()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The launcher is started in a folder with a space and an accent in its name."""
    path = tmp_path / "mein Gerät"
    path.mkdir()
    return path


@pytest.fixture(scope="module")
def training(tmp_path_factory) -> list[str]:
    """Options of a run of 32 steps on one process that saves every fourth step."""
    images = make_set(tmp_path_factory.mktemp("set"), 64)
    return [*FAST, *images, "--timeout", "8", "--checkpoint_every", "4", "--num_epochs", "2"]


# --- On this machine --------------------------------------------------------------------------


def test_in_the_background_of_a_script_two_processes_train_and_the_log_has_all_lines(folder):
    """SIGINT is ignored there. The arguments have a space and an accent, of which the locale
    knows nothing.
    """
    arguments = [*make_set(folder / "größer", 16), *FAST, "--max_steps", 2]
    background = ["bash", "-c", 'bash "$@" & wait "$!"', "bash", SINGLE, *arguments]
    with start(background, env=HERE | {"GPUS": "2", "LC_ALL": "C"}, cwd=folder) as started:
        run = started.finish(120)
    assert [run.steps(rank)[-1][1] for rank in (0, 1)] == [2, 2]
    log = (folder / LOG).read_text()
    for rank in (0, 1):
        assert all(f"[CPU {rank}] {line}\n" in log for line in run.lines(rank))
    assert log.index(COMMAND.search(run.out)[0]) < log.index("[CPU 0]")


def test_an_error_of_the_script_is_the_last_line_and_is_not_restarted(folder):
    _, *rest = make_set(folder / "set", 4)
    arguments = ["--coco_image_path", folder / "nowhere", *rest[1:], *FAST]
    with launch(SINGLE, folder, *arguments, RESTARTS=1) as started:
        run = started.finish(120, expect=2)
    assert starts(run.out) == 1
    assert "ERROR: " in run.lines()[-1] and f"{folder}/nowhere" in run.lines()[-1]


@LONG
def test_a_second_ctrl_c_ends_at_once(training, folder):
    """The rank is stopped, and cannot answer the first one."""
    with launch(SINGLE, folder, *training) as started:
        started.wait_for(STEP_3)
        os.kill(started.rank_pid(0), signal.SIGSTOP)
        started.signal(signal.SIGINT)
        time.sleep(1)
        assert started.running()
        started.signal(signal.SIGINT)
        wait_until(lambda: not started.running(), 5, "its end")
        assert started.process.returncode == 128 + signal.SIGINT


@LONG
def test_sigusr1_to_all_processes_saves(training, folder):
    """As SLURM may send it before a time limit. Loader workers and torchrun do not know it."""
    options = ["--num_epochs", 999, "--workers", 1, "--checkpoint", "c.pt"]
    with launch(SINGLE, folder, *training, *options, GPUS=2) as started:
        started.wait_for(STEP_3)
        for pid in started.pids():
            os.kill(pid, signal.SIGUSR1)
        run = started.finish(60, SAVED, clean=10)
    assert (folder / "c.pt").stat().st_size > 0
    assert "got signal: 15" in run.out  # torchrun has lived to pass the launcher's SIGTERM on


# --- Help, and the sample set ------------------------------------------------------------------

TWO_NODES_SH = ROOT / "tools/two_nodes.sh"


@pytest.mark.parametrize("options", ["--help", "-h", "--max_steps 5 --help"])
@pytest.mark.parametrize("launcher", [SINGLE, MULTINODE, TWO_NODES_SH], ids=lambda path: path.name)
def test_help_is_the_commands_own_header_and_starts_nothing(folder, launcher, options):
    options = [*["--"][: launcher == TWO_NODES_SH], *options.split()]
    with launch(launcher, folder, *options, PYTHON="/nowhere/python", NNODES=None) as started:
        *header, last = started.finish(30).lines()
    text = launcher.read_text()
    assert len(header) > 8 and all(f"\n# {line}\n" in text for line in header if line)
    assert "python demo_coco_resnet18.py --help" in last and not [*folder.iterdir()]


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A copy of this project, whose sample set has 48 images and is not made yet."""
    project = copy_project(tmp_path_factory.mktemp("copy"))
    drawing = project / "tools/make_sample_coco.py"
    drawing.write_text(drawing.read_text().replace("default=512", "default=48"))
    return project


OWN = shlex.split("--max_steps 2 --global_batch_size 8 --image_size 40 --timeout 60 --log_every 1")


def test_without_paths_a_users_settings_win_over_those_of_the_sample_set(project, folder):
    """For two nodes see test_two_nodes.py."""
    with launch(project / SINGLE.name, folder, *OWN) as started:
        run = started.finish(180)
    assert [step for _, step, _ in run.steps()] == [1, 2]
    facts = run.json_line("Run")
    assert facts["global_batch_size"] == 8 and facts["image_size"] == 40
    assert facts["coco_image_path"] == f"{project}/data/sample_coco/train2017"
    assert facts["weights"] == "none"


PATHS = ["coco_image_path", "annotation_path", "val_image_path", "val_annotation_path"]
ONE_PATH = [["--" + name, "none"] for name in PATHS]
ONE_PATH += [["--" + name.replace("_", "-") + "=none"] for name in PATHS]


@pytest.mark.parametrize("path", ONE_PATH, ids=lambda words: words[0])
def test_with_any_path_the_script_gets_the_users_arguments_alone(folder, path):
    with launch(SINGLE, folder, *path, "--max_steps", 5) as started:
        line = started.wait_for(COMMAND.pattern)[1]
    script = str(ROOT / "demo_coco_resnet18.py")
    assert shlex.split(line)[-len(path) - 3 :] == [script, *path, "--max_steps", "5"]


def test_without_a_path_of_images_the_scripts_own_error_is_seen(folder):
    with launch(SINGLE, folder, "--annotation_path", folder) as started:
        run = started.finish(60, expect=2)
    assert re.search(r"error: .*--coco_image_path", run.out)


# --- A name that is used twice, and where the log goes -----------------------------------------


READ_ONLY = 'mount --bind "$0" "$0"; mount -o remount,bind,ro "$0"; exec bash "$@"'


@pytest.fixture(scope="module")
def three(training, tmp_path_factory) -> tuple[Path, list[Run]]:
    """Three runs of one name, with what each has added to the log. The first one restarts, the
    second does not resume. The third resumes from the second, of a checkout that is read-only
    where root can make it so, and its output is read up to the first line.
    """
    folder = tmp_path_factory.mktemp("three") / "mein Gerät"
    folder.mkdir()
    begin, logged = 0, []

    def add(run: Run) -> None:
        nonlocal begin
        text = (folder / LOG).read_text()
        logged.append(Run(run.command, run.returncode, text[begin:], run.seconds))
        begin = len(text)

    env = HERE | {"RESTARTS": "1"}
    words = ["nohup", "bash", SINGLE, *training, "--workers", 1]
    with start(words, env=env, cwd=folder) as started:
        started.wait_for(r"\| Step 5 ")
        os.killpg(started.pid, signal.SIGHUP)  # as a terminal does when it is closed
        rank = started.rank_pid(0)
        (worker,) = [p.pid for p in processes(started.test_id) if p.parent == rank]
        os.kill(worker, signal.SIGKILL)
        add(started.finish(180))
    assert (folder / "logs/run/checkpoint.pt").is_file()
    with start(["bash", SINGLE, *training, "--max_steps", 2], env=env, cwd=folder) as started:
        add(started.finish(120))
    project = copy_project(folder)
    words = ["bash", project / SINGLE.name, *training, "--max_steps", 4, "--resume"]
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0:
        words = ["unshare", "-m", "sh", "-ec", READ_ONLY, project, *words[1:]]
    pipe = ["bash", "-c", '"$@" 2>&1 | head -n 1; exit "${PIPESTATUS[0]}"', "bash"]
    with start([*pipe, *words], env=env, cwd=folder) as started:
        add(started.finish(120))
    return folder, logged


@LONG
def test_after_a_loader_worker_was_killed_it_restarts_from_the_checkpoint(three):
    """For a killed rank see below."""
    run = three[1][0]
    assert starts(run.out) == 2
    resumed = run.json_line("Run")["start_step"]
    steps = [step for _, step, _ in run.steps()]
    assert 4 <= resumed < 32 and steps[resumed - 32 :] == list(range(resumed + 1, 33))


@LONG
def test_a_hang_up_is_ignored_under_nohup(three):
    run = three[1][0]
    assert run.steps()[-1][1] == 32 and "Stopped on" not in run.out


@LONG
def test_a_second_run_of_a_name_appends_to_the_log_and_renames_the_checkpoint(three):
    """The third goes on from the second. The comparison takes that one, and says so."""
    folder, runs = three
    assert [starts(run.out) for run in runs] == [2, 1, 1]
    assert [run.out.count("has a run already") for run in runs] == [0, 1, 0]
    assert [[step for _, step, _ in run.steps()] for run in runs[1:]] == [[1, 2], [3, 4]]
    assert [run.out.count("renamed") for run in runs] == [0, 1, 0]
    assert len([*folder.glob("logs/run/checkpoint.pt.2*")]) == 1
    with start([sys.executable, ROOT / "tools/compare_logs.py", folder / LOG]) as started:
        compared = started.finish(60)
    assert re.search(r"^\| steps +\| +4 \|$", compared.out, re.MULTILINE), compared.tail()
    assert "1 other run(s) before it in the same log" in compared.out


@LONG
def test_a_read_only_checkout_trains_and_a_reader_that_goes_away_changes_nothing(three):
    require_namespaces()
    third = three[1][2].out
    assert "| Step 4 " in third and "[CPU 0] Cleanup complete" in third


def test_a_log_folder_that_cannot_be_made_is_refused(folder):
    (folder / "file").touch()
    with launch(SINGLE, folder, *NO_SAMPLE, LOG_DIR=folder / "file/logs") as started:
        refused(started, f"{folder}/file/logs")


@LONG
def test_training_goes_on_when_the_disk_of_the_log_is_full(training, folder):
    with small_disk(folder / "disk", "1m") as disk:
        # 64 steps, more lines than the log's last page can take
        options = ["--num_epochs", 4, "--checkpoint_every", 0]
        with launch(SINGLE, folder, *training, *options, LOG_DIR=disk) as started:
            started.wait_for(STEP_3)
            with pytest.raises(OSError, match="No space"):
                (disk / "full").write_bytes(bytes(2**21))
            run = started.finish(120)
        log = (disk / "run" / "node0.log").read_text()
    assert run.steps()[-1][1] == 64 and "[CPU 0] Cleanup complete" in run.out
    assert "| Step 3 " in log and "Cleanup complete" not in log, "the disk was not full"


# --- Settings ---------------------------------------------------------------------------------

CORES = len(os.sched_getaffinity(0))
ALL, HALF = (f"OMP_NUM_THREADS={n}" for n in (CORES, max(1, CORES // 2)))
NCCL_FILE = "NCCL_DEBUG_FILE=logs/run/{}nccl.node0.%h.%p.log"
PRINTED = [  # launcher, variables, options, words of the torchrun command, what it has not
    (SINGLE, "GPUS=all CUDA_VISIBLE_DEVICES=0,2", "", "--nproc_per_node=2", "--checkpoint"),
    (SINGLE, "GPUS=all CUDA_VISIBLE_DEVICES=1,-1,0", "", "--nproc_per_node=1", "--checkpoint"),
    (SINGLE, "CUDA_VISIBLE_DEVICES=0,2", "", f"--nproc_per_node=1 {ALL}", "--checkpoint"),
    (MULTINODE, "CUDA_VISIBLE_DEVICES=GPU-8f,MIG-2e", "", "--nproc_per_node=2", "--checkpoint"),
    (MULTINODE, "GPUS_PER_NODE=2", "", HALF, "--checkpoint"),
    (MULTINODE, "GPUS_PER_NODE=2 OMP_NUM_THREADS=3", "", "OMP_NUM_THREADS=3", "--checkpoint"),
    (SINGLE, "RESTARTS=1", "--checkpoint own.pt", "--checkpoint own.pt", "checkpoint.pt"),
    (MULTINODE, "RESTARTS=1", "", "--checkpoint logs/run/checkpoint.pt", "--resume"),
    (MULTINODE, "", "", NCCL_FILE.format(""), "--checkpoint"),
    (MULTINODE, "NETWORKS=a=lo", "", NCCL_FILE.format("a/"), "--resume"),
    (MULTINODE, "NCCL_DEBUG=WARN", "", "", "NCCL_DEBUG"),  # as it is in the environment already
]


@pytest.mark.parametrize(("launcher", "variables", "options", "words", "absent"), PRINTED)
def test_settings_and_defaults_are_seen_in_the_torchrun_command(
    tmp_path, launcher, variables, options, words, absent
):
    """GPUs are shown by CUDA_VISIBLE_DEVICES alone."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    given = {"OMP_NUM_THREADS": None, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    given |= dict(word.split("=", 1) for word in variables.split())
    with launch(launcher, tmp_path, *NO_SAMPLE, *options.split(), **given) as started:
        found = command(started)
    assert set(words.split()) <= found and not [word for word in found if absent in word]


@pytest.mark.parametrize(
    ("processes", "program"), [(1, "demo_coco_resnet18.py"), (2, "tools/probe_link.py")]
)
def test_the_probe_comes_first_unless_there_is_one_process_alone(folder, processes, program):
    """For what follows a probe that fails see test_two_nodes.py."""
    with launch(MULTINODE, folder, *NO_SAMPLE, PROBE=1, GPUS_PER_NODE=processes) as started:
        assert str(ROOT / program) in command(started)


@pytest.mark.parametrize("value", ["0", "two", "-1", "all", " ", "1 two", "2 1 2"])
def test_wrong_number_of_processes_is_refused(folder, value):
    """All GPUs are wrong where there is none."""
    with launch(SINGLE, folder, *NO_SAMPLE, GPUS=value) as started:
        refused(started, f"GPUS.*{value.split(' ')[-1]}|GPUS=all")


# Of a node that is otherwise right; each with the words that the one line must have.
NODE = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "203.0.113.1"}
WRONG = [
    ({"NODE_RANK": None}, "NODE_RANK"),
    ({"NODE_RANK": "2"}, "NODE_RANK is '?2"),
    ({"WORLD_SIZE": "4"}, "NNODES.*WORLD_SIZE"),
    ({"NNODES": "two"}, "NNODES is '?two"),
    ({"MASTER_ADDR": None}, "MASTER_ADDR"),
    ({"MASTER_PORT": "99999"}, "MASTER_PORT is '?99999"),
    ({"RESTARTS": "-1"}, "RESTARTS is '?-1"),
    ({"GPUS_PER_NODE": "all"}, "GPU"),
    ({"NETWORK": "token-ring", "IFNAME": "lo"}, "NETWORK is '?token-ring"),
    ({"NETWORK": "ethernet"}, "IFNAME"),
    ({"IFNAME": "none0"}, "none0"),
    ({"NETWORKS": "ethernet infiniband"}, "NETWORKS .*=INTERFACE"),
    ({"NETWORKS": "a=lo a=lo"}, "NETWORKS .*a"),
    ({"NETWORKS": "a=lo", "LINK_GBPS": "a=1gbit"}, "LINK_GBPS has 'a=1gbit'"),
    ({"NETWORKS": "a=lo", "LINK_GBPS": "1 b=1"}, "LINK_GBPS has b"),
    ({"PYTHON": "/nowhere/python"}, "/nowhere/python"),
    (dict.fromkeys(NODE), "NNODES.*NODE_RANK.*MASTER_ADDR"),
]


@pytest.mark.parametrize(("settings", "words"), WRONG)
def test_wrong_settings_are_refused(tmp_path, settings, words):
    with launch(MULTINODE, tmp_path, *NO_SAMPLE, **{**NODE, **settings}) as started:
        refused(started, words)


def test_an_exported_cdpath_changes_nothing(tmp_path):
    """With it `cd` prints where it goes, and may go elsewhere."""
    (tmp_path / ROOT.name / "tools").mkdir(parents=True)
    words = ["bash", SINGLE.relative_to(ROOT.parent)]
    with start(words, env={"CDPATH": f"{tmp_path}:.", "GPUS": "0"}, cwd=ROOT.parent) as started:
        refused(started, "GPUS")


def test_launcher_counts_on_the_scripts_timeout_where_none_is_given():
    default = re.search(r"^TIMEOUT = (\d+)", SCRIPT.read_text(), re.MULTILINE)[1]
    assert (
        f'"${{timeout:-{default}}}" 2>/dev/null) || timeout={default}\n' in MULTINODE.read_text()
    )


def exit_codes(*codes: int) -> str:
    """As torchrun lists those of its ranks."""
    return "".join(f"\n  exitcode  : {code} (pid: 7)" for code in codes)


RESET = "[CPU 0] ERROR: reset: another rank has ended, or does not answer"
STOPPED = "[CPU 0] Stopped on SIGTERM | step 3 | exit code 75"
CLASS = "[CPU 1] Note: 1 class has no training image: exitcode  : 2"
APART = "torch.distributed.DistStoreError: Timed out. 1/2 clients joined."
WATCHDOG = (
    "[rank0]:[E1 ProcessGroupNCCL.cpp:683] [Rank 0] Watchdog caught collective operation timeout"
)
ENDS = [  # torchrun's code, its log, the outcome, words of the reason
    (1, f"{RESET}\n{CLASS}{exit_codes(1, -9)}", "lost", "reset"),
    (137, "[CPU 0] WARNING: image /Stopped on SIGTERM/1.jpg is damaged", "lost", "with 137"),
    (1, "[CPU 0] Resumed from /data/Stopped on SIG.pt at step 3", "lost", "ended with 1"),
    (1, f"[CPU 0] WARNING: /ERROR: 1.jpg\n[CPU 1] ERROR: full{exit_codes(1)}", "lost", "full"),
    (1, f"[CPU 1] ERROR: no folder{exit_codes(2, -15)}", "user", "no folder"),
    (143, STOPPED, "asked", ""),
    (1, f"{STOPPED}{exit_codes(75, -15)}", "asked", ""),
    (1, f"{STOPPED}\n{RESET}{exit_codes(75, 1)}", "lost", "reset"),
    (1, f"{RESET}\n{STOPPED}\n[CPU 1] ERROR: slip{exit_codes(75, 1)}", "lost", "slip"),
    (1, f"{RESET}\n{WATCHDOG}{exit_codes(1, -6)}", "lost", "Watchdog caught"),
    (143, "[CPU 0] Cleanup complete. Total wall time: 3s", "complete", ""),
    (1, APART, "apart", "1/2 clients"),
    pytest.param(
        1, "\n".join([RESET, *["[CPU 1] ERROR: full"] * 6000]), "lost", "full", id="many lines"
    ),
    (1, "[CPU 1] ERROR: no \udcff.jpg", "lost", "no \udcff.jpg"),  # a name that is not in UTF-8
]


@pytest.mark.parametrize(("code", "log", "outcome", "words"), ENDS)
def test_end_is_judged_by_the_lines_of_the_log_and_by_nothing_else_in_them(
    code, log, outcome, words
):
    """Names of images and classes may hold any text."""
    program = 'set -euo pipefail; source "$0"; lines=$(grep -aE "$telling" <<<"$2" || true); '
    program += 'judge_end "$1" "$lines" "${2##*$\'\\n\'}"; echo "$outcome"; echo "$reason"'
    command = ["bash", "-c", program, ROOT / "tools/launcher/common.sh", str(code), log]
    env = {**os.environ, "LC_ALL": "C.UTF-8"}  # in which one of the names is no text
    done = subprocess.run(command, env=env, capture_output=True, check=True)
    found, reason = done.stdout.decode(errors="surrogateescape").splitlines()
    assert found == outcome and words in reason


# --- Several numbers of processes --------------------------------------------------------------


@LONG
def test_a_killed_rank_ends_its_run_with_its_signal_and_does_not_keep_the_next_one_from_training(
    training, folder
):
    """torchrun ends the other rank by another signal. Without RESTARTS there is no restart. Both
    runs have one global batch. The launcher then ends with 1.
    """
    words = [*training, "--global-batch-size=4", "--max_steps", 20]
    with launch(SINGLE, folder, *words, GPUS="2 1") as started:
        started.wait_for(STEP_3)
        os.kill(started.rank_pid(0), signal.SIGKILL)
        run = started.finish(180, expect=None)
    assert run.returncode == 1
    failed, other = ((folder / f"logs/run/p{n}/node0.log").read_text() for n in (2, 1))
    assert starts(failed) == 1
    assert re.search("error: run p2: .*(SIGKILL|exitcode *: -9)", failed.splitlines()[-1]), failed
    assert failed.splitlines()[-1] in run.lines()
    assert "| Step 20 |" in other and '"global_batch_size": 4' in other
    assert run.out.count("strong scaling: a step has 4 images") == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--resume", "--resume"),
        ("--global-batch-size=3", "3 is not a multiple of 2"),
        ("--precision=bf16", "GPUS has 2, but there are 1 GPU"),
    ],
)
def test_what_several_numbers_of_processes_cannot_have_is_refused(folder, options, words):
    gpu = {"CUDA_VISIBLE_DEVICES": "0" if "precision" in options else ""}
    with launch(SINGLE, folder, *NO_SAMPLE, options, GPUS="1 2", **gpu) as started:
        run = started.finish(30, expect=1)
    assert re.search(f"error: .*{words}", run.lines()[-1]) and not starts(run.out)


def test_more_processes_than_cores_are_noted_and_have_a_thread_each(folder):
    most = CORES + 1
    given = {"GPUS": f"1 {most}", "OMP_NUM_THREADS": None}
    with launch(SINGLE, folder, *NO_SAMPLE, **given) as started:
        assert "OMP_NUM_THREADS=1" in command(started)
        started.wait_for(rf"note: .*cores \({CORES}\).*processes \({most}\)")


def test_without_paths_each_number_makes_20_steps_and_does_not_validate(project, folder):
    with launch(project / SINGLE.name, folder, GPUS="1 2") as started:
        line = started.wait_for(COMMAND.pattern)[1]
    assert "--max_steps 20" in line and "--val_" not in line


# --- Networks ---------------------------------------------------------------------------------

# The kernel's files of adapters that no machine for tests has, for this start alone.
ADAPTERS = """
cp -a /sys/class/net "$0"
mount -t tmpfs none /sys/class
mv "$0/net" /sys/class
for name in mlx5_0 mlx5_1 mlx5_2 rdmap0s6; do
    mkdir -p /sys/class/infiniband/$name/ports/1 /sys/class/infiniband/$name/device
    echo "4: ACTIVE" >/sys/class/infiniband/$name/ports/1/state
    ln -s /sys/bus/pci/drivers/mlx5_core /sys/class/infiniband/$name/device/driver
done
ln -sfn /sys/bus/pci/drivers/efa /sys/class/infiniband/rdmap0s6/device/driver
echo "1: DOWN" >/sys/class/infiniband/mlx5_2/ports/1/state
exec "$@"
"""
VERBS = {"NCCL_IB_DISABLE=0", "NCCL_NET=IB"}
SOCKETS = {"NCCL_IB_DISABLE=1", "NCCL_NET=Socket"}
ROUTE = {"GLOO_SOCKET_IFNAME=eth0"}  # where no interface is named
ETH0 = {"NCCL_SOCKET_IFNAME==eth0"} | ROUTE
CHOSEN = [
    ({"IFNAME": "mlx5_0,mlx5_1"}, VERBS | {"NCCL_IB_HCA==mlx5_0,mlx5_1"} | ETH0),
    ({"IFNAME": "mlx5_0,eth0"}, VERBS | {"NCCL_IB_HCA==mlx5_0"} | ETH0),
    ({"IFNAME": "eth0", "NETWORK": "infiniband"}, VERBS | ETH0),
    ({"NETWORKS": "infiniband=eth0"}, SOCKETS | ETH0),
    ({"IFNAME": "rdmap0s6,eth0"}, ETH0),
]
REFUSED = [
    ({"IFNAME": "mlx5_0,mlx5_2"}, [], "mlx5_2"),
    ({"IFNAME": "mlx5_0", "NETWORK": "ethernet"}, [], "NETWORK=ethernet.*mlx5_0"),
    ({"IFNAME": "down0"}, [], "down0 .*down"),
    ({"NETWORKS": "one=eth0 two=loose0"}, [], "loose0 .*cable"),
    ({"NETWORKS": "one=eth0 two=lo"}, ["--resume"], "--resume"),
]


def with_adapters(nodes: TwoNodes, *options: object, **variables: str) -> Started:
    """The launcher on node 0, which has adapters, an interface that is down, and a loose one."""
    nodes.pair.ip(0, "link add down0 type bridge", "link add loose0 up type veth peer name end")
    env = HERE | {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "10.77.0.1"} | variables
    words = ["sh", "-ec", ADAPTERS, nodes.folder(0), "bash", MULTINODE, *NO_SAMPLE, *options]
    return nodes.pair.popen(0, words, env=env, cwd=nodes.folder(0))


@pytest.mark.parametrize(("variables", "expected"), CHOSEN)
def test_nccl_is_kept_on_the_adapters_or_interface_except_with_efa(tmp_path, variables, expected):
    with two_nodes(tmp_path) as nodes:
        assert chosen(with_adapters(nodes, **variables)) == expected


@pytest.mark.parametrize(("variables", "options", "words"), REFUSED)
def test_a_network_that_is_missing_or_contradictory_is_refused(
    tmp_path, variables, options, words
):
    with two_nodes(tmp_path) as nodes:
        refused(with_adapters(nodes, *options, **variables), words)


def test_a_users_own_variable_of_nccl_stays_and_a_line_says_so(tmp_path):
    with two_nodes(tmp_path) as nodes:
        started = nodes.start(0, *NO_SAMPLE, IFNAME="eth0", NCCL_IB_DISABLE="0")
        assert chosen(started) == ETH0 | SOCKETS - {"NCCL_IB_DISABLE=1"}
        started.wait_for(r"\.sh: keeping your NCCL_IB_DISABLE='0'")


VETH0 = ["link set eth0 down", "link set eth0 name veth0", "link set veth0 up"]
BRIDGE = ["link add br-x up type bridge", "link add veth7 up type veth peer name end"]
MEMBER = [*BRIDGE, "link set eth0 master br-x", "addr flush dev eth0"]
CONTAINERS = {  # commands on the node, variables, whether container networks are left out
    "bridge": (BRIDGE, {}, True),
    "none": ([], {}, False),
    "veth joins": (VETH0, {}, False),
    "bridge joins": ([*MEMBER, "addr add 10.77.0.2/24 dev br-x"], {}, False),
    "InfiniBand": ([*BRIDGE, "link add ib0 type bridge"], {}, False),  # which NCCL takes first
    "chosen": (BRIDGE, {"NCCL_SOCKET_IFNAME": "eth0"}, False),
}


@pytest.mark.parametrize("case", CONTAINERS)
def test_container_networks_are_left_out_unless_they_join_the_nodes(tmp_path, case):
    commands, variables, expected = CONTAINERS[case]
    with two_nodes(tmp_path) as nodes:
        nodes.pair.ip(1, *commands)
        words = chosen(nodes.start(1, *NO_SAMPLE, **variables))
    found = " ".join(word for word in words if word.startswith("NCCL"))
    names = found.removeprefix("NCCL_SOCKET_IFNAME=^").split(",")
    assert {"lo", "docker", "br-", "veth"} <= set(names) if expected else not found


def test_each_node_has_its_own_interface_under_one_label(tmp_path):
    with two_nodes(tmp_path) as nodes:
        nodes.pair.ip(1, *VETH0)
        for node, name in enumerate(["eth0", "veth0"]):
            words = command(nodes.start(node, *NO_SAMPLE, NETWORKS=f"one={name}"))
            assert {f"GLOO_SOCKET_IFNAME={name}", "--rdzv_id=one-1"} <= words


# --- Two nodes --------------------------------------------------------------------------------


def record(nodes: TwoNodes, kind: str) -> dict:
    """The last such record in node 0's log."""
    return Run([], 0, nodes.log(0), 0).json_line(kind)


def test_both_nodes_train_and_each_logs_its_command_and_its_own_ranks(tmp_path):
    """Their hosts files map their own names to loopback, as Debian's do."""
    folder = tmp_path / "mein Gerät"
    data = make_set(folder / "set", 32)
    with two_nodes(folder) as nodes:
        nodes.pair.usual_hosts()
        runs = finish_all(nodes.start_both(*data, *FAST, "--max_steps", 3))
        facts, summary = record(nodes, "Run"), record(nodes, "Summary")
        logs = [nodes.log(node) for node in (0, 1)]
    for node, (run, log) in enumerate(zip(runs, logs, strict=True)):
        assert [step for _, step, _ in run.steps(node)] == [1, 2, 3], run.tail()
        assert all(f"[CPU {node}] {line}\n" in log for line in run.lines(node))
        assert f"[CPU {1 - node}]" not in log
        words = COMMAND.search(log)
        assert words.start() < log.index("[CPU ")
        given = {"--rdzv_backend=static", f"--node_rank={node}", "--rdzv_id=run-1"}
        assert given <= set(shlex.split(words[1]))
    assert (facts["world_size"], facts["hosts"]) == (2, ["node0", "node1"])
    assert facts["env"]["GLOO_SOCKET_IFNAME"] == "eth0"
    assert summary["steps"] == 3 and summary["replicas_identical"] is True
