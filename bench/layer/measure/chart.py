"""Curves of the share of the floor, as a PNG."""

import importlib.util

BARS = {"bar": "0.2", "stretch": "0.6"}  # greys: what is wanted, not what was measured
COLUMNS = 4  # of charts in a row


def draw(charts, x_label, path, dotted=()):
    """{title: {name: [(tokens, share of the floor)]}}, in rows of four; says why it did not, or
    None. Names in `dotted` are lower bounds of what the others are. The legend stands in the first
    chart, and in those with other lines."""
    if importlib.util.find_spec("matplotlib") is None:
        return "matplotlib is not installed"
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    columns = min(len(charts), COLUMNS)
    rows = -(-len(charts) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(4.5 * columns, 4 * rows), sharey=True,
                                   squeeze=False)
    colors = {name: f"C{number}" for number, name in enumerate(
        dict.fromkeys(name for lines in charts.values() for name in lines if name not in BARS))}
    first = list(next(iter(charts.values())))
    for number, (axis, (title, lines)) in enumerate(zip(axes.flat, charts.items())):
        for name, points in lines.items():
            axis.plot(*zip(*sorted(points)), marker="o", label=name,
                      linestyle="--" if name in BARS else ":" if name in dotted else "-",
                      color=BARS.get(name) or colors[name])
        axis.set_xscale("log", base=2)
        axis.set_ylim(0, 1.05)
        axis.set_title(title)
        axis.set_xlabel(x_label)
        axis.grid(alpha=0.3)
        if number == 0 or list(lines) != first:
            axis.legend(fontsize="small")
    for axis in axes.flat[len(charts):]:
        axis.set_visible(False)
    for row in axes:
        row[0].set_ylabel("share of the floor")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return None
