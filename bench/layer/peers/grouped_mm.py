"""torch's own grouped product: a layer written with it, and its two products alone."""

import torch

from measure.case import FORWARDS, off_by
from measure.cells import PRODUCTS
from peers import System, lacks_format


def grouped(a, b, ends):
    return torch._grouped_mm(a, b, offs=ends)


class _Grouped(System):
    def available(self):
        absent = lacks_format(self.options.format, "bf16")
        if absent:
            return (f"{absent}: torch's grouped products have no scales for blocks of 128 x 128, "
                    "nor for groups of a row")
        return None if hasattr(torch, "_grouped_mm") else f"torch {torch.__version__} has none"

    def prepare(self, case):
        super().prepare(case)
        # [E, K, N] without moving a number.
        self.w1, self.w2 = ([each.transpose(-2, -1) for each in weights]
                            for weights in (case.w1, case.w2))


class Layer(_Grouped):
    """Sort, gather, product, activation, product, weighted sum: an operator each."""

    name = "torch_grouped_mm"

    def prepare(self, case):
        super().prepare(case)
        self.experts = torch.arange(case.sizes.experts, dtype=torch.int32, device=case.where)
        self.places = torch.arange(case.pairs, device=case.where)
        self.router = case.router.to(case.dtype)

    def run(self, forward):
        case, number = self.case, forward % self.case.sets
        ids, order = torch.sort(case.ids[forward].view(-1), stable=True)
        ends = torch.searchsorted(ids, self.experts, right=True, out_int32=True)
        rows = case.x[forward].index_select(0, order // case.sizes.top_k)
        gate, up = grouped(rows, self.w1[number], ends).chunk(2, dim=-1)
        out = grouped(torch.nn.functional.silu(gate).mul_(up), self.w2[number], ends)
        back = torch.empty_like(order).scatter_(0, order, self.places)
        out = out.index_select(0, back).view(case.tokens, case.sizes.top_k, case.sizes.hidden)
        y = case.y[forward]
        torch.bmm(self.router[forward].unsqueeze(1), out, out=y.unsqueeze(1))
        return y


class Products(_Grouped):
    """The two products of rows that lie by expert; the gates go into the second as they are."""

    name, what = "torch_grouped_mm_products", PRODUCTS

    def prepare(self, case):
        super().prepare(case)
        case.pair_rows()

    def run(self, forward):
        case, number = self.case, forward % self.case.sets
        rows, ends = case.pair_rows()[forward, :case.pairs], case.ends[forward]
        both = grouped(rows, self.w1[number], ends)
        return grouped(both[:, :case.sizes.intermediate], self.w2[number], ends)

    def errors(self, answers, outputs):
        case = self.case
        found = []
        for forward in range(FORWARDS):
            ends = case.ends[forward].tolist()
            w1, w2 = case.weights(forward)
            pairs = sorted({0, case.pairs // 2, case.pairs - 1})
            wanted = []
            for pair in pairs:
                expert = next(each for each, end in enumerate(ends) if pair < end)
                gates = w1[expert, :case.sizes.intermediate].float()
                middle = torch.mv(gates, case.pair_rows()[forward, pair].float())
                wanted.append(torch.mv(w2[expert].float(), middle))
            found.append(off_by(outputs[forward][pairs], torch.stack(wanted)))
        return found
