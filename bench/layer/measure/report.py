"""The JSON's judgement and form, the table, and the plot."""

from measure import cells, chart, numbers

VERSION = 1
SUBJECT = "moxie"  # the system that bars are for
HOST_BAR_US = 15.0  # of one forward's launches, without a graph


def judge(found):
    """Adds to a run what follows from its numbers: drift, verdicts, who is faster."""
    before, after = found["anchors"]["before"], found["anchors"]["after"]
    found["anchors"]["drift"] = numbers.drift(before, after)
    found["rejected"] = numbers.rejection(found["anchors"]["drift"], found["settings"]["drift"])
    for cell in found["cells"]:
        for routing in cell["routings"]:
            _judge_routing(cell, routing, found["anchors"])
        ours = cell["host_us"].get(SUBJECT)
        # On the CPU a call computes, too.
        cell["host_verdict"] = None if ours is None or found["settings"]["device"] == "cpu" else (
            "met" if ours["below_python"] <= HOST_BAR_US else "missed")
    found["wrong"] = sorted({
        f"{name} at {cell['shape']} {cell['tokens']} {routing['routing']}"
        for cell in found["cells"] for routing in cell["routings"]
        for name, system in routing["systems"].items() if not system["right"]})


def lack(found):
    """Why a run is none: what bars are for was wanted and did not run in every cell, or nothing ran
    in any. None where it is one."""
    wanted = SUBJECT in (system["name"] for system in found["systems"])
    ran = [routing["systems"] for cell in found["cells"] for routing in cell["routings"]]
    if wanted and not (ran and all(SUBJECT in each for each in ran)):
        return f"{SUBJECT} did not run in every cell"
    return None if any(ran) else "no system ran"


def _judge_routing(cell, routing, anchors):
    product = cells.NUMBERS[cell["format"]].multiplied
    rates = [anchors[when][f"{product}_product_flops_per_s"] for when in ("before", "after")]
    anchor = sum(rates) / len(rates)
    systems = routing["systems"]
    for system in systems.values():
        system["floor_share"] = 1 / system["times"]["median"]
        if routing["bound"] == "compute":
            system["anchor_share"] = 1e6 * cell["flops"] / system["us"]["median"] / anchor
    ours = systems.get(SUBJECT)
    routing["verdict"], routing["anchor_verdict"], routing["against"] = None, None, {}
    if ours is None:
        return
    if routing["routing"] == "uniform":  # what the bars were set for
        routing["verdict"] = cells.verdict(ours["times"]["median"], cell["bar"], cell["stretch"])
        if "anchor_share" in ours:
            routing["anchor_verdict"] = cells.verdict(1 / ours["anchor_share"], cell["bar"],
                                                      cell["stretch"])
    routing["against"] = {name: numbers.compare(ours["times"], theirs["times"])
                          for name, theirs in systems.items() if name != SUBJECT}


# ---- The form of the JSON ----------------------------------------------------------------------

SUMMARY = {"median": float, "p10": float, "p90": float, "count": int}
FORM = {
    "what": str, "version": int, "command": str, "date": str, "machine": dict, "versions": dict,
    "settings": {"device": str, "format": str, "replays": int, "steady": float, "drift": float,
                 "forwards": int, "seed": int},
    "systems": [{"name": str, "what": str, "absent": (str, None)}],
    "anchors": {"before": dict, "after": dict, "drift": dict},
    "clocks": (str, None), "rejected": (str, None), "wrong": [str], "complete": bool,
    "skipped": [str],
    "cells": [{
        "shape": str, "tokens": int, "format": str, "bar": (float, None), "stretch": (float, None),
        "flops": int, "weight_sets": int, "separators_us": float, "absent": dict, "host_us": dict,
        "host_verdict": (str, None),
        "routings": [{
            "routing": str, "floor_us": SUMMARY, "bound": str, "experts_hit": SUMMARY,
            "bytes_before_reuse": int, "cold": bool, "clocks": (dict, None), "systems": dict,
            "verdict": (str, None), "anchor_verdict": (str, None), "against": dict}]}]}
SYSTEM = {"us": SUMMARY, "times": SUMMARY, "error": (float, None), "right": bool,
          "floor_share": float}


def faults(found, form=None, where="run"):
    """What of a run is not as FORM says: a list of sentences, empty when all is."""
    form = FORM if form is None else form
    if isinstance(form, dict):
        if not isinstance(found, dict):
            return [f"{where} is no object"]
        wrong = [f"{where} has no {key}" for key in form if key not in found]
        for key in form.keys() & found.keys():
            wrong += faults(found[key], form[key], f"{where}.{key}")
        if isinstance(found.get("systems"), dict):
            for name, system in found["systems"].items():
                wrong += faults(system, SYSTEM, f"{where}.{name}")
        return wrong
    if isinstance(form, list):
        if not isinstance(found, list):
            return [f"{where} is no list"]
        return [fault for number, each in enumerate(found)
                for fault in faults(each, form[0], f"{where}[{number}]")]
    kinds = form if isinstance(form, tuple) else (form,)
    if found is None and None in kinds:
        return []
    fits = any(kind is not None and _is(found, kind) for kind in kinds)
    return [] if fits else [f"{where} is {found!r}"]


def _is(found, kind):
    if kind is float:
        return isinstance(found, (int, float)) and not isinstance(found, bool)
    if kind is int:
        return isinstance(found, int) and not isinstance(found, bool)
    return isinstance(found, kind)


# ---- Table and plot ----------------------------------------------------------------------------


def _head(found):
    machine, versions = found["machine"], found["versions"]
    library = next((system["version"] for system in found.get("systems", ())
                    if system["name"] == SUBJECT and system.get("version")), None)
    device, number = machine.get("gpu") or machine.get("cpu"), found["settings"]["format"]
    peers = "".join(f"{system['name']} {system['version']}, " for system in found["systems"]
                    if system["name"] != SUBJECT and system.get("version"))
    lines = [f"{device}, {number}, torch {versions['torch']}, {peers}"
             f"moxie {versions['moxie']} ({library or versions.get('commit')}), {found['date']}", "",
             f"    {found['command']}", ""] + cells.floors_of_another(machine.get("gpu"))
    if not found["complete"]:
        what = "the run ended before its last cell" if found["cells"] else "no cell was measured"
        lines += [f"**Incomplete**: {what}.", ""]
    if found["rejected"]:
        lines += [f"**Rejected**: {found['rejected']}.", ""]
    if found["wrong"]:
        lines += [f"**Wrong numbers**: {', '.join(found['wrong'])}.", ""]
    for when in ("before", "after"):
        lines.append(f"Anchors {when}: " + ", ".join(
            f"{name} {value / 1e12:.4g}e12" for name, value in found["anchors"][when].items()))
    for system in found["systems"]:
        if system["absent"]:
            lines.append(f"Skipped: {system['name']} ({system['absent']})")
    lines += [f"Skipped: {reason}" for reason in found["skipped"]]
    if found["clocks"]:
        lines.append(f"No clocks: {found['clocks']}")
    return lines


def _entry(name, routing):
    """Microseconds and multiples of the floor; how Moxie fares against it."""
    system = routing["systems"].get(name)
    if system is None:
        return ""
    text = f"{system['us']['median']:.1f} ({system['times']['median']:.3f})"
    if not system["right"]:
        text += " wrong"
    against = routing["against"].get(name)
    return text if against in (None, "faster") else f"{text} {against}"


def _floor(found, cell, routing):
    """Microseconds, and what about the memory is not as it should be."""
    text = f"{routing['floor_us']['median']:.1f}"
    if cell["weight_sets"] < found["settings"]["forwards"]:
        text += f", {cell['weight_sets']} weight sets"
    return text if routing["cold"] else text + ", warm"


def _row(found, cell, routing, names):
    def number(value):
        return "" if value is None else f"{value:g}"

    ours = routing["systems"].get(SUBJECT, {})
    share = ours.get("anchor_share")
    parts = [cell["shape"], cell["tokens"], routing["routing"],
             _floor(found, cell, routing),
             *(_entry(name, routing) for name in names), number(cell["bar"]),
             number(cell["stretch"]), routing["verdict"] or "",
             "" if share is None else f"{share:.3f} {routing['anchor_verdict'] or ''}".strip()]
    return "| " + " | ".join(map(str, parts)) + " |"


def names_of(found):
    """Of the systems that ran anywhere, in the order of the program."""
    ran = {name for cell in found["cells"] for routing in cell["routings"]
           for name in routing["systems"]}
    return [system["name"] for system in found["systems"] if system["name"] in ran]


def _host_table(found):
    more = (", which computes, too." if found["settings"]["device"] == "cpu" else
            f"; below Python, the bar is {HOST_BAR_US:g}.")
    lines = ["", f"Host microseconds of one call without a graph{more}", "",
             "| shape | tokens | system | call | below Python | verdict |",
             "| --- | --- | --- | --- | --- | --- |"]
    for cell in found["cells"]:
        for name, host in cell["host_us"].items():
            below = host.get("below_python")
            parts = [cell["shape"], cell["tokens"], name, f"{host['call']:.1f}",
                     "" if below is None else f"{below:.1f}",
                     (cell["host_verdict"] or "") if name == SUBJECT else ""]
            lines.append("| " + " | ".join(map(str, parts)) + " |")
    return lines


def table(found):
    """The run as markdown."""
    names = names_of(found)
    what = {system["name"]: system["what"] for system in found["systems"]}
    titles = ["shape", "tokens", "routing", "floor us",
              *(f"{name}, {what[name]}" for name in names), "bar", "stretch", "verdict",
              "of the anchor"]  # of compute-bound cells
    lines = _head(found)
    lines += ["", "Median microseconds of a forward, and multiples of the floor. `tie` and "
              "`slower` say how moxie fares.", "", "| " + " | ".join(titles) + " |",
              "| " + " | ".join("---" for _ in titles) + " |"]
    lines += [_row(found, cell, routing, names) for cell in found["cells"]
              for routing in cell["routings"]]
    return "\n".join(lines + _host_table(found)) + "\n"


def curves(found):
    """{shape: {system: [(tokens, share of the floor)]}} at uniform routing."""
    shapes = {}
    for cell in found["cells"]:
        for routing in cell["routings"]:
            if routing["routing"] == "uniform":
                for name, system in routing["systems"].items():
                    line = shapes.setdefault(cell["shape"], {}).setdefault(name, [])
                    line.append((cell["tokens"], system["floor_share"]))
    return shapes


def plot(found, path):
    """Draws the share of the floor over tokens, a line per system; says why it did not, or None."""
    shapes = curves(found)
    if not shapes:
        return "no cell has uniform routing"
    number = found["settings"]["format"]
    parts = {system["name"]: f"{system['name']}: {system['what']}" for system in found["systems"]
             if system["what"] != cells.WHOLE}
    return chart.draw({f"{shape} {number}": {parts.get(name, name): line
                                             for name, line in lines.items()}
                       for shape, lines in shapes.items()}, "tokens", path, parts.values())
