"""One step of each rank in the traces of torch.profiler: when it computes, when it all-reduces.

The files are rankR.json.gz, in Chrome's format: events with category, name, and in microseconds
begin and duration. On GPUs kernels count, NCCL's apart. On CPUs compute is the operators of the
step's own thread; Gloo's all-reduces run in others, and count from their start, waiting included.
"""

import gzip
import json
import re
from dataclasses import dataclass
from pathlib import Path

from analysis.logs import UserError
from analysis.words import ms

STEP = "ProfilerStep#"  # with a number that counts from 0: #9 is the tenth step
MOST_RANKS = 16  # shown


@dataclass
class Step:
    """What one rank did in a step: lists of (begin, end) in seconds since the step's begin."""

    rank: int
    number: int
    seconds: float
    compute: list
    all_reduce: list

    @property
    def beside_s(self):
        """Seconds of all-reduce beside compute: hidden, as far as it costs compute no time."""
        pairs = ((a, b) for a in self.compute for b in self.all_reduce)
        return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in pairs)

    def __str__(self):
        text = f"rank {self.rank}: {STEP}{self.number} of {ms(self.seconds)}: compute "
        text += f"{ms(total(self.compute))}, all-reduce {ms(total(self.all_reduce))}, "
        return f"{text}of which {ms(self.beside_s)} beside compute"


def read_traces(folder):
    """The last profiled step that all ranks have. Raises UserError."""
    found = ((re.fullmatch(r"rank(\d+)\.json\.gz", file.name), file) for file in files_of(folder))
    files = sorted((int(match[1]), file) for match, file in found if match)
    if not files:
        raise UserError(f"{folder}: no rank0.json.gz, rank1.json.gz, ... in this folder")
    traces = {rank: read_events(file) for rank, file in files[:MOST_RANKS]}
    shared = set.intersection(*(set(step_events(events)) for events in traces.values()))
    if not shared:
        raise UserError(f"{folder}: no profiled step that all of its {len(traces)} traces have")
    return [read_step(rank, events, max(shared)) for rank, events in traces.items()]


def files_of(folder):
    if not Path(folder).is_dir():
        raise UserError(f"--trace {folder}: no such folder")
    return Path(folder).iterdir()


def read_events(file):
    """The events of a trace that last, in the order of their begin."""
    try:
        with gzip.open(file, "rt", encoding="utf-8", errors="replace") as text:
            events = [event for event in json.load(text)["traceEvents"] if event.get("ph") == "X"]
            return sorted(events, key=lambda event: event["ts"])
    except (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: not a trace of torch.profiler: {error}") from None


def step_events(events):
    """{number: event}; a GPU's own are later than the script's, and count."""
    found = {}
    for category in ("user_annotation", "gpu_user_annotation"):
        for event in events:
            if event.get("cat") == category and event["name"].startswith(STEP):
                found[int(event["name"].removeprefix(STEP))] = event
    return found


def read_step(rank, events, number):
    step = step_events(events)[number]
    begin, end = step["ts"], step["ts"] + step["dur"]
    inside = [
        event for event in events if event["ts"] < end and event["ts"] + event["dur"] > begin
    ]
    on_gpu = [event for event in inside if event.get("cat") == "kernel"]
    if on_gpu:
        compute = [event for event in on_gpu if not event["name"].startswith("nccl")]
        reduce = [event for event in on_gpu if re.match("nccl.*AllReduce", event["name"])]
    else:
        own = [event for event in inside if event["tid"] == step["tid"]]
        compute = [event for event in own if event.get("cat") == "cpu_op"]
        compute = [event for event in compute if not event["name"].startswith("c10d::")]
        reduce = [event for event in inside if event["name"] == "gloo:all_reduce"]
    lists = (merged(chosen, begin, end) for chosen in (compute, reduce))
    return Step(rank, number, step["dur"] / 1e6, *lists)


def merged(events, begin, end):
    """(begin, end) of what events in order cover of a step, in seconds since its begin."""
    spans = []
    for event in events:
        first = max(0.0, event["ts"] - begin) / 1e6
        last = min(end - begin, event["ts"] + event["dur"] - begin) / 1e6
        if spans and first <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(last, spans[-1][1])
        else:
            spans.append((first, last))
    return spans


def total(spans):
    return sum(end - begin for begin, end in spans)
