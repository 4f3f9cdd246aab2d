"""The cells: sizes, tokens, what the machine allows at best (the floor), and how near to that is
wanted (bar, stretch).

Bars are multiples of the floor of the very routing that was drawn, because the draw alone moves a
time by 4%. They hold for uniform routing. Some shapes, and some tokens of others, are measured
without bars.
"""

from typing import NamedTuple, Optional

READ_BYTES_PER_S = 4.5e12  # of HBM, the best seen on an H200
REUSE_BYTES = 180e6  # to be touched before an expert is read again: three times the L2
WHOLE, PRODUCTS = "whole layer", "two products"  # what a system times
STEADY_TOKENS = 4096  # cells from here on are measured after seconds of load, at a settled clock


FLOPS_PER_S = {"bf16": 790e12, "fp8": 1580e12}  # of a large product, the best seen on an H200


class Number(NamedTuple):
    """A format of weights, by what the floor needs of it."""

    weight_bytes: float  # of one weight, with its share of a scale
    multiplied: str  # what both operands of a product are then

    def flops_per_s(self):
        return FLOPS_PER_S[self.multiplied]


NUMBERS = {
    "bf16": Number(2, "bf16"),
    "fp8": Number(1 + 4 / 128 ** 2, "fp8"),  # a scale for a block of 128 x 128
    "mxfp4": Number(1 / 2 + 1 / 32, "bf16"),  # a scale of a byte for 32
    "nvfp4": Number(1 / 2 + 1 / 16, "bf16"),  # one for 16; those of an expert are too few to count
    "int4_g32": Number(1 / 2 + 2 / 32, "bf16"),  # a bf16 scale for 32
}


def floors_of_another(gpu):
    """What the table of a GPU that floors and bars are not of says about them, as lines."""
    if gpu is None or "H200" in gpu:
        return []
    rates = ", ".join(f"{name} {flops / 1e12:g} TFLOP/s" for name, flops in FLOPS_PER_S.items())
    return [f"Floors, and what is judged by them, are an H200's ({READ_BYTES_PER_S / 1e12:g} TB/s, "
            f"{rates}), not this GPU's.", ""]


class Shape(NamedTuple):
    hidden: int
    intermediate: int
    experts: int
    top_k: int

    def expert_weights(self):
        """How many numbers gate, up and down of one expert are."""
        return 3 * self.hidden * self.intermediate

    def flops(self, tokens):
        return 2 * self.expert_weights() * tokens * self.top_k


SHAPES = {
    "q30b": Shape(2048, 768, 128, 8),
    "q235b": Shape(4096, 1536, 128, 8),
    "dsv3ep8": Shape(7168, 2048, 32, 1),  # one rank's share of DeepSeek-V3 over 8
    "mixtral": Shape(4096, 14336, 8, 2),
    "dsv3tp8": Shape(7168, 256, 256, 8),  # tensor parallelism over 8
    "qwen35tp8": Shape(4096, 128, 512, 10),
    "qwen3next": Shape(2048, 512, 512, 10),
    "q235btp8": Shape(4096, 192, 128, 8),
    "gptoss120b": Shape(2880, 2880, 128, 4),
    "kimik2tp8": Shape(7168, 256, 384, 8),
    "tiny": Shape(256, 128, 16, 4),  # for a machine without a GPU; no bars
}

NO_BARS = {tokens: (None, None) for tokens in (1, 16, 64, 1024, 16384)}
# Weights of 4 bits: floor / 0.68 and floor / 0.80. Of 4096 tokens and more what is wanted is 1.15
# times the time of bf16, of 256 and 1024 also 0.75 times it, which no floor says.
FOUR_BITS = (1.47, 1.25)


def four_bit_bars(one_token):
    """Of a shape that one token should take so many floors of."""
    return {1: (one_token, None), **dict.fromkeys((16, 64, 256, 1024), FOUR_BITS),
            **dict.fromkeys((4096, 16384), (None, None))}


# tokens: bar, stretch, as multiples of the floor. In fp8 the stretch is what DeepGEMM's two
# products alone take, and none where the bar is under that already. With weights of 4 bits one
# token's is 14, 30 and 21 us of q30b, q235b and gptoss120b.
BARS = {
    "bf16": {
        "q30b": {1: (1.43, 1.25), 16: (1.06, 1.035), 64: (1.06, 1.03), 256: (1.12, 1.04),
                 1024: (1.20, 1.09), 4096: (1.48, 1.35), 16384: (1.19, 1.16)},
        "q235b": {1: (1.16, 1.07), 16: (1.03, 1.016), 64: (1.027, 1.015), 256: (1.07, 1.02),
                  1024: (1.13, 1.05), 4096: (1.28, 1.20), 16384: (1.15, 1.10)},
        "dsv3ep8": {64: (1.03, 1.016), 1024: (1.075, 1.027), 4096: (1.165, 1.07),
                    32768: (1.136, 1.095)},
        "mixtral": {1: (1.07, 1.035), 64: (1.045, 1.02), 1024: (1.26, 1.18), 4096: (1.136, 1.08)},
        "q235btp8": NO_BARS,
    },
    "fp8": {
        "q30b": {1: (1.8, None), 16: (1.14, None), 64: (1.10, None), 256: (1.15, None),
                 1024: (1.30, None), 4096: (1.8, None), 16384: (1.63, 1.435)},
        "q235b": {1: (1.25, None), 16: (1.07, None), 64: (1.06, None), 256: (1.12, None),
                  1024: (1.19, None), 4096: (1.56, None), 16384: (1.39, 1.27)},
        "dsv3ep8": {64: (1.08, None), 1024: (1.11, None), 4096: (1.32, None),
                    32768: (1.40, 1.267)},
        "mixtral": {1: (1.15, None), 64: (1.09, None), 1024: (1.51, None), 4096: (1.38, 1.343)},
        "dsv3tp8": NO_BARS,
        "qwen35tp8": NO_BARS,
        "qwen3next": NO_BARS,
    },
    "mxfp4": {"gptoss120b": four_bit_bars(1.79), "q30b": four_bit_bars(3.14)},
    "nvfp4": {
        "q30b": four_bit_bars(2.97),
        "q235b": four_bit_bars(1.59),
        "dsv3ep8": {64: FOUR_BITS, 1024: FOUR_BITS, 4096: (None, None), 32768: (None, None)},
    },
    "int4_g32": {"q30b": four_bit_bars(2.97), "kimik2tp8": {16: FOUR_BITS}},
}
QUICK = {"q30b": (1, 64, 1024, 4096)}
TINY_TOKENS = (1, 16, 64)


class Cell(NamedTuple):
    shape: str
    tokens: int
    number: str
    bar: Optional[float]  # None: none was set
    stretch: Optional[float]

    def sizes(self):
        return SHAPES[self.shape]

    def floor(self, experts_hit):
        """(microseconds, "memory" or "compute") at best, where these many experts have rows."""
        sizes, number = self.sizes(), NUMBERS[self.number]
        weights = experts_hit * sizes.expert_weights()
        memory_us = 1e6 * weights * number.weight_bytes / READ_BYTES_PER_S
        compute_us = 1e6 * sizes.flops(self.tokens) / number.flops_per_s()
        return max((memory_us, "memory"), (compute_us, "compute"))


def select(number, shapes, tokens=(), quick=False):
    """The cells of these shapes: those of the table, or those of `tokens`, with a bar or not."""
    found = []
    for shape in shapes:
        bars = BARS[number].get(shape, {})
        if quick and not tokens:
            wanted = QUICK.get(shape, tuple(bars)[:1] or TINY_TOKENS)
        else:
            wanted = tokens or tuple(bars) or TINY_TOKENS
        found += [Cell(shape, count, number, *bars.get(count, (None, None))) for count in wanted]
    return found


def set_bytes(sizes, number):
    """Of all experts of one layer."""
    return int(sizes.experts * sizes.expert_weights() * NUMBERS[number].weight_bytes)


def sets_that_fit(one_bytes, free_bytes, wanted):
    """How many weight sets to make; 0 when not even one fits."""
    return int(min(wanted, free_bytes // one_bytes))


def bytes_before_reuse(sizes, number, hits, sets):
    """What is read between two uses of a weight set, where forwards hit so many experts each."""
    one = sizes.expert_weights() * NUMBERS[number].weight_bytes
    return int(one * sum(hits) * sets / len(hits))


def verdict(times, bar, stretch):
    """"stretch", "met" or "missed"; None where no bar was set."""
    if bar is None:
        return None
    if stretch is not None and times <= stretch:
        return "stretch"
    return "met" if times <= bar else "missed"
