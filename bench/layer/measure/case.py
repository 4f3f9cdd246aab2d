"""What the systems of a cell share: weights, rows, routings drawn anew in place, the answer.

Forward i of FORWARDS uses weight set i % sets, and rows and a routing of its own.
"""

import torch

from measure import four_bits, fp8

FORWARDS = 8
DTYPES = {"bf16": torch.bfloat16, "fp8": fp8.E4M3}  # of what is multiplied
# Of x and y, by the format of the weights.
ROWS = {"bf16": "bf16", "fp8": "bf16", **dict.fromkeys(four_bits.FORMATS, "bf16")}
FP8_AT_ONCE = 1 << 26  # weights that are quantised together: it takes many times their memory
ROUTINGS = ("uniform", "zipf", "one")
ZIPF = 1.0  # the exponent: how often the r-th most popular expert is wanted is r ** -ZIPF
ALIGN = 128  # rows that some peers want an expert's rows to begin at multiples of


class Case:
    """The weights of a shape, and after resize() all else of a number of tokens."""

    def __init__(self, device, sizes, number, sets, seed):
        self.device, self.sizes, self.number, self.sets, self.seed = (
            device, sizes, number, sets, seed)
        self.row_number = ROWS[number]
        self.dtype, self.where = DTYPES[self.row_number], device.torch_device
        self.generator = torch.Generator(self.where).manual_seed(seed)
        hidden, intermediate = sizes.hidden, sizes.intermediate
        # Gate first, then up, each with blocks of its own; of scales None where there are none.
        self.w1, self.s1, self.g1 = zip(*(self._weights(2, intermediate, hidden)
                                          for _ in range(sets)))
        self.w2, self.s2, self.g2 = zip(*(self._weights(1, hidden, intermediate)
                                          for _ in range(sets)))

    def _weights(self, parts, rows, columns):
        """([experts, parts * rows, columns], scales, global scales of nvfp4); of 4 bits, two
        columns are one."""
        if self.number in four_bits.FORMATS:
            return four_bits.random_weights(self, parts, rows, columns)
        if self.number == "fp8":
            return *self._fp8_weights(parts, rows, columns), None
        return self.random(columns ** -0.5, self.sizes.experts, parts * rows, columns), None, None

    def _fp8_weights(self, parts, rows, columns):
        experts, scale = self.sizes.experts, columns ** -0.5
        values = self.empty(experts, parts, rows, columns, dtype=fp8.E4M3)
        scales = self.empty(experts, parts, fp8.blocks_of(rows), fp8.blocks_of(columns),
                            dtype=torch.float32)
        step = max(1, FP8_AT_ONCE // (parts * rows * columns))
        for first in range(0, experts, step):
            some = slice(first, first + step)
            values[some], scales[some] = fp8.quantise_blocks(
                self.random(scale, *values[some].shape, dtype=torch.float32))
        # Far apart, so that none of them could stand for another.
        scales *= self.random(0.5, *scales.shape, dtype=torch.float32).exp2_()
        return values.flatten(1, 2), scales.flatten(1, 2)

    def random(self, scale, *shape, dtype=None):
        made = self.empty(*shape, dtype=dtype)
        return made.normal_(0, scale, generator=self.generator)

    def empty(self, *shape, dtype=None):
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.where)

    def resize(self, tokens):
        sizes = self.sizes
        self.tokens, self.pairs = tokens, tokens * sizes.top_k
        self.x = self.random(1.0, FORWARDS, tokens, sizes.hidden)
        self.y = self.empty(FORWARDS, tokens, sizes.hidden)
        self.router = self.empty(FORWARDS, tokens, sizes.top_k, dtype=torch.float32)
        self.router.uniform_(0.1, 1.0, generator=self.generator)
        self.router /= self.router.sum(-1, keepdim=True)
        self.ids = self.empty(FORWARDS, tokens, sizes.top_k, dtype=torch.int32)
        self.scores = self.empty(FORWARDS, tokens, sizes.experts, dtype=torch.float32)
        self.best = (self.empty(FORWARDS, tokens, sizes.top_k, dtype=torch.float32),
                     self.empty(FORWARDS, tokens, sizes.top_k, dtype=torch.int64))
        self.counts = self.empty(FORWARDS, sizes.experts, dtype=torch.int32)  # rows of each expert
        self.ends = self.empty(FORWARDS, sizes.experts, dtype=torch.int32)  # where they end
        self.ones = torch.ones((1, 1), dtype=torch.int32, device=self.where)
        self.popular = {routing: self._popularity(routing) for routing in ROUTINGS}
        self._rows = None

    def _popularity(self, routing):
        """[FORWARDS, 1, experts], the logarithm of how much each expert is wanted."""
        experts = self.sizes.experts
        chance = torch.Generator().manual_seed(self.seed)
        found = torch.zeros(FORWARDS, 1, experts)
        for forward in range(FORWARDS):
            order = torch.randperm(experts, generator=chance)
            if routing == "zipf":
                found[forward, 0, order] = -ZIPF * torch.arange(1, experts + 1).log()
            elif routing == "one":
                found[forward, 0, order[:1]] = 1e9
        return found.to(self.where)

    def draw(self, seed, routing):
        """New ids of every forward: top_k different experts a token, by popularity."""
        self.generator.manual_seed(seed)
        # The largest of popularity plus Gumbel noise are a draw without putting back.
        self.scores.exponential_(generator=self.generator).log_().neg_()
        self.scores += self.popular[routing]
        torch.topk(self.scores, self.sizes.top_k, sorted=False, out=self.best)
        chosen = self.best[1]
        self.ids.copy_(chosen)
        self.counts.zero_()
        chosen = chosen.view(FORWARDS, self.pairs)
        self.counts.scatter_add_(1, chosen, self.ones.expand(FORWARDS, self.pairs))
        torch.cumsum(self.counts, 1, dtype=torch.int32, out=self.ends)

    def hits(self):
        """How many experts have rows, of each forward."""
        return (self.counts > 0).sum(1).tolist()

    def pair_rows(self):
        """[FORWARDS, rows, hidden]: rows as if gathered, for systems that only multiply.

        There are enough of them for every expert's to begin at a multiple of ALIGN.
        """
        if self._rows is None:
            self._rows = self.random(1.0, FORWARDS, self.pair_room(), self.sizes.hidden)
        return self._rows

    def pair_room(self):
        room = self.pairs + min(self.pairs, self.sizes.experts) * (ALIGN - 1)
        return -(-room // ALIGN) * ALIGN

    def weights(self, forward):
        return self.w1[forward % self.sets], self.w2[forward % self.sets]

    def scales(self, forward):
        return self.s1[forward % self.sets], self.s2[forward % self.sets]

    def global_scales(self, forward):
        return self.g1[forward % self.sets], self.g2[forward % self.sets]

    def dense(self, forward, expert):
        """Both projections of one expert in f32."""
        of_it = [[each if each is None else each[expert] for each in both] for both in (
            self.weights(forward), self.scales(forward), self.global_scales(forward))]
        return [self._dense(*parts) for parts in zip(*of_it, (2, 1))]

    def _dense(self, values, scales, global_scales, halves):
        if self.number in four_bits.FORMATS:
            return four_bits.dequantised(self.number, values, scales, global_scales)
        if self.number == "fp8":
            return fp8.dequantised(values.unflatten(0, (halves, -1)),
                                   scales.unflatten(0, (halves, -1))).flatten(0, 1)
        return values.float()

    def some_tokens(self):
        return sorted({0, self.tokens // 2, self.tokens - 1})

    def answer(self, forward, tokens, quantised=True):
        """[tokens, hidden] in f32: what a layer should give for these tokens, which quantises rows
        before each product where the format wants that, or, if told so, does not."""
        def operand(rows):
            return fp8.rounded(rows) if quantised and self.number == "fp8" else rows.float()

        rows = operand(self.x[forward, tokens])
        ids, router = self.ids[forward, tokens].tolist(), self.router[forward, tokens]
        found = torch.zeros_like(rows)
        for row, experts in enumerate(ids):
            for slot, expert in enumerate(experts):
                w1, w2 = self.dense(forward, expert)
                gate, up = torch.mv(w1, rows[row]).chunk(2)
                middle = torch.nn.functional.silu(gate) * up
                if self.number == "fp8":
                    middle = operand(middle.to(self.device.middle))
                found[row] += router[row, slot] * torch.mv(w2, middle)
        return found


def off_by(seen, wanted):
    """The relative error; not a number where anything is none."""
    seen = seen.float()
    return ((seen - wanted).norm() / wanted.norm()).item()
