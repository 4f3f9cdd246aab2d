"""DeepGEMM's grouped products, as the user has it: two of them alone, in both layouts.

--deep-gemm is the folder that holds the package deep_gemm. In fp8 both inputs are quantised before,
with their scales as its kernels read them: those of a column one after another.
"""

import importlib

import torch

from measure import fp8
from measure.case import ALIGN, FORWARDS, off_by
from measure.cells import PRODUCTS
from peers import System, Unfit, check_blocks, lacks, lacks_format

MASKED_TOKENS = 256  # every expert has room for all of them


def alignment(module):
    for name in ("get_mk_alignment_for_contiguous_layout", "get_m_alignment_for_contiguous_layout"):
        if hasattr(module, name):
            return getattr(module, name)()
    return ALIGN


def quantised(case, *shape):
    """Random rows in e4m3 and their scales."""
    values, scales = fp8.quantise_rows(case.random(1.0, *shape, dtype=torch.float32))
    # Not contiguous(), to which a single column is all the same.
    turned = case.empty(*shape[:-2], scales.shape[-1], shape[-2], dtype=torch.float32)
    return values, turned.transpose(-2, -1).copy_(scales)


def pack(values, scales):
    """As the functions take an operand."""
    return values if scales is None else (values, scales)


class _DeepGemm(System):
    what = PRODUCTS
    functions = {}  # by format; the first that there is: names have changed

    def has_to_be_there(self):
        return self.options.deep_gemm is not None

    def available(self):
        absent = (lacks_format(self.options.format, *self.functions)
                  or lacks("deep_gemm", self.options.deep_gemm, "--deep-gemm"))
        if absent:
            return absent
        try:
            self.module = importlib.import_module("deep_gemm")
        except Exception as error:  # whatever it raises where it does not fit
            return f"deep_gemm: {type(error).__name__}: {error}"
        names = self.functions[self.options.format]
        name = next((each for each in names if hasattr(self.module, each)), None)
        if name is None:
            return f"this deep_gemm has no {' nor '.join(names)}"
        self.multiply = getattr(self.module, name)
        self.version = getattr(self.module, "__version__", None)
        return None

    def prepare(self, case):
        super().prepare(case)
        check_blocks(case)

    def make(self, *rows):
        """The second product's input, and both outputs; the first's is one, as an engine has it."""
        case, sizes = self.case, self.case.sizes
        self.middle = self.inputs(*rows, sizes.intermediate)
        self.both = case.empty(*rows, 2 * sizes.intermediate)
        self.out = case.empty(FORWARDS, *rows, sizes.hidden)

    def inputs(self, *shape):
        """Of every forward. One after another: in f32 all would be large."""
        case = self.case
        return [quantised(case, *shape) if case.number == "fp8" else case.random(1.0, *shape)
                for _ in range(FORWARDS)]

    def operands(self, forward):
        """Rows and w1, middle and w2."""
        w1, w2 = map(pack, self.case.weights(forward), self.case.scales(forward))
        return (self.rows[forward], w1), (self.middle[forward], w2)

    def line(self, inputs, index):
        """One of them in f32."""
        if self.case.number != "fp8":
            return inputs[index].float()
        row = inputs[0][index].float()
        return row * fp8.spread(inputs[1][index], row.shape[-1])

    def compare(self, projection, forward, inputs, seen):
        """The error of some rows of the first or the second product."""
        places = self.places(forward)
        wanted = [torch.mv(self.case.dense(forward, expert)[projection],
                           self.line(inputs[forward], index)) for expert, index in places]
        return off_by(torch.stack([seen[index] for _, index in places]), torch.stack(wanted))

    def errors(self, answers, outputs):
        found = [self.compare(1, forward, self.middle, outputs[forward])
                 for forward in range(FORWARDS)]
        # The first product's output still holds the last forward's.
        return found + [self.compare(0, FORWARDS - 1, self.rows, self.both)]

    def release(self):
        self.middle = self.both = self.out = self.rows = None
        super().release()


class Contiguous(_DeepGemm):
    """Rows by expert, each expert's beginning at a multiple of the alignment."""

    name = "deep_gemm"
    functions = {"bf16": ("m_grouped_bf16_gemm_nt_contiguous",),
                 "fp8": ("m_grouped_fp8_gemm_nt_contiguous",
                         "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous")}

    def prepare(self, case):
        super().prepare(case)
        self.align = alignment(self.module)
        if ALIGN % self.align != 0:
            raise Unfit(f"its alignment is {self.align} rows")
        count = case.pair_room()
        self.rows = self.inputs(count, case.sizes.hidden) if case.number == "fp8" else (
            case.pair_rows())
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
        first, second = self.operands(forward)
        layout, out = self.layout[forward], self.out[forward]
        self.multiply(*first, self.both, layout)
        self.multiply(*second, out, layout)
        return out

    def places(self, forward):
        used = (self.layout[forward] >= 0).nonzero().view(-1).tolist()
        experts = self.layout[forward].tolist()
        return [(experts[row], row) for row in {used[0], used[len(used) // 2], used[-1]}]


class Masked(_DeepGemm):
    """Room for every token at every expert, of which each uses the first rows."""

    name = "deep_gemm_masked"
    functions = {"bf16": ("m_grouped_bf16_gemm_nt_masked",),
                 "fp8": ("m_grouped_fp8_gemm_nt_masked", "fp8_m_grouped_gemm_nt_masked",
                         "m_grouped_gemm_fp8_fp8_bf16_nt_masked")}

    def prepare(self, case):
        super().prepare(case)
        if case.tokens > MASKED_TOKENS:
            raise Unfit(f"only up to {MASKED_TOKENS} tokens")
        room = -(-case.tokens // ALIGN) * ALIGN
        experts = case.sizes.experts
        self.rows = self.inputs(experts, room, case.sizes.hidden)
        self.make(experts, room)
        self.expected = max(1, -(-case.pairs // experts))

    def run(self, forward):
        first, second = self.operands(forward)
        counts, out = self.case.counts[forward], self.out[forward]
        self.multiply(*first, self.both, counts, self.expected)
        self.multiply(*second, out, counts, self.expected)
        return out

    def places(self, forward):
        counts = self.case.counts[forward].tolist()
        busy = [expert for expert, count in enumerate(counts) if count]
        return [(expert, (expert, counts[expert] - 1)) for expert in {busy[0], busy[-1]}]
