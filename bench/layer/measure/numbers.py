"""Statistics of repeated times, the order of contestants, and when two of them tie."""

import math

REPLAYS_MIN = 30
DRIFT_MAX = 0.03
CPU_DRIFT_MAX = 0.25  # whose memory others of the machine use, too
OFF_BY_MAX = 0.02  # relative error of 16-bit formats between the two products and after
# Of fp8, from what is right of rows that are quantised at the same places; a peer that rounds once
# more in between is farther from it, and at most so far from what is right of no quantised rows.
FP8_OFF_BY_MAX, UNQUANTISED_OFF_BY_MAX = 5e-3, 6e-2


def quantile(values, share):
    """With straight lines between the ordered values."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def finite(number):
    """As JSON has it: None where it is no number."""
    return number if math.isfinite(number) else None


def summary(values):
    return {"median": quantile(values, 0.5), "p10": quantile(values, 0.1),
            "p90": quantile(values, 0.9), "count": len(values)}


def spread(found):
    """Half of what lies between p10 and p90."""
    return (found["p90"] - found["p10"]) / 2


def compare(ours, theirs):
    """"faster", "slower" or "tie", of ours: a difference under twice the larger spread is a tie."""
    apart = theirs["median"] - ours["median"]
    if abs(apart) < 2 * max(spread(ours), spread(theirs)):
        return "tie"
    return "faster" if apart > 0 else "slower"


def is_right(number, error, unquantised):
    """Of relative errors in a format; `unquantised` is None where only the first is known."""
    if number != "fp8":
        return error <= OFF_BY_MAX
    return error <= FP8_OFF_BY_MAX or (
        unquantised is not None and unquantised <= UNQUANTISED_OFF_BY_MAX)


def turn(contestants, number):
    """A B, then B A, and so on: what warms up or slows down meets all alike."""
    return list(contestants) if number % 2 == 0 else list(contestants)[::-1]


def drift(before, after):
    """{anchor: how far apart the two measurements are, relative}."""
    return {name: abs(after[name] - before[name]) / before[name] for name in before}


def rejection(drifts, most=DRIFT_MAX):
    """Why a run does not count, or None."""
    moved = [f"{name} moved by {100 * by:.1f}%" for name, by in drifts.items() if not by <= most]
    return f"{', '.join(moved)}; at most {100 * most:g}% is wanted" if moved else None
