"""The picture of tools/show_results.py: what a model answers on some images, and on each class.

Drawn with matplotlib, which only a picture needs; right and wrong are told apart without colour,
by a sign and by the style of a frame.
"""

import warnings
from collections import Counter, namedtuple
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure  # without pyplot, which may look for a display

FORMATS = Figure().canvas.get_supported_filetypes()

COLUMNS = 4  # of images
MOST_CLASSES = 18  # each with a row of its own
LONGEST = 15  # characters of a name that have room
RIGHT = {"color": "#111111", "linestyle": "-", "linewidth": 1}
WRONG = {"color": "#c1440e", "linestyle": (0, (1.5, 1.5)), "linewidth": 3}
# Inches. In README, at 800 pixels, an inch has 80, and the smallest letters are 10 pixels high.
WIDTH, TOP = 10, 0.5  # of the picture, and of its title
CELL_WIDTH, CELL_HEIGHT, SIDE = 1.29, 1.8, 1.08  # an image's place, with its words; the image
BARS, BAR_WIDTH, ROW_HEIGHT = 6.7, 0.8, 0.31  # where a class's bar begins, its place
COUNTS, MISTAKES = 7.6, 8.55  # where the words beside it begin

# A class: its images, how many of them are right, what the others are mistaken for most, how often
ClassRow = namedtuple("ClassRow", "name images right mistaken_for times")


def draw(results, title, file):
    """Images on the left, classes on the right. Raises OSError.

    `results` is what results_of in show_results.py returns.
    """
    rows = class_rows(results)
    lines = -(-len(results.chosen) // COLUMNS)
    of_classes = ROW_HEIGHT * (min(len(rows), MOST_CLASSES + 1) + 3)
    height = TOP + max(CELL_HEIGHT * lines + 0.35, of_classes)
    fonts = {"font.size": 9, "text.parse_math": False}  # a name may have a $
    with matplotlib.rc_context(fonts), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that the font lacks: it draws a box
        figure = Figure(figsize=(WIDTH, height))
        figure.text(0.5, 1 - TOP / 2 / height, title, fontsize=12, ha="center", va="center")
        draw_images(figure, results)
        draw_classes(figure, rows, len(results.names))
        figure.savefig(file, dpi=120, format=None if Path(file).suffix else "png")


def add_axes(figure, left, top, width, height):
    """Axes at this place, in inches from the upper left corner."""
    wide, high = figure.get_size_inches()
    return figure.add_axes((left / wide, 1 - (top + height) / high, width / wide, height / high))


def class_rows(results):
    """A ClassRow for each class that has an image, the one with the most images first."""
    found = {}
    pairs = results.labels[results.whole], results.guesses[results.whole]
    for label, guess in zip(*pairs, strict=True):
        found.setdefault(int(label), Counter())[int(guess)] += 1
    rows = []
    for label, guesses in sorted(found.items()):
        wrong = Counter({guess: n for guess, n in sorted(guesses.items()) if guess != label})
        (other, times) = (wrong.most_common(1) or [(None, 0)])[0]
        name = "" if other is None else results.names[other]
        row = ClassRow(results.names[label], guesses.total(), guesses[label], name, times)
        rows.append(row)
    return sorted(rows, key=lambda row: -row.images)  # stable: else in the order of the labels


def short(name, longest=LONGEST):
    return name if len(name) <= longest else name[: longest - 1] + "…"


def draw_images(figure, results):
    """Each with the answer and how sure it is; below a wrong answer stands what the image is."""
    wide, high = figure.get_size_inches()
    key = "✓ right: solid frame    ✗ wrong: dashed frame, and what it is"
    figure.text(0.1 / wide, 1 - (TOP + ROW_HEIGHT / 2) / high, key, va="center")
    for i, (picture, position) in enumerate(zip(results.pictures, results.chosen, strict=True)):
        left = 0.1 + CELL_WIDTH * (i % COLUMNS)
        top = TOP + CELL_HEIGHT * (i // COLUMNS) + 0.55
        axis = add_axes(figure, left, top, SIDE, SIDE)
        axis.imshow(picture)
        axis.set(xticks=[], yticks=[])
        label, guess = results.labels[position], results.guesses[position]
        for spine in axis.spines.values():
            spine.set(**(RIGHT if label == guess else WRONG))
            spine.set_position(("outward", 1 if label == guess else 3))
        sign = "✓" if label == guess else "✗"
        axis.set_title(f"{sign} {results.confidence[position]:.0%}", fontsize=9, pad=7)
        words = [results.names[guess]]
        if label != guess:
            words.append(f"is {results.names[label]}")
        axis.set_xlabel("\n".join(map(short, words)), labelpad=6)


def draw_classes(figure, rows, classes):
    """A row for each class: its name, a bar of its images, the right ones filled, and words."""
    shown = rows[:MOST_CLASSES]
    if rest := rows[MOST_CLASSES:]:
        images, right = sum(row.images for row in rest), sum(row.right for row in rest)
        shown = [*shown, ClassRow(f"{len(rest)} more", images, right, "", 0)]
    axis = add_axes(figure, BARS, TOP, BAR_WIDTH, ROW_HEIGHT * (len(shown) + 2))
    places = range(len(shown))
    for figures, colour in (("images", "white"), ("right", "#666666")):
        # what stands for many classes has no bar, beside which the others would be none
        lengths = [getattr(row, figures) for row in rows[:MOST_CLASSES]]
        axis.barh(places[: len(lengths)], lengths, 0.7, color=colour, edgecolor="#111111")
    axis.set_yticks(places, [short(row.name) for row in shown])
    axis.set_ylim(len(shown) - 0.5, -2.5)  # the first on top, below two lines
    axis.set_xticks([])
    axis.spines[:].set_visible(False)
    axis.tick_params(left=False)
    has = f"{len(rows)} of {classes} classes have images here; the filled part of a bar: right"
    write(axis, BARS - 1.4, -2, has)
    for x, heading in ((BARS, "images"), (COUNTS, "right"), (MISTAKES, "mistaken most for")):
        write(axis, x, -1, heading, weight="bold")
    for place, row in enumerate(shown):
        write(axis, COUNTS, place, f"{row.right} of {row.images}")
        if row.times:
            write(axis, MISTAKES, place, f"{row.times} × {short(row.mistaken_for)}")


def write(axis, inches, place, text, **look):
    """In the row of a class, so far from the picture's left side."""
    x = (inches - BARS) / BAR_WIDTH
    axis.text(x, place, text, va="center", transform=axis.get_yaxis_transform(), **look)
