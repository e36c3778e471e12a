"""What the files of one run say: step lines, records, how it ended; no figure of it is derived."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from analysis import UserError
from common.records import (
    COUNTERS,
    END,
    EPOCH,
    ESCAPES,
    LAUNCHER,
    OURS,
    PREFIX,
    RECORD,
    STEP,
    STOP,
    VALIDATION,
    decode,
    get,
)
from counters import difference


@dataclass
class Step:
    """One step line: loss, this rank's images/s, and data wait and step in ms (or None)."""

    loss: float
    img_per_s: float | None
    data_ms: float | None
    step_ms: float | None


@dataclass
class Log:
    """What the files of one run say, the last attempt's line where several say the same."""

    records: dict = field(default_factory=dict)  # Run, Summary of the last attempt, last Probe
    nodes: list = field(default_factory=list)  # of each node what its interfaces carried
    counters: dict = field(default_factory=dict)  # host -> Counters records of the file being read
    began: float | None = None  # time of the first of them in the first file that has one
    attempts: int = 0  # of the last run in it
    earlier: int = 0  # runs before that
    steps: dict = field(default_factory=dict)  # (rank, epoch, step) -> Step
    last_step: dict = field(default_factory=dict)  # rank -> step of its last step line
    epochs: dict = field(default_factory=dict)  # (rank, epoch) -> mean loss
    ended: dict = field(default_factory=dict)  # rank -> wall time in s, no step line after it
    top1: float | None = None  # percent, of the last validation
    baseline: float | None = None  # percent: what always guessing one class would reach there
    ranks: set = field(default_factory=set)
    kinds: set = field(default_factory=set)  # GPU, CPU
    ours: bool = False  # False: the original demo's format
    torn: int = 0
    stop: str | None = None  # the last reason a rank gave for stopping
    failed: str | None = None  # the root cause, where a launcher says that it failed


NODE_LOG = r"node\d+\.log"  # a file of a run's folder


def log_files(path):
    """The files of a run: `path` itself, or its node0.log, node1.log, ... in order."""
    if not path.is_dir():
        if not path.is_file():
            what = "give a log, a run's folder, or NAME=PATH"
            raise UserError(f"{path}: no such file or folder; {what}")
        return [path]
    files = [f for f in path.glob("node*.log") if re.fullmatch(NODE_LOG, f.name)]
    if not files:
        raise UserError(f"{path}: no node0.log, node1.log, ... in this folder")
    return sorted(files, key=lambda f: int(re.sub(r"\D", "", f.name)))


def read_log(paths):
    """Parse the files at `paths` into one Log; damage never raises, a bad path does."""
    texts, log = [], Log()
    for path in [file for given in paths for file in log_files(Path(given))]:
        try:
            texts.append(path.read_bytes().decode("utf-8", "replace"))
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    for text in sorted(texts, key=lambda text: "] Run {" not in text):  # it opens an attempt
        parse_text(text, log)
    return log


def parse_text(text, log=None):
    """Parse one file's text into a Log, or into that of the run's other files.

    A record is looked for after each `[KIND rank] ` wherever it stands in a line, so that other
    programs' lines, prefixes and two lines torn into each other do no harm; a record that is not
    whole is left out and counted.
    """
    log, failed = log or Log(), None
    text = ESCAPES.sub("", text)
    ours, ranks = bool(OURS.search(text)), {int(rank) for _, rank in PREFIX.findall(text)}
    # The original demo counts GPUs on each node from 0; ours prints the global rank.
    first = max(log.ranks) + 1 if ranks & log.ranks and not ours else 0
    log.ours |= ours
    for line in re.split(r"[\r\n]+", text):
        if failed == "":  # the cause stands on the line after
            failed = line.strip()
        elif found := COUNTERS.search(line):
            if record := whole(log, found[1]):
                log.counters.setdefault(get(record, "host", str), []).append(record)
        elif found := LAUNCHER.search(line):
            if found["node"]:
                log.nodes.append(whole(log, found["node"]))
            else:  # a start takes back how the series before it ended
                failed = None if found["start"] else (found["error"] or found["cause"]).strip()
        for mark in PREFIX.finditer(line):
            log.kinds.add(mark[1])
            log.ranks.add(first + int(mark[2]))
            parse_body(log, first + int(mark[2]), line[mark.end() :])
    add_nodes(log)
    if failed is not None:
        log.failed = log.failed or failed[:300] or "not in this log"
    return log


def parse_body(log, rank, body):
    """Enter into `log` what stands at the start of `body`, the text after one prefix."""
    if found := RECORD.match(body):
        add_record(log, found[1], found[2])
    elif found := STEP.match(body):
        epoch, step = int(found[1]), int(found[2])
        numbers = [None if n is None else float(n) for n in found.group(3, 4, 5, 6)]
        log.steps[rank, epoch, step] = Step(*numbers)
        log.last_step[rank] = step
        log.ended.pop(rank, None)
    elif found := EPOCH.match(body):
        log.epochs[rank, int(found[1])] = float(found[2])
    elif found := VALIDATION.match(body):
        log.top1, log.baseline = (None if n is None else float(n) for n in found.groups())
    elif found := END.match(body):
        log.ended[rank] = float(found[1])
    elif found := STOP.match(body):
        log.stop = found[1].strip()[:200]
    elif body.startswith(("Epoch ", "Cleanup ")):
        log.torn += 1


def add_record(log, word, text):
    """Enter a Run, Probe or Summary line; a new Run opens a new attempt.

    The Probe stays: it comes before the first attempt and is not repeated for the others.
    """
    found = whole(log, text)
    if word == "Run":  # even a torn one: what came before it is not this attempt's end
        # Not by the step alone: a restart begins at 0, too, where no checkpoint was saved yet.
        if found.get("resume") is False and not found.get("start_step"):
            for counted in log.counters.values():
                del counted[:-1]  # the last one was printed before this run
            if log.attempts:
                forget_run(log)
        log.attempts += 1
        log.records.pop("Summary", None)
        log.ended.clear()
        log.stop = None
    log.records[word] = found


def forget_run(log):
    """What a run of its own, before the one that begins now, has left in the same log."""
    log.earlier += 1
    log.attempts, log.top1 = 0, None
    for gone in (log.steps, log.last_step, log.epochs):
        gone.clear()


def add_nodes(log):
    """Enter what was carried between the first and the last Counters record of a file's last run.

    Only node 0's file, which is read first, has the Run lines that tell where a run begins. In
    another file the first record is the one nearest in time to node 0's.
    """
    for host, records in log.counters.items():
        times = [get(record, "time") or 0 for record in records]
        log.began = times[0] if log.began is None else log.began
        first = min(range(len(records)), key=lambda n: abs(times[n] - log.began))
        if first < len(records) - 1:
            try:
                carried = difference(records[first], records[-1])
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
                log.torn += 1
                continue
            log.nodes.append({"host": host, "seconds": times[-1] - times[first], **carried})
    log.counters = {}


def whole(log, text):
    """The JSON object that `text` begins with; an empty one, and counted, where it is torn."""
    found = decode(text)
    log.torn += not found
    return found
