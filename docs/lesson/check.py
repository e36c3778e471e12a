"""Which of the six changes are made, and which are missing? python check.py mine.py

torchrun starts the program with two ranks, and plain.py runs beside it. Both are judged by what
they do: the images that the model gets, the weights and gradients of each step, and the lines
`epoch N: loss ...` and `last weights`. Rank 1 gets another seed, so that different first weights
show. Both ranks have local rank 0, as on two nodes.
"""

import contextlib
import faulthandler
import inspect
import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from itertools import chain, product
from pathlib import Path

HANGS = 20  # seconds
TORCHRUN = "-m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc_per_node=2"
LOSS = re.compile(r"epoch (\d+).* loss (-?\d+\.\d+|inf|nan), \d+ of (\d+) right")
WEIGHTS = re.compile(r"last weights: sum (-?\d+\.\d+|inf|nan)")
PROGRESS = {"begin": "begins", "end": "has ended", "error": "has failed"}
QUESTIONS = {
    "1": "What does torchrun tell each process, and where?",
    "2": "Which call connects the processes, and which one disconnects them at the end?",
    "3": "Who gives a rank its images, how many in a step, and what changes with the epoch?",
    "4": "Whose weights should all ranks begin with, and what copies them?",
    "5": "What must the forward pass go through, so that backward averages the gradients?",
    "4 or 5": "Which model does DDP wrap, and which do you call?",
    "6": "How does a rank get the results of the others, and which rank prints?",
}


def watch(program, out):
    """Runs the program in this process. `out`, a file that is written line by line, gets what it
    prints, what it does (in JSON), and the line where it is stopped.
    """
    import torch
    import torch.distributed as dist
    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim.optimizer import register_optimizer_step_pre_hook
    from torch.utils.data import distributed  # its sampler may ask for the rank

    rank = int(os.environ.get("RANK", 0))
    Environ, manual_seed, get_rank = type(os.environ), torch.manual_seed, dist.get_rank
    init_process_group, init_ddp = dist.init_process_group, DistributedDataParallel.__init__
    destroy_process_group, exit_at_once = dist.destroy_process_group, os._exit
    own = os.getpid()

    def note(*words):
        out.write(f"\n{json.dumps(['note', *words])}\n")

    class Watched(Environ):
        def __getitem__(self, name):
            note(name)
            return super().__getitem__(name)

    def join(*arguments, **options):
        note("join")
        os.environ.__class__ = Environ  # PyTorch reads RANK, too
        init_process_group(*arguments, **options)
        os.environ.__class__ = Watched

    def leave(*arguments, **options):
        note("leave")
        destroy_process_group(*arguments, **options)

    def wrap(*arguments, **options):
        note("DDP")
        init_ddp(*arguments, **options)

    def ask(*arguments, **options):
        if inspect.currentframe().f_back.f_code.co_filename in (program, distributed.__file__):
            note("RANK")
        return get_rank(*arguments, **options)

    def end(code):
        if os.getpid() != own:  # a loader worker
            exit_at_once(code)
        sys.exit(code)

    def forward(module, inputs):
        if torch.is_grad_enabled() and inputs and getattr(inputs[0], "shape", ())[1:2] == (1,):
            note("images", [zlib.crc32(image.tobytes()) for image in inputs[0].cpu().numpy()])

    def numbers(tensors):
        return [number for each in tensors for number in each.detach().flatten().tolist()]

    def step(optimizer, *_):
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        note("step", numbers(weights), numbers(gradients))

    torch.manual_seed = torch.random.manual_seed = lambda seed: manual_seed(seed + rank)
    dist.init_process_group, dist.get_rank, DistributedDataParallel.__init__ = join, ask, wrap
    # A program may end with os._exit, but the note of its end has to come after that.
    dist.destroy_process_group, os._exit = leave, end
    register_module_forward_pre_hook(forward)
    register_optimizer_step_pre_hook(step)
    os.environ["LOCAL_RANK"], os.environ.__class__ = "0", Watched
    sys.argv, sys.path[0] = [program], str(Path(program).parent)
    faulthandler.enable(out)
    faulthandler.register(signal.SIGTERM, out, chain=True)  # torchrun ends the other rank so
    # The first optimizer makes PyTorch import more, for seconds: they are not the program's.
    torch.optim.SGD([torch.zeros(1)], lr=1.0)
    note("begin")
    faulthandler.dump_traceback_later(HANGS, exit=True, file=out)
    with contextlib.redirect_stdout(out):
        try:
            runpy.run_path(program, run_name="__main__")
            note("end")
        except SystemExit:
            note("end")
            raise
        except Exception as error:
            # A stack that is written from here on has no line of the program any more.
            faulthandler.cancel_dump_traceback_later()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            frames = traceback.extract_tb(error.__traceback__)
            line = [frame.lineno for frame in frames if frame.filename == program][-1]
            text = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
            note("error", time.time(), line, text)
            sys.exit(1)
        finally:
            faulthandler.cancel_dump_traceback_later()
            os._exit = exit_at_once


class Process:
    """What a process did, from its file."""

    def __init__(self, program, path):
        self.text = Path(path).read_text() if Path(path).exists() else ""
        # Of each line with a result: how it begins, the figure, and for how many images.
        self.results = [(f"epoch {n}: loss", *words) for n, *words in LOSS.findall(self.text)]
        self.results += [("last weights", total, "") for total in WEIGHTS.findall(self.text)]
        self.did, self.steps, images = {}, [], []
        for line in re.findall(r'^\["note", .*', self.text, re.M):
            _, what, *words = json.loads(line)
            self.did[what] = words
            if what == "images":
                images = words[0]
            elif what == "step":
                self.steps.append((images, *words))
        places = re.findall(rf'"{re.escape(program)}", line (\d+)', self.text)
        self.order, line, self.error = self.did.get("error", (1e99, int([*places, 0][0]), ""))
        self.place = "its end" if "end" in self.did else "unknown line"
        if line:
            code = Path(program).read_text(errors="replace").splitlines()[line - 1]
            self.place = f"line {line}, `{code.strip()}`"
        by_a_signal = not places or "Fatal Python error" in self.text
        if by_a_signal and not self.error and "end" not in self.did:
            self.order, self.error = 0, "A rank was killed."

    def epochs(self, count):
        """The images of each step, epoch by epoch."""
        every = [images for images, *_ in self.steps]
        length = len(every) // count
        return [every[n * length : (n + 1) * length] for n in range(count)]


def stopped(ranks):
    """Lines that say where the ranks were, unless they came to their end: the cause first."""
    if all("end" in rank.did for rank in ranks):
        return []
    order = sorted((0, 1), key=lambda number: ranks[number].order)
    cause = ranks[order[0]]
    hangs = any("\nTimeout (" in rank.text for rank in ranks)
    lines = [f"It hangs for {HANGS} s." if hangs else f"It fails. {cause.error}"]
    lines += [f"    Rank {number}: {ranks[number].place}" for number in order]
    if hangs or cause.order == 0:
        lines.append("    Do all ranks make the same collective calls in the same order?")
    return lines


def untrained(rank, epochs):
    """Why its steps say nothing about the changes; nothing if they do."""
    if not rank.steps:
        return "It never trains: optimizer.step() is not called."
    if len(rank.steps) % epochs:
        text = f"It makes {len(rank.steps)} optimizer steps in {epochs} epochs."
        return f"{text} Does it end early, or is EPOCHS another one?"
    if not all(gradients for _, _, gradients in rank.steps):
        return "It never trains: the weights that the optimizer has get no gradients."
    if len(rank.steps) > 1 and rank.steps[0][1] == rank.steps[-1][1]:
        return "It never trains: optimizer.step() leaves the weights as they are."
    return ""


def same(one, other):
    """Whether weights or gradients are the same, except for rounding."""
    return len(one) == len(other) and math.dist(one, other) <= 1e-3 * math.hypot(*other)


BOTH = " (Both have local rank 0 here, as on two nodes.)"


def shares(ranks, plain):
    """All that is wrong with the images of the ranks; nothing if they are right."""
    one, two, wanted = (process.epochs(len(plain.results) - 1) for process in (*ranks, plain))
    mine, other, every = (set().union(*some[0]) for some in (one, two, wanted))
    found = []
    if both := mine & other:
        by_place = BOTH if "LOCAL_RANK" in ranks[0].did else ""
        found.append(f"In epoch 0 both ranks train on the same {len(both)} images.{by_place}")
    if nobody := every - mine - other:
        found.append(f"In epoch 0 no rank trains on {len(nobody)} of the images.")
    if (size := len(one[0][0]) + len(two[0][0])) != len(wanted[0][0]):
        found.append(
            f"A step of both ranks has {size} images, one of plain.py {len(wanted[0][0])}."
        )
    if one[0] == one[-1]:
        found.append("The last epoch has the same images in the same order as the first one.")
    if found:
        return " ".join(found)
    for steps in zip(chain(*one), chain(*two), chain(*wanted), strict=False):
        if {*steps[0], *steps[1]} != {*steps[2]}:
            return "A step of both ranks has other images than plain.py's."
    return ""


def replicas(ranks, plain, whole):
    """{change: what is wrong} with weights and gradients; `whole`: the images are right."""
    weights, gradients = ([p.steps[0][n] for p in (*ranks, plain)] for n in (1, 2))
    found = {}
    if not same(*weights[:2]):
        found["4"] = "Before the first step the ranks have different weights."
    if not all(same(a[2], b[2]) for a, b in zip(*(rank.steps for rank in ranks), strict=False)):
        found["5"] = "After backward the ranks have different gradients."
    if len(found) == 2 and "DDP" in ranks[0].did:
        return {"4 or 5": "DDP is made, but weights and gradients of the ranks differ."}
    if whole and not found and same(*weights[1:]) and not same(*gradients[1:]):
        times = math.hypot(*gradients[0]) / math.hypot(*gradients[2])
        found["5"] = f"After the first backward the gradients are {times:.3g} times plain.py's."
    return found


def results(ranks, plain):
    """What is wrong with the lines of the results; nothing if they are right."""
    printed = ranks[0].results + ranks[1].results
    if not printed:
        return "No rank prints a result. Is the rank a number? The environment has text."
    lines = [line for line, *_ in printed]
    for line, *_ in plain.results:
        if lines.count(line) != 1:
            place = BOTH if "LOCAL_RANK" in ranks[0].did else ""
            return f"`{line} ...` is printed {lines.count(line)} times, not once.{place}"
    images = sum(len(step) for rank in ranks for step in rank.epochs(len(plain.results) - 1)[0])
    (counted,) = [counted for line, _, counted in printed if line == "epoch 0: loss"]
    if images and images != int(counted):
        return f"The line of epoch 0 is about {counted} images, but the ranks had {images}."
    return ""


def other_figure(ranks, plain):
    """Lines about the first result that is not plain.py's; none if all are."""
    own = {line: float(figure) for rank in ranks for line, figure, _ in rank.results}
    for line, figure, _ in plain.results:
        if not abs(own[line] - float(figure)) < 0.02:
            what = f"`{line} ...` shows {own[line]:.4f}, with plain.py {figure}."
            if not same(ranks[0].steps[0][1], plain.steps[0][1]):
                return [what, "    What made plain.py's first weights?"]
            if not same(ranks[0].steps[-1][1], plain.steps[-1][1]):
                return [what, "    What else did you change in a step?"]
            return [f"Change 6 is missing. {what}", f"    {QUESTIONS['6']}"]
    return []


def judge(ranks, plain):
    """Lines that say which changes are made, and what is wrong; none if nothing is."""
    trouble, found = stopped(ranks), {}
    epochs = 1 if trouble else len(plain.results) - 1
    each = [untrained(rank, epochs) for rank in ranks]
    idle = each[0] or each[1].replace("It ", "Rank 1 ")
    if not each[1]:
        idle = idle.replace("It ", "Rank 0 ")
    unknown = {"3", "6"} if trouble or idle else set()
    if not all("RANK" in rank.did for rank in ranks):
        found["1"] = "The program does not read its rank."
        if "LOCAL_RANK" in ranks[0].did:
            found["1"] += " It reads LOCAL_RANK, which is 0 in both processes if each has a node."
    joined = sum("join" in rank.did for rank in ranks)
    if joined < 2:
        found["2"] = f"init_process_group is not called{' by one rank' if joined else ''}."
    elif not trouble and not all("leave" in rank.did for rank in ranks):
        found["2"] = "It joins, but destroy_process_group is not called."
    if not trouble and not idle:
        found["3"] = shares(ranks, plain)
    if idle:
        unknown |= {"4", "5"}
    else:
        found |= replicas(ranks, plain, whole=not trouble and not found["3"])
        if ranks[0].steps[0][0] == ranks[1].steps[0][0]:  # so equal gradients prove nothing
            unknown.add("5")
    if not trouble and not idle:
        found["6"] = results(ranks, plain)
    found = {change: what for change, what in found.items() if what}
    lines = trouble or [line for line in [idle] if line]
    if not found and not lines:
        lines = other_figure(ranks, plain)
        missing = "6" if "Change 6" in "".join(lines) else ""
        return lines and [overview(missing, set()), *lines]
    for change, what in found.items():
        name = f"Change {change}" if len(change) == 1 else f"One of {change}"
        lines += [f"{name} is missing. {what}", f"    {QUESTIONS[change]}"]
    return [overview("".join(found), unknown), *lines]


def overview(missing, unknown):
    """The numbers of the six changes: made, missing, unknown."""
    kinds = {"Made": [], "Missing": [], "Cannot tell yet": []}
    for change in "123456":
        kind = "Missing" if change in missing else "Made"
        if kind == "Made" and change in unknown:
            kind = "Cannot tell yet"
        kinds[kind].append(change)
    listed = [f"{kind}: {', '.join(changes)}." for kind, changes in kinds.items() if changes]
    return " ".join(listed)


def wait(runs, folder):
    """Until both have ended. Says meanwhile which processes begin and end."""
    start, said = time.monotonic(), set()
    names = {"plain": "plain.py", "0": "rank 0", "1": "rank 1"}
    running = True
    while running:
        running = any(run.poll() is None for run in runs)
        for name, what in product(names, PROGRESS):
            path = Path(folder, name)
            text = path.read_text() if path.exists() else ""
            if f'["note", "{what}"' in text and (name, what) not in said:
                said.add((name, what))
                seconds = time.monotonic() - start
                print(f"{seconds:3.0f} s: {names[name]} {PROGRESS[what]}", flush=True)
        time.sleep(0.2)


def main():
    if sys.argv[1:2] == ["--watch"]:
        with open(f"{sys.argv[3]}/{os.environ.get('RANK', 'plain')}", "w", buffering=1) as out:
            watch(sys.argv[2], out)
        return
    if len(sys.argv) != 2:
        sys.exit("usage: python check.py mine.py")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
    program, plain = str(Path(sys.argv[1]).resolve()), str(Path(__file__).with_name("plain.py"))
    try:
        compile(Path(program).read_bytes(), program, "exec")
    except OSError as error:
        sys.exit(f"{sys.argv[1]}: {error.strerror}")
    except SyntaxError as error:
        sys.exit(f"{sys.argv[1]}, line {error.lineno}: {error.msg}")
    print(
        f"Starting {sys.argv[1]} with two ranks, and plain.py. PyTorch has to load first.",
        flush=True,
    )
    with tempfile.TemporaryFile("w+") as log, tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        runs = [
            subprocess.Popen([sys.executable, *words], env=env, stdout=log, stderr=log)
            for words in (
                [*TORCHRUN.split(), __file__, "--watch", program, folder],
                [__file__, "--watch", plain, folder],
            )
        ]
        wait(runs, folder)
        reference = Process(plain, f"{folder}/plain")
        ranks = [Process(program, f"{folder}/{rank}") for rank in (0, 1)]
        if len(reference.results) < 2 or not all(rank.text for rank in ranks):
            log.seek(0)
            sys.exit(f"{log.read()}\ntorchrun or plain.py fails: see above.")
    lines = judge(ranks, reference)
    print("\n".join(lines) or "Complete. Start it with 4 ranks, too: are the figures the same?")
    sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
