"""Figures in words: each with its unit, rounded for people."""


def digits(value):
    """With three digits that count, and never as a power of ten: 0.123, 12.3, 1,234."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}" if value >= 1e-3 else "0"


def rate(gbps):
    """Gb/s as text, in Mb/s below 1 Gb/s."""
    if gbps >= 0.9995:
        return f"{digits(gbps)} Gb/s"
    return f"{gbps * 1000:.0f} Mb/s" if gbps >= 0.01 else f"{digits(gbps * 1000)} Mb/s"


def ms(seconds):
    return f"{seconds * 1000:,.1f} ms" if seconds < 0.1 else f"{seconds * 1000:,.0f} ms"


def with_range(show, value, values):
    """563 ms (551 to 570): a figure with the range of the values; `show` writes the unit, too."""
    text, low, high = show(value), show(min(values)), show(max(values))
    if low == high:
        return text
    unit = text.partition(" ")[2]
    if unit[:1].isalpha() and low.endswith(f" {unit}") and high.endswith(f" {unit}"):
        low = low.partition(" ")[0]
        high = high.partition(" ")[0]
    return f"{text} ({low} to {high})"


def part(value, total):
    return f"{value / total:.0%}" if total else "-"


def megabytes(nbytes):
    return f"{digits(nbytes / 1e6)} MB"


def duration(seconds):
    """Seconds as the demo's log writes them: 4h 8m 59.79s."""
    minutes, rest = divmod(round(seconds, 2), 60)
    hours, minutes = divmod(int(minutes), 60)
    text = f"{hours}h " if hours else ""
    return text + (f"{minutes}m " if hours or minutes else "") + f"{rest:.2f}s"
