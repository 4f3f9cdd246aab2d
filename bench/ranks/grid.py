"""The cells: what is timed over how many GPUs, with which tokens, and how fast it is wanted.

Bars and stretches are microseconds over 8 GPUs at uniform routing, where nobody starts late. What
others reach there was measured once, or published: DeepEP's rows are reduced already, its routing
is cached, its input quantised, which makes its times lower bounds of its own.
"""

from typing import NamedTuple, Optional

RANKS = (2, 4, 8)
RANKS_OF_BARS = 8
FP8 = "fp8_block128"


class Group(NamedTuple):
    """One run of `moxie bench`: cells that differ in their tokens alone."""

    op: str
    shape: str
    rows: str  # as they are dispatched
    tokens: tuple
    skew: float = 0.0
    delay_us: float = 0.0
    sms: int = 0  # that rows between ranks may take, 0: all

    def is_even(self):
        return self.skew == 0 and self.delay_us == 0

    def title(self):
        return f"{self.op} {self.shape} {self.rows}"

    def arguments(self, ranks):
        """What `moxie bench` is told of it."""
        told = ["--op", self.op, "--shape", self.shape, "--ranks", str(ranks), "--tokens",
                ",".join(map(str, self.tokens)), "--weight-format", FP8, "--dispatch-format",
                self.rows]
        if self.skew:
            told += ["--skew", f"{self.skew:g}"]
        if self.delay_us:
            told += ["--delay-us", f"{self.delay_us:g}"]
        return told + (["--dispatch-sms", str(self.sms)] if self.sms else [])


class Wanted(NamedTuple):
    bar_us: float
    stretch_us: float
    others: dict = {}  # name: microseconds


# (op, shape, rows): {tokens: Wanted}
BARS = {
    ("dispatch", "dsv3", FP8): {
        128: Wanted(35, 25, {"DeepEP": 63}), 1024: Wanted(130, 115, {"DeepEP": 151}),
        4096: Wanted(455, 430)},
    ("combine", "dsv3", FP8): {
        128: Wanted(50, 38, {"DeepEP": 79}), 1024: Wanted(240, 215, {"DeepEP": 293}),
        4096: Wanted(880, 840)},
    ("both", "dsv3", "input"): {1: Wanted(25, 18), 8: Wanted(28, 21), 32: Wanted(40, 32)},
    ("layer", "dsv3", FP8): {
        128: Wanted(470, 430, {"published": 490}), 1024: Wanted(1200, 1100, {"published": 1222}),
        4096: Wanted(3900, 3400, {"published": 3866}),
        8192: Wanted(7650, 6600, {"published": 7492})},
    ("layer", "h4096e256", FP8): {
        128: Wanted(265, 240, {"published": 265}), 2048: Wanted(900, 780, {"published": 959}),
        8192: Wanted(3420, 2900, {"published": 3269})},
}

# The same where rows between ranks take so many SMs at most.
BARS_ON_SMS = {
    24: {("dispatch", "dsv3", FP8): {4096: Wanted(475, 455, {"DeepEP": 493})},
         ("combine", "dsv3", FP8): {4096: Wanted(930, 880, {"DeepEP": 964})}},
}

EVEN = [Group(*what, tuple(bars)) for what, bars in BARS.items()]
UNEVEN = [Group(op, "dsv3", FP8, (128, 4096), skew=skew)
          for skew in (1.5, 2.0) for op in ("dispatch", "combine", "layer")]
LATE = [Group("both", "dsv3", FP8, (128, 4096), delay_us=20.0),
        Group("layer", "dsv3", FP8, (128, 4096), delay_us=20.0)]
QUICK = [Group("dispatch", "dsv3", FP8, (128,)), Group("combine", "dsv3", FP8, (128,)),
         Group("both", "dsv3", "input", (8,)), Group("layer", "dsv3", FP8, (128,))]
FEW_SMS = [Group(*what, tuple(bars), sms=sms)
           for sms, few in BARS_ON_SMS.items() for what, bars in few.items()]


def select(ops=(), quick=False):
    groups = QUICK if quick else EVEN + FEW_SMS + UNEVEN + LATE
    return [group for group in groups if not ops or group.op in ops]


def wanted(group, ranks, tokens) -> Optional[Wanted]:
    """None where no bar was set."""
    if ranks != RANKS_OF_BARS or not group.is_even():
        return None
    bars = BARS_ON_SMS.get(group.sms, {}) if group.sms else BARS
    return bars.get((group.op, group.shape, group.rows), {}).get(tokens)


def ranks_that_fit(gpus, asked=RANKS):
    """(how many ranks to run, sentences about those that cannot be)."""
    fit = [ranks for ranks in asked if ranks <= gpus]
    return fit, [f"{ranks} ranks: {gpus} GPUs are visible" for ranks in asked if ranks > gpus]
