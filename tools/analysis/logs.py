"""Reads the files of one run: step lines, records, how it ended; no figure is worked out."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

# --- The lines that script and launchers write ---------------------------------------------------

COLOURS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
PREFIX = re.compile(r"\[(GPU|CPU|MPS) (\d{1,6})\] ")
# A fixed number of decimals tells a whole number from one that was cut off.
LOSS = r"(-?inf|nan|-?\d{1,12}\.\d{4}(?!\d))"
STEP = re.compile(
    r"Epoch (\d{1,9}) \| Step (\d{1,9}) \| Loss: " + LOSS + r"(?: \| (\d{1,12}\.\d) img/s)?"
)
# Not of a run that was resumed in the epoch: its mean is over the rest of the epoch alone.
EPOCH = re.compile(
    r"Epoch (\d{1,9}) (?:complete|ends at step \d+(?: of \d+)?) \| Avg loss: " + LOSS
)
VALIDATION = re.compile(r"Epoch \d{1,9} validation \| Top-1: (\d{1,3}\.\d\d)%")
END = re.compile(r"Cleanup complete\. Total wall time: [\dhms. ]*\((\d{1,12}\.\d{3})s\)")
STOP = re.compile(r"(Stopped\b.*|ERROR: .*)")
RECORD = re.compile(r"(Run|Probe|Summary) (\{.*)")
COUNTERS = re.compile(r"(?:^|\s)Counters (\{.*)")  # of tools/counters.py
# Lines of run.py, and of older launchers: a start, and how it ended if that was not well.
LAUNCHER = re.compile(
    r"(?:run\.py|launch_\w+\.sh): (?:(?P<start>[\d-]{10} [\d:]{8}) |error: (?P<error>.+))"
)
NODE_LOG = r"node\d+\.log"  # a file of a run's folder
LINE_LIMIT = 1 << 20  # characters read at once: a file without line ends must not fill the memory


class UserError(Exception):
    """Something that the user can fix: one line, exit code 2."""


@dataclass
class Log:
    """What the files of one run say. Of lines that say the same, the last one counts."""

    records: dict = field(default_factory=dict)  # Run and Summary of the last attempt, last Probe
    probed: bool = False  # since the last Run line
    counters: dict = field(default_factory=dict)  # host -> its last two Counters records
    attempts: int = 0  # of the last run
    earlier: int = 0  # runs before it
    last_step: dict = field(default_factory=dict)  # rank -> number of its last step line
    epochs: dict = field(default_factory=dict)  # (rank, epoch) -> mean loss
    ended: dict = field(default_factory=dict)  # rank -> wall time in s
    top1: float | None = None  # percent, of the last validation
    ranks: set = field(default_factory=set)
    kinds: set = field(default_factory=set)  # GPU, CPU, MPS
    ours: bool = False  # False: the format of the talk's original demo
    torn: int = 0
    stop: str | None = None  # the last reason that a rank gave for stopping
    failed: str | None = None  # the reason, where a launcher says that the run failed
    nccl: dict = field(default_factory=dict)  # what nccl.py finds in NCCL's text, if there is any


# --- Files ---------------------------------------------------------------------------------------


def read_log(path):
    """Parse a run's file, or folder, into one Log. Raises UserError for a bad or foreign one."""
    log = Log()
    try:
        for file in log_files(Path(path)):
            parse_lines(lines_of(file), log)
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from None
    if not (log.ranks or log.ours or log.failed):
        raise UserError(f"{path}: no line of the demo in it; give a run's log or folder")
    return log


def log_files(path):
    """The files of a run: `path` itself, or its node0.log, node1.log, ... in order."""
    if not path.is_dir():
        if not path.is_file():
            what = "give a log, a run's folder, or NAME=PATH"
            raise UserError(f"{path}: no such file or folder; {what}")
        return [path]
    files = [file for file in path.glob("node*.log") if re.fullmatch(NODE_LOG, file.name)]
    if not files:
        raise UserError(f"{path}: no node0.log, node1.log, ... in this folder")
    return sorted(files, key=lambda file: int(re.sub(r"\D", "", file.name)))


def lines_of(path):
    """The lines of a text file, with their ends. A carriage return ends a line too."""
    with open(path, encoding="utf-8", errors="replace") as file:
        while line := file.readline(LINE_LIMIT):
            yield line


# --- Lines ---------------------------------------------------------------------------------------


def parse_lines(lines, log):
    """Add what one file says to `log`; damage never raises.

    A record is looked for after each `[KIND rank] `, wherever it stands in a line. So other
    programs' lines, prefixes and lines torn into each other do no harm. A record that is not whole
    is left out and counted.
    """
    failed = None
    for line in lines:
        if "\x1b" in line:
            line = COLOURS.sub("", line)
        if "Counters {" in line and (found := COUNTERS.search(line)):
            record = whole(log, found[1])
            if {"host", "interfaces"} <= record.keys():  # another program may count, too
                records = log.counters.setdefault(record["host"], [])
                records[:] = [*records[-1:], record]
        elif (".py: " in line or ".sh: " in line) and (found := LAUNCHER.search(line)):
            log.ours |= bool(found["start"])
            failed = found["error"]  # a new start takes back how the one before it ended
        if "PU " in line or "MPS " in line:
            for mark in PREFIX.finditer(line):
                log.kinds.add(mark[1])
                rank = int(mark[2])
                log.ranks.add(rank)
                parse_body(log, rank, line[mark.end() :])
    if failed:
        log.failed = failed.strip()[:300]


def parse_body(log, rank, body):
    """Add what stands at the start of `body`, the text after one prefix."""
    if found := STEP.match(body):
        log.ours = log.ours or found[4] is not None
        log.last_step[rank] = int(found[2])
        log.ended.pop(rank, None)
    elif found := RECORD.match(body):
        add_record(log, found[1], found[2])
    elif found := EPOCH.match(body):
        log.epochs[rank, int(found[1])] = float(found[2])
    elif found := VALIDATION.match(body):
        log.top1 = float(found[1])
    elif found := END.match(body):
        log.ended[rank] = float(found[1])
    elif found := STOP.match(body):
        log.stop = found[1].strip()[:200]
    elif body.startswith(("Epoch ", "Cleanup ")):
        log.torn += 1


def add_record(log, word, text):
    """Add a Run, Probe or Summary. A Run opens a new attempt; the Probe just before it stays."""
    found = whole(log, text)
    log.ours = True
    if word == "Run":  # even a torn one: what came before it is not the end of this attempt
        # Not by the step alone: a restart without a checkpoint begins at 0 too.
        if log.attempts and found.get("resume") is False and not found.get("start_step"):
            log.earlier += 1
            log.attempts, log.top1 = 0, None
            for gone in (log.last_step, log.epochs):
                gone.clear()
            for records in log.counters.values():
                del records[:-1]
            if not log.probed:
                log.records.pop("Probe", None)
        log.attempts += 1
        log.records.pop("Summary", None)
        log.ended.clear()
        log.stop = None
    log.probed = word == "Probe" or (log.probed and word != "Run")
    log.records[word] = found


# --- Records -------------------------------------------------------------------------------------


def whole(log, text):
    """The JSON object that `text` begins with; an empty one, and counted, where it is torn."""
    try:
        found = json.JSONDecoder().raw_decode(text)[0]
    except (ValueError, RecursionError):
        found = {}
    log.torn += not found
    return found if isinstance(found, dict) else {}
