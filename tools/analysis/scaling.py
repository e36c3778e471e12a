"""Runs with different numbers of processes: how much faster, and what eats the rest.

    speed-up    images/s / the base's; of repeats, see repeats.py, the medians, with the range that
                the slowest and the fastest runs of both give
    efficiency  speed-up x the base's processes / processes
    strong      the same global batch in all runs, however it is accumulated
    weak        the same images per process and step in all runs
    base        the fewest processes, of complete runs: the first over the run's own network, else
                the first
    ideal step  the base's step (weak), or that x the base's processes / processes (strong). Both
                are the base's step x images per process / the base's images per process
    lost        step - ideal step; and so for each part, which may also be shorter than ideal

No law is fitted.
"""

from dataclasses import dataclass, field

from analysis.repeats import values
from analysis.words import digits, ms, with_range

PARTS = {  # of a step, in seconds
    "compute": lambda run: run.compute_s,
    "data wait": lambda run: run.data_s,
    "communication": lambda run: run.link_s,
    "waiting for ranks": lambda run: run.exposed_s - run.link_s,
}
NETWORK_VARIABLES = ("NCCL_NET", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
NAMED = 0.1  # a part with a smaller share of what is lost or saved is not named


@dataclass
class Scaled:
    """One run beside its base."""

    base: str
    speed_up: float
    between: tuple  # the lowest and highest speed-up of repeats
    efficiency: float
    ideal_s: float  # seconds of a step
    lost_s: dict = field(default_factory=dict)  # part of a step -> seconds; empty: not split
    says: str = ""

    @property
    def shown_speed_up(self):
        return with_range("{:.2f}".format, self.speed_up, self.between)


@dataclass
class Scaling:
    kind: str  # strong, weak, or empty: neither
    base: str = ""
    says: list = field(default_factory=list)  # about all runs
    runs: dict = field(default_factory=dict)  # name -> Scaled


def is_scaling(runs):
    return len({run.processes for run in runs if run.processes}) > 1


def scale(runs):
    """The Scaling of runs that differ in their number of processes."""
    able = [run for run in runs if run.complete and run.processes and run.img_per_s]
    fewest = min((run.processes for run in able), default=0)
    first = [run for run in able if run.processes == fewest]
    found = Scaling(kind_of(runs))
    if not is_scaling(able):
        text = "No speed-up: that needs complete runs, with a Summary, of two numbers of processes"
        found.says.append(f"{text}.")
        return found
    found.base = first[0].name
    for run in able:
        own = [other for other in first if network_of(other) == network_of(run)]
        base = (own or first)[0]
        scaled = beside(base, run)
        scaled.says = say_run(found.kind, base, run, scaled)
        found.runs[run.name] = scaled
    found.says = [say_kind(found.kind, able[0]), say_base(first[0], found)]
    if not any(run.repeats for run in able):
        found.says.append("One run each: how much such runs differ is not known.")
    left_out = [f"{run.name} ({run.status})" for run in runs if run not in able]
    if left_out:
        found.says.append(f"Without a speed-up: {', '.join(left_out)}.")
    return found


def kind_of(runs):
    """strong, weak, or empty."""
    known = [run for run in runs if run.processes and run.global_batch]
    if len({run.global_batch for run in known}) == 1:
        return "strong"
    return "weak" if len({run.global_batch / run.processes for run in known}) == 1 else ""


def differences(runs):
    """Why these runs are neither strong nor weak scaling: one text, or none."""
    known = [run for run in runs if run.processes and run.global_batch]
    if kind_of(runs) or not known:
        return []
    batches = ", ".join(f"{run.global_batch:,} in {run.name}" for run in known)
    each = ", ".join(f"{digits(run.global_batch / run.processes)} in {run.name}" for run in known)
    return [f"global batch differs: {batches}, and so do images per process and step: {each}"]


def same_training(runs):
    """Whether all complete runs train as many images with the same global batch."""
    return len({(run.global_batch, run.steps) for run in runs if run.complete}) < 2


def network_of(run):
    """What tells networks apart: what carried node 0's probe, else the variables that name it."""
    if run.nodes == 1:
        return ()
    if run.networks:
        return (run.networks[0].transport, *run.networks[0].names)
    return tuple(map(run.env, NETWORK_VARIABLES))


def beside(base, run):
    slow, fast = values(base, "img_per_s"), values(run, "img_per_s")
    between = min(fast) / max(slow), max(fast) / min(slow)
    speed_up = run.img_per_s / base.img_per_s
    efficiency = speed_up * base.processes / run.processes
    share = (run.global_batch / run.processes) / (base.global_batch / base.processes)
    found = Scaled(base.name, speed_up, between, efficiency, share * base.step_s)
    if base.has_split and run.has_split:
        found.lost_s = {
            # Without a minus before a zero.
            part: round(seconds(run) - share * seconds(base), 7) + 0.0
            for part, seconds in PARTS.items()
        }
    return found


# --- Sentences -----------------------------------------------------------------------------------


def say_kind(kind, run):
    if kind == "strong":
        return f"Strong scaling: a step has {run.global_batch:,} images in every run."
    if kind == "weak":
        each = digits(run.global_batch / run.processes)
        return f"Weak scaling: each process has {each} images in a step in every run."
    return "Neither strong nor weak scaling: only images/s are compared."


def say_base(first, found):
    bases = dict.fromkeys(scaled.base for scaled in found.runs.values())
    counted = f"{first.processes} process{'es' if first.processes > 1 else ''}"
    if len(bases) > 1:
        text = "Each network, and one node by itself, has its own base"
        return f"{text}, with {counted}: {', '.join(bases)}."
    return f"The base is {found.base}, with {counted}."


def say_run(kind, base, run, scaled):
    """How much faster, and what eats the rest."""
    if run is base:
        return ""
    if run.processes == base.processes:
        return f"as many processes as {base.name}, {scaled.shown_speed_up} times its images/s"
    slower = ", slower than its base" if max(scaled.between) < 0.995 else ""
    times = f"{digits(run.processes / base.processes)} times the processes"
    text = f"{scaled.shown_speed_up} times the images/s of {base.name} with {times}{slower}: "
    text += f"an efficiency of {scaled.efficiency:.0%}"
    if f"{scaled.efficiency:.0%}" == "100%":
        return text
    if not scaled.lost_s:
        return f"{text}; what eats the rest its log cannot tell"
    off_s = run.step_s - scaled.ideal_s
    longer, shorter = [], []
    for part, seconds in sorted(scaled.lost_s.items(), key=lambda item: -abs(item[1])):
        if abs(seconds) >= NAMED * abs(off_s):
            (longer if seconds > 0 else shorter).append(f"{ms(abs(seconds))} {part}")
    if not (shorter if scaled.efficiency > 1 else longer):  # a record is damaged
        return f"{text}; its images/s and its step times contradict each other"
    how = "shorter" if off_s < 0 else "longer"
    text += f"; a step is {ms(abs(off_s))} {how} than the ideal {ms(scaled.ideal_s)}"
    text += f", by {', '.join(longer)}" if longer else ""
    text += f"; shorter by {', '.join(shorter)}" if shorter else ""
    if scaled.efficiency > 1:
        return f"{text}. Above 100%: something held up {base.name}"
    return text + say_causes(kind, base, run)


def say_causes(kind, base, run):
    """What else differs between the two runs, or is known of its parts."""
    causes = []
    for name in ("threads", "accumulate_steps"):
        one, two = (each.setting(name, int) for each in (base, run))
        if None not in (one, two) and one != two and (name != "threads" or run.on_cpu):
            causes.append(f"{name} is {one} in {base.name} and {two} here")
    if run.straggler is not None:
        causes.append(f"rank {run.straggler} is slow")
    if kind == "strong":
        causes.append("small batches compute less efficiently")
    return f" ({'; '.join(causes)})" if causes else ""
