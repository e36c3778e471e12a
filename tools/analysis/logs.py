"""Reads the files of one run: step lines, records, how it ended; no figure is worked out."""

import gzip
import json
import re
import zlib
from dataclasses import dataclass, field
from pathlib import Path

# --- The lines that script and launchers write ---------------------------------------------------

COLOURS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
PREFIX = re.compile(r"\[(GPU|CPU|MPS) (\d{1,6})\] ")
# A fixed number of decimals tells a whole number from one that was cut off.
STEP = re.compile(
    r"Epoch (\d{1,9}) \| Step (\d{1,9}) \| Loss: (-?inf|nan|-?\d{1,12}\.\d{4})(?!\d)"
    r"(?: \| \d{1,12}\.\d img/s \| data [\d.]+ ms \| step (\d{1,12}\.\d) ms)?"
)
VALIDATION = re.compile(r"Epoch \d{1,9} validation \| Top-1: (\d{1,3}\.\d\d)%.*?\| ([\d.]+)s")
END = re.compile(r"Cleanup complete\. Total wall time: [\dhms. ]*\((\d{1,12}\.\d{3})s\)")
STOP = re.compile(r"(Stopped\b.*|ERROR: .*)")
RECORD = re.compile(r"(Run|Probe|Summary) (\{.*)")
COUNTERS = re.compile(r"(?:^|\s)Counters (\{.*)")  # of tools/counters.py
# A start of torchrun by run.py, and how a run ended if that was not well.
LAUNCHER = re.compile(r"run\.py: (?:(?P<start>[\d-]{10} [\d:]{8}) |error: (?P<error>.+))")
NODE_LOG = r"node\d+\.log(\.gz)?"  # a file of a run's folder
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
    curve: list = field(default_factory=list)  # of rank 0: (seconds of training, loss)
    top1: list = field(default_factory=list)  # (seconds of training and validation, percent)
    seconds: float = 0.0  # of rank 0's steps and validations so far
    ended: dict = field(default_factory=dict)  # rank -> wall time in s
    ranks: set = field(default_factory=set)
    ours: bool = False  # False: the format of the talk's original demo
    stop: str | None = None  # the last reason that a rank gave for stopping
    failed: str | None = None  # the reason, where run.py says that the run failed
    nccl: dict = field(default_factory=dict)  # what nccl.py finds in NCCL's text, if there is any


# --- Files ---------------------------------------------------------------------------------------


def read_log(path):
    """Parse a run's file, or folder, into one Log. Raises UserError for a bad or foreign one."""
    log = Log()
    for file in log_files(Path(path)):
        parse_lines(lines_of(file), log)
    started = Path(path).is_dir()  # a launcher that has refused leaves an empty log there
    if not (log.ranks or log.ours or log.failed or started):
        raise UserError(f"{path}: no line of the demo in it; give a run's log or folder")
    return log


def log_files(path):
    """The files of a run: `path` itself, or its node0.log, node1.log, ... in order."""
    if not path.is_dir():
        if not path.is_file():
            what = "give a log, a run's folder, or NAME=PATH"
            raise UserError(f"{path}: no such file or folder; {what}")
        return [path]
    files = [file for file in path.glob("node*") if re.fullmatch(NODE_LOG, file.name)]
    if not files:
        raise UserError(f"{path}: no node0.log, node1.log, ... in this folder")
    return sorted(files, key=lambda file: int(re.sub(r"\D", "", file.name)))


def lines_of(path):
    """The lines of a text file, with their ends; also of one that gzip has packed, or that
    PowerShell has written in UTF-16. Raises UserError.
    """
    try:
        with open(path, "rb") as file:
            opened = gzip.open if file.read(2) == b"\x1f\x8b" else open
        with opened(path, "rb") as file:
            utf16 = file.read(2) in (b"\xff\xfe", b"\xfe\xff")
        encoding = "utf-16" if utf16 else "utf-8-sig"
        with opened(path, "rt", encoding=encoding, errors="replace") as file:
            while line := file.readline(LINE_LIMIT):
                yield line
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: cannot be read: {reason}") from None


# --- Lines ---------------------------------------------------------------------------------------


def parse_lines(lines, log):
    """Add what one file says to `log`; damage never raises.

    A record is looked for after each `[KIND rank] `, wherever it stands in a line. So other
    programs' lines, prefixes and lines torn into each other do no harm. A record that is not whole
    is left out.
    """
    failed = None
    for line in lines:
        if "\x1b" in line:
            line = COLOURS.sub("", line)
        if "Counters {" in line and (found := COUNTERS.search(line)):
            record = whole(found[1])
            if {"host", "interfaces"} <= record.keys():  # another program may count, too
                records = log.counters.setdefault(record["host"], [])
                records[:] = [*records[-1:], record]
        elif "run.py: " in line and (found := LAUNCHER.search(line)):
            log.ours |= bool(found["start"])
            failed = found["error"]  # a new start takes back how the one before it ended
        if "PU " in line or "MPS " in line:
            for mark in PREFIX.finditer(line):
                rank = int(mark[2])
                log.ranks.add(rank)
                parse_body(log, rank, line[mark.end() :])
    if failed:
        log.failed = failed.strip()[:300]


def parse_body(log, rank, body):
    """Add what stands at the start of `body`, the text after one prefix."""
    if found := STEP.match(body):
        step, loss, step_ms = int(found[2]), float(found[3]), found[4]
        log.ours = log.ours or step_ms is not None
        if rank == 0 and step_ms:
            first = log.records.get("Run", {}).get("start_step") or 0
            made = step - log.last_step.get(0, first if isinstance(first, int) else 0)
            log.seconds += max(0, made) * float(step_ms) / 1000
            log.curve.append((log.seconds, loss))
        log.last_step[rank] = step
        log.ended.pop(rank, None)
    elif found := RECORD.match(body):
        add_record(log, found[1], found[2])
    elif found := VALIDATION.match(body):
        log.seconds += float(found[2])
        log.top1.append((log.seconds, float(found[1])))
    elif found := END.match(body):
        log.ended[rank] = float(found[1])
    elif found := STOP.match(body):
        log.stop = found[1].strip()[:200]


def add_record(log, word, text):
    """Add a Run, Probe or Summary. A Run opens a new attempt; the Probe just before it stays."""
    found = whole(text)
    log.ours = True
    if word == "Run":  # even a torn one: what came before it is not the end of this attempt
        # Not by the step alone: a restart without a checkpoint begins at 0 too, with --resume.
        anew = found and not found.get("resume") and not found.get("start_step")
        if log.attempts and anew:
            log.earlier += 1
            log.attempts, log.seconds = 0, 0.0
            for gone in (log.last_step, log.curve, log.top1):
                gone.clear()
            for records in log.counters.values():
                del records[:-1]
            if not log.probed:
                log.records.pop("Probe", None)
        log.attempts += 1
        log.records.pop("Summary", None)
        log.ended.clear()
        log.last_step.pop(0, None)
        log.stop = None
    log.probed = word == "Probe" or (log.probed and word != "Run")
    log.records[word] = found


def whole(text):
    """The JSON object that `text` begins with; an empty one where it is torn."""
    try:
        found = json.JSONDecoder().raw_decode(text)[0]
    except (ValueError, RecursionError):
        found = {}
    return found if isinstance(found, dict) else {}
