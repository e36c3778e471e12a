"""Small slips in the script, the launchers and the tools, and the tests that should notice each.

For whoever moves, renames or rewrites code: a test that was lost on the way, or that has become
blind, shows here. `run.py` beside this file makes one slip after the other in a copy of the tree.

A break that has become stale is mended here: `file` names where its line is now, `old` is that
line's present text, which must stand once in the file, and `tests` are what the tests are called
now, the cheapest first. A break whose code is gone for good is replaced by another slip of the
same kind. tests/test_breaks.py tells at once which ones are stale.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

SCRIPT = "demo_coco_resnet18.py"
LAUNCHER = "launch_multinode.sh"


@dataclass(frozen=True)
class Break:
    """One slip."""

    name: str
    seen: str  # by a user, if no test noticed: one sentence
    file: str  # from the root of the repository
    old: str  # stands once in the file
    new: str
    tests: tuple[str, ...]  # pytest's names of those that should fail, the cheapest first
    long: bool = False  # they run with TEST_LONG=1 alone

    def broken(self, root: Path) -> str:
        """The file's text with the slip in it. Raises Stale."""
        path = root / self.file
        text = path.read_text() if path.is_file() else ""
        if text.count(self.old) > 1:
            raise Stale(f"stale: text stands {text.count(self.old)} times in {self.file}")
        if self.old not in text:
            others = [path.relative_to(root) for path in sources(root) if self.old in read(path)]
            now = f", but in {', '.join(map(str, others))}" if others else " any more"
            raise Stale(f"stale: text not found in {self.file}{now}")
        return text.replace(self.old, self.new)

    def missing_tests(self, root: Path) -> list[str]:
        """Those of its tests that are not in the files that they name."""
        found = []
        for test in self.tests:
            file, _, name = test.partition("::")
            function = rf"^def {re.escape(name.partition('[')[0])}\("
            if not (name and re.search(function, read(root / file), re.MULTILINE)):
                found.append(test)
        return found


class Stale(Exception):
    """The table does not fit the tree."""


def read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def sources(root: Path) -> list[Path]:
    """Where code that has moved may be now."""
    paths = [*root.glob("*"), *(root / "tools").rglob("*")]
    return sorted(path for path in paths if path.suffix in (".py", ".sh"))


BREAKS = [
    # --- The script: ranks and their shares of the images ----------------------------------------
    Break(
        name="epoch-not-set",
        seen="Each epoch repeats the first one's order and crops, and nothing in the log says so.",
        file=SCRIPT,
        old="    run.loader.sampler.set_epoch(epoch)",
        new="    run.loader.sampler.set_epoch(1)",
        tests=("tests/test_demo.py::test_damaged_image_is_left_out_and_named",),
    ),
    Break(
        name="share-by-local-rank",
        seen="All nodes train on the same images; those of the other shares are never seen.",
        file=SCRIPT,
        old="train_list.names, process.world_size, process.rank, shuffle=True",
        new="train_list.names, process.world_size, process.local_rank, shuffle=True",
        tests=("tests/test_nodes.py::test_two_nodes_train_where_the_own_name_is_loopback",),
    ),
    Break(
        name="validation-of-one-share",
        seen="Top-1 is that of rank 0's images, counted once for each rank.",
        file=SCRIPT,
        old="val_positions = range(process.rank, len(val_list.names), process.world_size)",
        new="val_positions = range(0, len(val_list.names), process.world_size)",
        tests=("tests/test_demo.py::test_validation_counts_each_image_once",),
    ),
    # --- The script: gradients and weights -------------------------------------------------------
    Break(
        name="ddp-bypassed",
        seen="No gradient is sent: each rank trains a model of its own, as fast as on one node.",
        file=SCRIPT,
        old="logits = forward(run, run.ddp, images)",
        new="logits = forward(run, run.model, images)",
        tests=("tests/test_demo.py::test_replicas_are_equal_after_training",),
    ),
    Break(
        name="sent-with-each-micro-batch",
        seen="--accumulate_steps sends as much as if it were not given, and gains nothing.",
        file=SCRIPT,
        old="last = number == len(micro_batches)",
        new="last = number <= len(micro_batches)",
        tests=("tests/test_demo.py::test_accumulation_on_two_ranks_sends_gradients_once",),
        long=True,
    ),
    Break(
        name="sum-for-mean",
        seen="With --accumulate_steps 4 the gradients are four times as large as they should be.",
        file=SCRIPT,
        old="            loss = loss / len(micro_batches)",
        new="            loss = loss * 1",
        tests=("tests/test_demo.py::test_updates_are_those_of_the_larger_batch",),
    ),
    Break(
        name="statistics-not-shared",
        seen="Each rank validates with its own batch-norm statistics, and the replicas differ.",
        file=SCRIPT,
        old="for buffer in run.model.buffers():",
        new="for buffer in run.model.parameters():",
        tests=("tests/test_demo.py::test_replicas_are_equal_after_training",),
    ),
    Break(
        name="replicas-compared-with-themselves",
        seen="The Summary says that the replicas are identical, also where they are not.",
        file=SCRIPT,
        old='"replicas_identical": len(set(digests)) == 1,',
        new='"replicas_identical": digests[0] == weights.hexdigest(),',
        tests=("tests/test_demo.py::test_replicas_that_drift_apart_are_reported",),
        long=True,
    ),
    # --- The script: images ----------------------------------------------------------------------
    Break(
        name="damaged-images-in-the-mean",
        seen="The mean loss of an epoch is too high by what damaged images would have had.",
        file=SCRIPT,
        old="run.unread_losses.append((loss, len(labels) - damaged))",
        new="run.unread_losses.append((loss, len(labels)))",
        tests=("tests/test_demo.py::test_damaged_image_is_left_out_and_named",),
    ),
    Break(
        name="crop-without-epoch",
        seen="An image is cropped and turned in the same way in each epoch.",
        file=SCRIPT,
        old="hash((seed, *key)) % 2**32",
        new="hash((seed, key[1])) % 2**32",
        tests=("tests/test_demo.py::test_pixels_are_a_function_of_seed_epoch_and_sample",),
    ),
    # --- The script: checkpoints, stops and errors -----------------------------------------------
    Break(
        name="checkpoint-in-place",
        seen="A full disk, or a kill while it is written, destroys the only checkpoint.",
        file=SCRIPT,
        old="""open(f"{path}.new", "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
                os.replace(f"{path}.new", path)""",
        new="""open(path, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())""",
        tests=("tests/test_faults.py::test_full_disk",),
    ),
    Break(
        name="resume-repeats-images",
        seen="A run resumed in mid-epoch with --accumulate_steps trains on some images twice.",
        file=SCRIPT,
        old="skip=seen * args.accumulate_steps * args.batch_size",
        new="skip=seen * args.batch_size",
        tests=("tests/test_faults.py::test_interrupted_and_resumed_equals_uninterrupted",),
    ),
    Break(
        name="timeout-in-minutes",
        seen="A peer that has gone silent is waited for 60 times as long as --timeout says.",
        file=SCRIPT,
        old="timeout=timedelta(seconds=args.timeout),",
        new="timeout=timedelta(minutes=args.timeout),",
        tests=("tests/test_faults.py::test_gloos_error_of_a_silent_peer_is_from_outside",),
        long=True,
    ),
    Break(
        name="lost-connection-is-a-bug",
        seen="A lost connection ends in a page of traceback instead of one line.",
        file=SCRIPT,
        old='return "lost" if known or isinstance(error, (OSError, dist.DistError)) else "bug"',
        new='return "lost" if known and isinstance(error, (OSError, dist.DistError)) else "bug"',
        tests=("tests/test_faults.py::test_error_file_tells_the_kind",),
    ),
    Break(
        name="stop-with-another-code",
        seen="A job that was stopped to go on later counts as failed: no scheduler requeues it.",
        file=SCRIPT,
        old="code = os.EX_TEMPFAIL",
        new="code = os.EX_UNAVAILABLE",
        tests=("tests/test_faults.py::test_error_file_tells_the_kind[stop]",),
    ),
    # --- The script: times -----------------------------------------------------------------------
    Break(
        name="memory-kept-too-soon",
        seen="Each step is some per cent slower: what it frees lies between what stays.",
        file=SCRIPT,
        old="if len(timer.steps) == 1:",
        new="if len(timer.steps) == 0:",
        tests=(
            "tests/test_demo.py::"
            "test_memory_is_kept_when_all_is_there_that_lives_longer_than_a_step",
        ),
        long=True,
    ),
    Break(
        name="data-wait-of-a-whole-step",
        seen="What goes on between two steps counts as waiting for data, and so does a log line.",
        file=SCRIPT,
        old='data = self.between(moments["waiting for data"], moments["data"])',
        new='data = self.between(moments["begin"], moments["data"])',
        tests=("tests/test_demo.py::test_parts_of_a_step_are_told_by_its_moments",),
    ),
    Break(
        name="step-line-in-seconds",
        seen="The step lines say `data 0.0 ms`, however long the loader keeps the step waiting.",
        file=SCRIPT,
        old='times = f"data {1e3 * data:.1f} ms',
        new='times = f"data {data:.1f} ms',
        tests=("tests/test_interconnect.py::test_one_process_waits_for_nobody",),
    ),
    Break(
        name="summary-in-seconds",
        seen="The Summary has seconds under names that end in _ms; each ratio looks as before.",
        file=SCRIPT,
        old="data, exposed, step, _ = (1e3 * np.mean(",
        new="data, exposed, step, _ = (np.mean(",
        tests=("tests/test_interconnect.py::test_one_process_waits_for_nobody",),
    ),
    # --- What the network did: counters, probe, NCCL's text --------------------------------------
    Break(
        name="wire-rate-in-bytes",
        seen="Each link seems to deliver an eighth of what it states.",
        file="tools/probe_link.py",
        old='link["wire_Gbps"] = 8e-6 * max(',
        new='link["wire_Gbps"] = 1e-6 * max(',
        tests=("tests/test_probe.py::test_known_rate_by_the_gradients_and_by_the_slope",),
    ),
    Break(
        name="announced-before-proven",
        seen="NCCL is said to use InfiniBand where its connections went over sockets.",
        file="tools/analysis/nccl_text.py",
        old="        if self.connected:\n",
        new="        if self.connected and not self.using:\n",
        tests=("tests/test_nccl_log.py::test_connections_outrank_what_was_announced",),
    ),
    Break(
        name="problem-of-another-name",
        seen="A missing library is told as a missing adapter, with the advice for that.",
        file="tools/analysis/nccl_rules.py",
        old='libibverbs\\.so\\.1\\b",\n        "verbs_library_missing",',
        new='libibverbs\\.so\\.1\\b",\n        "no_ib_device",',
        tests=("tests/test_nccl_log.py::test_a_problem_is_told_with_its_line",),
    ),
    Break(
        name="slow-link-passes",
        seen="A link that runs at a tenth of its stated speed is not called slow.",
        file="tools/common/thresholds.py",
        old="HEALTHY = 0.5 ",
        new="HEALTHY = 0.05 ",
        tests=("tests/test_compare_logs.py::test_bound_by[link slower than stated]",),
    ),
    Break(
        name="wire-blamed-for-waiting",
        seen="A faster network is advised where ranks wait for each other.",
        file="tools/analysis/runs.py",
        old="self.probe_s < exposed_s / 2",
        new="exposed_s < self.probe_s / 2",
        tests=("tests/test_compare_logs.py::test_bound_by[overlap]",),
    ),
    # --- Data, benchmark, launchers --------------------------------------------------------------
    Break(
        name="last-annotation-for-the-first",
        seen="A set read by its file of first annotations alone has other labels than the whole.",
        file="tools/prepare_coco.py",
        old='first = {a["image_id"]: a for a in reversed(annotations)}',
        new='first = {a["image_id"]: a for a in annotations}',
        tests=("tests/test_prepare.py::test_first_annotations_are_those_of_the_whole_file",),
    ),
    Break(
        name="sample-without-seed",
        seen="The nodes make different sample sets, and a run of all of them is refused.",
        file="tools/make_sample_coco.py",
        old="np.random.default_rng([args.seed, 0])",
        new="np.random.default_rng()",
        tests=("tests/test_sample.py::test_same_arguments_same_bytes",),
    ),
    Break(
        name="rounds-in-one-order",
        seen="On a machine that warms up a benchmark favours what stands last.",
        file="tools/benchmarks/runner.py",
        old="[:: 1 - 2 * (turn % 2)]",
        new="[:: 1 - 2 * (turn % 1)]",
        tests=("tests/test_benchmark.py::test_rounds_take_turns",),
    ),
]
