"""Faults that the tests must notice: slips and cuts, each against one promise to the user.

    python tests/faults.py                      # all faults, two at a time: about four minutes
    python tests/faults.py set-epoch all-write  # these
    python tests/faults.py --healthy            # their tests without a fault: all have to pass

Call it before you delete code or a test. Each fault alone is put into a copy of the project, where
its test has to fail; a test that is skipped, or fails before it begins, has not noticed it.
Exit code: 0: all were noticed (--healthy: all tests passed); 1: one was not; 2: an unknown name.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 180  # for a fault's test
# Of each file: a promise's number (training to 22, launchers to 34, comparison to 40, the rest to
# 47) and the fault's name: what is in the file once => what takes its place; then the test.
TABLE = """
== demo_coco_resnet18.py
1 one-a-node: if env.get("LOCAL_RANK", "0") == "0": => if env.get("LOCAL_RANK") == "0":
    acceptance/test_machines.py::test_ranks_without_a_local_number_are_one_a_node
2 all-on-gpu-0: ("cuda", process.local_rank % torch.cuda.device_count()) => ("cuda", 0)
    test_script.py::test_each_process_takes_the_gpu_of_its_local_rank
3 set-epoch: loader.sampler.set_epoch(epoch) => pass
    acceptance/test_ranks.py::test_each_epoch_has_each_image_once_in_another_order
3 one-share: process.rank, seed=seed) => 0, seed=seed)
    test_images.py::test_shares_are_equally_long_complete_and_by_the_seed
4 no-first-copy: gradient_as_bucket_view=True, => init_sync=False,
    test_script.py::test_gradients_of_two_ranks_are_those_of_twice_the_batch
4 own-statistics: dist.broadcast(buffer, src=0) => pass
    acceptance/test_training.py::test_dummy_trains_on_random_images_without_any_data
5 mean-of-micro-batch: (logits, labels, reduction="sum") / images_in_step => (logits, labels)
    test_script.py::test_gradients_of_two_ranks_are_those_of_twice_the_batch
5 sends-each: with nullcontext() if is_last else ddp.no_sync(): => with nullcontext():
    test_script.py::test_gradients_of_two_ranks_are_those_of_twice_the_batch
6 padded-validation: end = len(dataset) // process.world_size => end = sampler.num_samples
    test_images.py::test_validation_gives_each_image_once
6 own-accuracy: dist.all_reduce(counts) => pass
    acceptance/test_training.py::test_validation_counts_each_image_once_in_uneven_shares
7 all-write: if path and process.rank == 0: => if path:
    acceptance/test_refusals.py::test_only_rank_0_needs_the_annotations_and_the_weights
7 rank-0-logs: log(process, f"{text}step => log_from_rank_0(process, f"{text}step
    acceptance/test_training.py::test_lines_have_the_fields_that_readme_shows
8 replicas-differ: if not identical: => if False:
    acceptance/test_ranks.py::test_ranks_that_end_with_different_weights_fail
9 precision-of-one: args.precision = min(all_gather => args.precision = max(all_gather
    acceptance/test_ranks.py::test_precision_is_the_fastest_one_that_suits_all_ranks
9 no-warm-up: lr_factor = min(1, (training.step + 1) / max(1, args.warmup_steps)) => lr_factor = 1
    test_script.py::test_learning_rate_warms_up_and_is_scaled
10 no-compression: ddp.register_comm_hook(None, hooks[args.grad_compression]) => pass
    test_script.py::test_compressed_gradients_are_rounded_to_two_bytes
11 names-of-ddp: {name.removeprefix("module."): value => {name: value
    test_annotations.py::test_weights_are_loaded_as_other_programs_save_them
12 last-annotation: category = of_it[0]["category_id"] => category = of_it[-1]["category_id"]
    test_annotations.py::test_label_is_the_category_of_the_first_annotation
12 validation-by-id: [label_of[label] for label in val_set.labels] => val_set.labels
    test_annotations.py::test_file_trains_rightly_or_one_line_says_what_is_wrong
13 dummy-needs-data: elif not (args.coco_image_path and => if not (args.coco_image_path and
    test_script.py::test_dummy_makes_100_steps_unless_steps_or_epochs_are_given
14 packed-order: torch.tensor([places[name] for name in names]) => torch.tensor([*places.values()])
    test_images.py::test_images_of_a_packed_file_are_those_of_the_folder
14 packed-slow: torch.empty(height, width, 3, => torch.tensor([[[0] * 3] * width] * height,
    test_images.py::test_an_image_of_a_packed_file_loads_more_than_twice_as_fast
15 resumed-share: steps_done * args.accumulate_steps => 0 * args.accumulate_steps
    acceptance/test_ranks.py::test_a_run_resumed_in_mid_epoch_ends_as_an_unbroken_one
15 bucket-order: rebuild_buckets(training)  # a pass => # a pass
    acceptance/test_ranks.py::test_a_run_resumed_in_mid_epoch_ends_as_an_unbroken_one[3-fp32-None]
16 in-place: open(new, "wb") as file: => open(target, "wb") as file, suppress(FileNotFoundError):
    acceptance/test_saving.py::test_a_save_that_fails_is_a_warning_and_the_last_one_an_error
16 file-that-is-there: if os.path.exists(path) and not args.resume: => if False:
    acceptance/test_saving.py::test_a_start_without_resume_never_touches_a_file_that_is_there
17 no-usr1: STOP_SIGNALS.append(signal.SIGUSR1) => pass
    acceptance/test_ranks.py::test_a_stop_signal_to_all_processes_saves_and_ends_with_75[SIGUSR1]
17 workers-end: worker_init_fn=ignore_stop_signals, => worker_init_fn=None,
    acceptance/test_ranks.py::test_a_stop_signal_to_all_processes_saves_and_ends_with_75[SIGTERM]
18 code-of-an-error: (error, Stopped) else EXIT_USER => (error, Stopped) else EXIT_FAILED
    acceptance/test_refusals.py::test_nodes_with_other_data_or_arguments_end_and_one_line_names_what
18 unlike-ranks: if settings.get(name) != value: => if False:
    acceptance/test_refusals.py::test_nodes_with_other_data_or_arguments_end_and_one_line_names_what
19 torchrun-killed: return watched and os.getppid() != process.parent => return False
    acceptance/test_ranks.py::test_ranks_whose_torchrun_is_killed_save_and_end
19 waits-for-ever: timer.start() => pass
    test_script.py::test_ranks_that_do_not_connect_end_after_the_timeout
20 compute-and-exposed: (mean.whole - mean.data - mean.exposed), => (mean.whole - mean.data),
    test_script.py::test_the_summary_leaves_the_first_steps_out
21 one-trace: f"rank{process.rank}.json.gz" => "rank0.json.gz"
    test_profile.py::test_the_trace_of_each_rank_has_the_parts_of_each_step[1]
22 no-quota: sharing, cpu_quota() // process.local_world_size) => sharing, sys.maxsize)
    test_script.py::test_ranks_that_have_the_same_cores_share_them
22 silent-cpu: or args.device == "cuda" or gpu_is_present()) => or args.device == "cuda")
    acceptance/test_launchers.py::test_a_gpu_that_pytorch_cannot_use_is_an_error_and_no_training
46 always-bf16: return "bf16" if args.bf16_speed_up >= 1.5 else "fp32" => return "bf16"
    test_script.py::test_a_cpu_without_bf16_instructions_trains_in_fp32
== launch_single.sh
23 sample-downloads: --weights none --batch_size 16 => --batch_size 16
    acceptance/test_launchers.py::test_a_users_options_come_after_those_of_the_sample_set
46 words-are-split: "$root/demo_coco_resnet18.py" "$@" => "$root/demo_coco_resnet18.py" $@
    acceptance/test_last_line.py::test_in_the_background_it_logs_all_lines_of_two_processes
== tools/run.py
24 full-disk-unsaid: self.log_is_whole = tee.wait() == 0 and self.log_is_whole => tee.wait()
    acceptance/test_last_line.py::test_a_full_disk_of_the_log_is_no_reason_to_stop_but_is_said
25 effect-first: [*own, quote, *peer, ended] => [*peer, quote, *own, ended]
    test_run_and_series.py::test_exit_codes_and_records_decide_how_a_start_ended
25 code-of-a-stop: return 128 + self.stopped => return FAILED
    acceptance/test_stop_signals.py::test_a_stop_that_saves_nothing_ends_with_128_and_the_signals_number
26 restart-anew: again = [*command.arguments, "--resume"] => again = [*command.arguments]
    acceptance/test_last_line.py::test_a_lost_start_is_repeated_but_no_user_error
26 user-error-again: if outcome in ("lost", "unreached") and => if outcome != "complete" and
    acceptance/test_last_line.py::test_a_lost_start_is_repeated_but_no_user_error
27 adapter-prefix: ["NCCL_IB_HCA"] = "=" + ",".join => ["NCCL_IB_HCA"] = ",".join
    test_run_and_series.py::test_nccl_is_kept_on_the_adapters_or_interface_except_with_efa
27 own-variable: if own is None: => if True:
    acceptance/test_launchers.py::test_a_line_says_which_of_the_users_own_variables_stay
29 probe-prevents: if outcome not in ("complete", "lost"): => if outcome != "complete":
    acceptance/test_launchers.py::test_a_probe_that_fails_does_not_prevent_the_training
== tools/slurm/coco.sbatch
28 requeued-cancel: if [[ $warned && $code -eq 75 ]]; then => if [[ $code -eq 75 ]]; then
    acceptance/test_launchers.py::test_a_job_is_submitted_again_only_if_slurm_has_warned_it
== tools/series.py
30 no-reverse: (labels if n % 2 else labels[::-1]) => labels
    acceptance/test_launchers.py::test_runs_of_a_series_have_ports_and_files_of_their_own
30 stop-ends-comparison: self.stopped = 0  # what => # what
    test_run_and_series.py::test_a_series_that_is_stopped_is_compared_as_far_as_it_came
31 threads-of-each: max(map(int, runs.values())) => min(map(int, runs.values()))
    acceptance/test_launchers.py::test_runs_with_several_numbers_of_processes_have_the_same_threads
== tools/two_nodes.sh
32 cable-in-bytes: $1 * 8 / 1e9 => $1 / 1e9
    acceptance/test_two_nodes.py::test_both_nodes_are_started_over_each_cable
== tools/preflight.py
33 first-network-only: pairs = min(len(networks), len(theirs["networks"])) => pairs = 1
    acceptance/test_preflight.py::test_each_network_in_ifname_is_tried
== tools/environment.sh
34 version-as-text: tuple(map(int, numbers.groups())) < (2, 6) => version < "2.6"
    acceptance/test_environment.py::test_torch_from_2_6_on_is_taken
== tools/analysis/runs.py
35 ranges-ignored: return (max(a) < min(b) or max(b) < min(a)) and high => return high
    test_compare_logs.py::test_repeats_decide_whether_two_runs_differ
35 other-precision: "precision": "precision", => "launcher": "launcher",
    test_compare_logs.py::test_unlike_runs_are_refused_with_what_differs
38 failed-is-scored: if log.failed: => if False:
    test_compare_logs.py::test_a_failed_network_is_told_and_the_other_one_compared
== tools/analysis/report.py
36 part-as-whole: more = sum(two[part] - one[part] for => more = sum(two[part] for
    test_compare_logs.py::test_report_is_as_recorded
36 ratio-upside-down: = slow.figures["wall_s"] / quick => = quick.figures["wall_s"] / slow
    test_compare_logs.py::test_of_logs_with_wall_times_alone_the_ratio_is_told
== tools/analysis/network.py
37 loopback-carries: if link.get("kind") != "loopback" and size(link)] => if size(link)]
    test_compare_logs.py::test_what_carried_the_probe_by_nccls_words_or_the_bytes
== tools/analysis/nccl.py
38 latest-warning: first = warnings[0] => first = warnings[-1]
    test_nccl_log.py::test_whole_texts_have_their_answers
== tools/analysis/logs.py
39 packed-log: utf16 = file.read(2) in (b"\\xff\\xfe", b"\\xfe\\xff") => utf16 = False
    test_compare_logs.py::test_a_log_that_gzip_or_powershell_has_written_is_read
== tools/analysis/plot.py
40 bytes-for-bits: append(8 * busbw) => append(busbw)
    test_compare_logs.py::test_a_bar_has_the_parts_of_a_step_and_a_curve_bus_bandwidth
== tools/check_coco.py
41 cut-off-png: , ("PNG", b"\\x89PNG", b"IEND")] => ]
    test_check_coco.py::test_images_that_are_cut_off_or_none_are_told_from_whole_ones
41 number-as-name: kinds = {kind, int} if key == "name" else {kind} => kinds = {kind}
    test_annotations.py::test_file_trains_rightly_or_one_line_says_what_is_wrong
== tools/prepare_coco.py
42 packing-from-0: end, length = read_index(lines, pixels.tell()) => end, length = set(), 0, 0
    test_prepare_coco.py::test_packing_that_was_killed_goes_on_and_makes_the_same_bytes
42 part-of-a-file: unfinished.write_bytes(data) => return path.write_bytes(data)
    test_prepare_coco.py::test_a_full_disk_leaves_no_part_of_a_file_and_the_next_run_goes_on
== tools/show_results.py
43 baseline-of-guesses: most = Counter(results.labels => most = Counter(results.guesses
    test_show_results.py::test_accuracy_and_rows_of_classes_count_each_answer_once
== docs/lesson/ddp.py
44 lesson-order: sampler.set_epoch(epoch) => pass
    test_lesson.py::test_programs_print_what_the_page_shows_and_agree
== docs/lesson/check.py
44 check-without-4: if not same(*weights[:2]): => if False:
    test_lesson_check.py::test_what_a_program_lacks_is_said[without 4]
== docs/lesson/shard.py
45 bytes-of-zero: "ZeRO": 3, => "ZeRO": 2,
    test_parallel.py::test_each_rank_keeps_the_bytes_by_hand_and_all_train_alike
== docs/lesson/plain.py
45 notebook-of-before: lr=0.5 => lr=0.4
    test_lesson.py::test_notebook_is_made_of_the_pages_and_programs
== tests/gpu/test_one_gpu.py
47 name-of-before: plain_wrap, demo.wrap_model => plain_wrap, demo.wrap_ddp
    test_layout.py::test_gpu_tests_change_functions_that_the_script_has
== tests/gpu/test_nccl.py
47 alone-over-gloo: "WORLD_SIZE": "2"} => "WORLD_SIZE": "1"}
    gpu/test_nccl.py::test_replicas_are_identical_and_the_parts_of_a_step_add_up
"""
Fault = namedtuple("Fault", "promise name file test old new")


def read_table() -> list[Fault]:
    found, file = [], ""
    for line in TABLE.strip().splitlines():
        head, _, rest = line.partition(" ")
        if head == "==":
            file = rest
        elif head:
            name, _, change = rest.partition(": ")
            number = int(head)
        else:
            test = f"tests/{line.strip()}"
            found.append(Fault(number, name, file, test, *change.split(" => ")))
    return found


def copy_project(folder: Path) -> Path:
    """A copy of what git knows or would add, beside the data that the tests look for."""
    os.chmod(folder, 0o711)  # tests that become another user go through it
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            target = folder / "project" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
    if (ROOT.parent / "shared").exists():
        (folder / "shared").symlink_to(ROOT.parent / "shared")
    return folder / "project"


def run_tests(project: Path, *words: str, seconds: int) -> tuple[int, str]:
    """Exit code and output of pytest. After so many seconds it is told to end."""
    options = ["-q", "-m", "", "-p", "no:cacheprovider", "--tb=short", *words]
    env = {**os.environ, "PYTEST_ADDOPTS": "", "GPU_HARNESS": "gloo"}  # tests/gpu on CPUs
    command = [sys.executable, "-m", "pytest", *options]
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        process = subprocess.Popen(command, cwd=project, env=env, stdout=out, stderr=out)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # what the test has started ends with it
            process.wait()
            out.write(f"\nnot over after {seconds} s")
        out.seek(0)
        return process.returncode, out.read().strip()


def is_noticed(fault: Fault) -> bool:
    """Tries a fault, and says in a line what came of it."""
    begin, verdict, end = time.monotonic(), "cannot be put in", ""
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
        project = copy_project(Path(folder))
        text = (project / fault.file).read_text()
        if text.count(fault.old) == 1:
            (project / fault.file).write_text(text.replace(fault.old, fault.new))
            code, text = run_tests(project, "-x", "-n", "0", fault.test, seconds=SECONDS)
            end = text.rpartition("\n")[2]
            verdict = "noticed" if code == 1 and re.search(r"\d failed", end) else "NOT NOTICED"
    took = f"{time.monotonic() - begin:3.0f} s"
    why = "" if verdict == "noticed" else f": {end or fault.old}"
    print(f"{fault.promise:2} {fault.name:20} {took} {verdict}{why}", flush=True)
    return verdict == "noticed"


def pass_without_faults(faults: list[Fault]) -> bool:
    """Whether all their tests pass, and none is skipped."""
    tests = dict.fromkeys(fault.test for fault in faults)
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
        words, project = ["-n", "2", "--dist", "loadfile", *tests], copy_project(Path(folder))
        code, text = run_tests(project, *words, seconds=SECONDS * len(tests))
    print(text)
    return code == 0 and not re.search(r"skipped|xfailed", text.rpartition("\n")[2])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all faults")
    parser.add_argument("--healthy", action="store_true", help="run their tests without a fault")
    args = parser.parse_args()
    by_name = {fault.name: fault for fault in read_table()}
    if unknown := [name for name in args.names if name not in by_name]:
        parser.error(f"no such fault: {', '.join(unknown)}")
    faults = [by_name[name] for name in args.names or by_name]
    if args.healthy:
        return 0 if pass_without_faults(faults) else 1
    begin = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        noticed = [*pool.map(is_noticed, faults)]
    minutes = (time.monotonic() - begin) / 60
    print(f"{sum(noticed)} of {len(faults)} faults were noticed, in {minutes:.1f} minutes")
    return 0 if all(noticed) else 1


if __name__ == "__main__":
    sys.exit(main())
