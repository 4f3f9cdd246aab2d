"""Curves of the share of the floor, as a PNG."""

import importlib.util

BARS = {"bar": "0.2", "stretch": "0.6"}  # greys: what is wanted, not what was measured


def draw(charts, x_label, path):
    """{title: {name: [(tokens, share of the floor)]}}, one beside the other; says why it did not,
    or None. A chart with the lines of the last has its legend there."""
    if importlib.util.find_spec("matplotlib") is None:
        return "matplotlib is not installed"
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(1, len(charts), figsize=(5 * len(charts), 4.5), sharey=True,
                                   squeeze=False)
    last = list(charts.values())[-1]
    for axis, (title, lines) in zip(axes[0], charts.items()):
        for name, points in lines.items():
            axis.plot(*zip(*sorted(points)), marker="o", linestyle="--" if name in BARS else "-",
                      color=BARS.get(name), label=name)
        axis.set_xscale("log", base=2)
        axis.set_ylim(0, 1.05)
        axis.set_title(title)
        axis.set_xlabel(x_label)
        axis.grid(alpha=0.3)
        if lines is last or list(lines) != list(last):
            axis.legend(fontsize="small")
    axes[0][0].set_ylabel("share of the floor")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return None
