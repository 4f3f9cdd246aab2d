"""The JSON's cells and their judgement, the table, and the plot."""

import grid
from measure import cells as layer_cells
from measure import chart, numbers, report

VERSION = 1
SHARED = ("ranks", "weight_format", "row_format", "runner", "dispatcher", "device",
          "forwards_per_graph", "weight_sets", "row_bytes", "no_nccl")
RUN = ("op", "shape", "rows", "ranks", "skew", "delay_us", "sms")  # what is one run's alike
CELL = {
    "op": str, "shape": str, "rows": str, "ranks": int, "tokens": int, "skew": float,
    "delay_us": float, "sms": int, "bar_us": (float, None), "stretch_us": (float, None),
    "others": dict, "verdict": (str, None), "drift": float, "clocks": (dict, None), "replays": int,
    "median_us": float, "p10_us": float, "p90_us": float, "spread_us": float, "floor_us": float,
    "times_floor": float, "wire_floor_us": float, "wire_share": float, "wire_gb_per_s": float,
    "logical_gb_per_s": float, "wire_bytes": float, "rows_per_rank": float, "nccl": dict,
    "relative_error": float, "no_nccl": (str, None)}
FORM = {
    "what": str, "version": int, "command": str, "date": str, "machine": dict, "versions": dict,
    "settings": {"replays": int, "seconds": float, "drift": float, "dispatcher": (str, None)},
    "complete": bool, "skipped": [str], "failed": [str], "rejected": [str],
    "clocks": (str, None), "cells": [CELL]}


def cells_of(group, document, clocks):
    """Those of one run of `moxie bench`, as the JSON has them."""
    found = []
    for told in document["cells"]:
        wanted = grid.wanted(group, document["ranks"], told["tokens"])
        bar, stretch, others = wanted if wanted else (None, None, {})
        found.append({
            "op": group.op, "shape": group.shape, "rows": group.rows, "skew": group.skew,
            "delay_us": group.delay_us, "sms": group.sms, **{key: document[key] for key in SHARED},
            "drift": document["anchors"]["drift"], "clocks": clocks, **told, "bar_us": bar,
            "stretch_us": stretch, "others": others,
            "verdict": layer_cells.verdict(told["median_us"], bar, stretch)})
    return found


def rejections(cells, most=numbers.DRIFT_MAX):
    """Runs that do not count, because the device was not the same before and after."""
    moved = {}
    for cell in cells:
        if not cell["drift"] <= most:
            run = tuple(cell[key] for key in RUN)
            moved[run] = max(moved.get(run, cell["drift"]), cell["drift"])
    return [f"{op} {shape} {rows} over {ranks} GPUs{_apart(*how)}: the driver's rates moved by "
            f"{100 * drift:.1f}%"
            for (op, shape, rows, ranks, *how), drift in moved.items()]


def faults(found):
    """What of a run is not as FORM says."""
    return report.faults(found, FORM)


def _apart(skew, delay_us, sms):
    return ((f", skew {skew:g}" if skew else "") + (f", {delay_us:g} us late" if delay_us else "")
            + (f", {sms} SMs" if sms else ""))


def _head(found):
    versions = found["versions"]
    lines = [f"{found['machine'].get('gpu') or 'no GPU'} x {found['machine']['gpus']}, moxie "
             f"{versions.get('library') or versions['commit']}, {found['date']}", "",
             f"    {found['command']}", ""]
    lines += layer_cells.floors_of_another(found["machine"].get("gpu"))
    if not found["complete"]:
        lines += ["**Incomplete**: the run ended before its last cell.", ""]
    lines += [f"**Rejected**: {reason}." for reason in found["rejected"]]
    lines += [f"**Failed**: {reason}" for reason in found["failed"]]
    lines += [f"Skipped: {reason}" for reason in found["skipped"]]
    lines += sorted({f"No NCCL: {cell['no_nccl']}" for cell in found["cells"] if cell["no_nccl"]})
    if found["clocks"]:
        lines.append(f"No clocks: {found['clocks']}")
    return lines


def _row(cell):
    others = {**{name: times["median_us"] for name, times in cell["nccl"].items()},
              **cell["others"]}
    parts = [cell["ranks"], f"{cell['op']}{_apart(cell['skew'], cell['delay_us'], cell['sms'])}",
             cell["shape"], cell["rows"], cell["tokens"], f"{cell['median_us']:.1f}",
             f"{cell['p10_us']:.1f} to {cell['p90_us']:.1f}", f"{cell['spread_us']:.1f}",
             f"{cell['floor_us']:.1f}", f"{cell['times_floor']:.2f}",
             f"{cell['wire_floor_us']:.1f}", f"{cell['wire_share']:.2f}",
             f"{cell['wire_gb_per_s']:.0f}", f"{cell['logical_gb_per_s']:.0f}",
             ", ".join(f"{name} {us:.0f}" for name, us in others.items()),
             "" if cell["bar_us"] is None else f"{cell['bar_us']:g}",
             "" if cell["stretch_us"] is None else f"{cell['stretch_us']:g}",
             cell["verdict"] or ""]
    return "| " + " | ".join(map(str, parts)) + " |"


def table(found):
    """The run as markdown."""
    titles = ["GPUs", "what", "shape", "rows", "tokens", "us", "p10 to p90", "spread", "floor us",
              "x floor", "wire us", "of the wire", "wire GB/s", "logical GB/s", "others us", "bar",
              "stretch", "verdict"]
    lines = _head(found) + ["", "Median microseconds of a forward on the slowest rank.", "",
                            "| " + " | ".join(titles) + " |",
                            "| " + " | ".join("---" for _ in titles) + " |"]
    return "\n".join(lines + [_row(cell) for cell in found["cells"]]) + "\n"


def curves(found):
    """{what: {system: [(tokens, share of the floor)]}}, where nothing is uneven or bounded."""
    charts = {}
    for cell in found["cells"]:
        if cell["skew"] or cell["delay_us"] or cell["sms"]:
            continue
        chart = charts.setdefault(f"{cell['op']} {cell['shape']} {cell['rows']}", {})
        systems = {f"moxie, {cell['ranks']} GPUs": cell["median_us"]}
        if cell["op"] in ("dispatch", "combine"):
            systems.update({f"NCCL {name.partition('_')[2]}, {cell['ranks']} GPUs":
                            times["median_us"] for name, times in cell["nccl"].items()})
        for name, us in systems.items():
            chart.setdefault(name, []).append((cell["tokens"], cell["floor_us"] / us))
        if cell["bar_us"] is not None:
            for name, us in (("bar", cell["bar_us"]), ("stretch", cell["stretch_us"])):
                chart.setdefault(name, []).append((cell["tokens"], cell["floor_us"] / us))
    return charts


def plot(found, path):
    """Draws the share of the floor over tokens; says why it did not, or None."""
    charts = curves(found)
    return chart.draw(charts, "tokens of a rank", path) if charts else "no cell is even"
