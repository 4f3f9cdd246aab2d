"""What the systems of a cell share: weights, rows, routings drawn anew in place, the answer.

Forward i of FORWARDS uses weight set i % sets, and rows and a routing of its own.
"""

import torch

FORWARDS = 8
DTYPES = {"bf16": torch.bfloat16}
ROUTINGS = ("uniform", "zipf", "one")
ZIPF = 1.0  # the exponent: how often the r-th most popular expert is wanted is r ** -ZIPF
ALIGN = 128  # rows that some peers want an expert's rows to begin at multiples of


class Case:
    """The weights of a shape, and after resize() all else of a number of tokens."""

    def __init__(self, device, sizes, number, sets, seed):
        self.device, self.sizes, self.number, self.sets, self.seed = (
            device, sizes, number, sets, seed)
        self.dtype, self.where = DTYPES[number], device.torch_device
        self.generator = torch.Generator(self.where).manual_seed(seed)
        experts, hidden, intermediate = sizes.experts, sizes.hidden, sizes.intermediate
        # Gate first, then up.
        self.w1 = [self.random(hidden ** -0.5, experts, 2 * intermediate, hidden)
                   for _ in range(sets)]
        self.w2 = [self.random(intermediate ** -0.5, experts, hidden, intermediate)
                   for _ in range(sets)]

    def random(self, scale, *shape):
        made = torch.empty(shape, dtype=self.dtype, device=self.where)
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
            room = self.pairs + min(self.pairs, self.sizes.experts) * (ALIGN - 1)
            self._rows = self.random(1.0, FORWARDS, -(-room // ALIGN) * ALIGN, self.sizes.hidden)
        return self._rows

    def weights(self, forward):
        return self.w1[forward % self.sets], self.w2[forward % self.sets]

    def some_tokens(self):
        return sorted({0, self.tokens // 2, self.tokens - 1})

    def answer(self, forward, tokens):
        """[tokens, hidden] in f32: what a layer should give for these tokens."""
        w1, w2 = self.weights(forward)
        rows = self.x[forward, tokens].float()
        ids, router = self.ids[forward, tokens].tolist(), self.router[forward, tokens]
        found = torch.zeros_like(rows)
        for row, experts in enumerate(ids):
            for slot, expert in enumerate(experts):
                gate, up = torch.mv(w1[expert].float(), rows[row]).chunk(2)
                middle = torch.nn.functional.silu(gate) * up
                found[row] += router[row, slot] * torch.mv(w2[expert].float(), middle)
        return found


def off_by(seen, wanted):
    """The relative error; not a number where anything is none."""
    seen = seen.float()
    return ((seen - wanted).norm() / wanted.norm()).item()
