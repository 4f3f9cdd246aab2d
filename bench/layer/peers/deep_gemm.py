"""DeepGEMM's grouped bf16 products, as the user has it: two of them alone, in both layouts.

--deep-gemm is the folder that holds the package deep_gemm.
"""

import importlib
import importlib.util
import pathlib
import sys

import torch

from measure.case import ALIGN, FORWARDS, off_by
from peers import System, Unfit

MASKED_TOKENS = 256  # every expert has room for all of them


def alignment(module):
    for name in ("get_mk_alignment_for_contiguous_layout", "get_m_alignment_for_contiguous_layout"):
        if hasattr(module, name):
            return getattr(module, name)()
    return ALIGN


class _DeepGemm(System):
    what = "two products"
    function = None

    def available(self):
        if self.options.deep_gemm:
            folder = str(pathlib.Path(self.options.deep_gemm).resolve())
            if folder not in sys.path:
                sys.path.insert(0, folder)
        if importlib.util.find_spec("deep_gemm") is None:
            return "deep_gemm is not installed; --deep-gemm PATH"
        try:
            self.module = importlib.import_module("deep_gemm")
        except Exception as error:  # whatever it raises where it does not fit
            return f"deep_gemm: {type(error).__name__}: {error}"
        if not hasattr(self.module, self.function):
            return f"this deep_gemm has no {self.function}"
        self.multiply = getattr(self.module, self.function)
        return None

    def make(self, *rows):
        """The second product's input, and both outputs; the first's is one, as an engine has it."""
        case, sizes = self.case, self.case.sizes
        self.middle = case.random(1.0, FORWARDS, *rows, sizes.intermediate)
        self.both = case.empty(*rows, 2 * sizes.intermediate)
        self.out = case.empty(FORWARDS, *rows, sizes.hidden)

    def compare(self, forward, places, outputs):
        """places: (expert, index into the rows) of what is looked at."""
        case = self.case
        _, w2 = case.weights(forward)
        wanted = torch.stack([torch.mv(w2[expert].float(), self.middle[forward][index].float())
                              for expert, index in places])
        return off_by(torch.stack([outputs[forward][index] for _, index in places]), wanted)

    def compare_first(self, places, rows):
        """The last forward's, which is the one that the first product's output still holds."""
        w1, _ = self.case.weights(FORWARDS - 1)
        wanted = torch.stack([torch.mv(w1[expert].float(), rows[index].float())
                              for expert, index in places])
        return off_by(torch.stack([self.both[index] for _, index in places]), wanted)

    def errors(self, answers, outputs):
        found = [self.compare(forward, self.places(forward), outputs)
                 for forward in range(FORWARDS)]
        last = FORWARDS - 1
        return found + [self.compare_first(self.places(last), self.rows[last])]

    def release(self):
        self.middle = self.both = self.out = self.rows = None
        super().release()


class Contiguous(_DeepGemm):
    """Rows by expert, each expert's beginning at a multiple of the alignment."""

    name, function = "deep_gemm", "m_grouped_bf16_gemm_nt_contiguous"

    def prepare(self, case):
        super().prepare(case)
        self.align = alignment(self.module)
        if ALIGN % self.align != 0:
            raise Unfit(f"its alignment is {self.align} rows")
        self.rows = case.pair_rows()
        count = self.rows.shape[1]
        self.make(count)
        self.layout = case.empty(FORWARDS, count, dtype=torch.int32)
        self.place = torch.arange(count, dtype=torch.int32, device=case.where)
        self.routed()

    def routed(self):
        """The expert of each row, -1 where there is none."""
        counts = self.case.counts
        padded = (counts + self.align - 1).div_(self.align, rounding_mode="floor").mul_(self.align)
        ends = padded.cumsum(1, dtype=torch.int32)
        place = self.place.expand(FORWARDS, -1).contiguous()
        expert = torch.searchsorted(ends, place, right=True)
        known = expert.clamp(max=counts.shape[1] - 1)
        end = (ends - padded + counts).gather(1, known)
        used = (expert < counts.shape[1]) & (place < end)
        self.layout.copy_(torch.where(used, expert, torch.full_like(expert, -1)))

    def run(self, forward):
        w1, w2 = self.case.weights(forward)
        layout, out = self.layout[forward], self.out[forward]
        self.multiply(self.rows[forward], w1, self.both, layout)
        self.multiply(self.middle[forward], w2, out, layout)
        return out

    def places(self, forward):
        used = (self.layout[forward] >= 0).nonzero().view(-1).tolist()
        experts = self.layout[forward].tolist()
        return [(experts[row], row) for row in {used[0], used[len(used) // 2], used[-1]}]


class Masked(_DeepGemm):
    """Room for every token at every expert, of which each uses the first rows."""

    name, function = "deep_gemm_masked", "m_grouped_bf16_gemm_nt_masked"

    def prepare(self, case):
        super().prepare(case)
        if case.tokens > MASKED_TOKENS:
            raise Unfit(f"only up to {MASKED_TOKENS} tokens")
        room = -(-case.tokens // ALIGN) * ALIGN
        experts = case.sizes.experts
        self.rows = case.random(1.0, FORWARDS, experts, room, case.sizes.hidden)
        self.make(experts, room)
        self.expected = max(1, -(-case.pairs // experts))

    def run(self, forward):
        w1, w2 = self.case.weights(forward)
        counts, out = self.case.counts[forward], self.out[forward]
        self.multiply(self.rows[forward], w1, self.both, counts, self.expected)
        self.multiply(self.middle[forward], w2, out, counts, self.expected)
        return out

    def places(self, forward):
        counts = self.case.counts[forward].tolist()
        busy = [expert for expert, count in enumerate(counts) if count]
        return [(expert, (expert, counts[expert] - 1)) for expert in {busy[0], busy[-1]}]
