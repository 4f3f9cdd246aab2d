"""What the adapters of engines share: one library and few instances for a process, and layers whose
weights come with each call.

An engine keeps its weights and gives them to a function again and again. A Borrower makes a layer
of them at the first call, in place, and another where they are others. What Moxie cannot compute
raises MoxieError.
"""

import threading
import weakref

from moxie import abi
from moxie.host import Libraries, default_path
from moxie.modules import Shared, columns_of, kind_of, refusal, with_room

LAYERS_MAX = 257  # of one instance, one of which is kept; more of one kind have another


def _not_called(data):
    """An all_gather for an instance that only says what it refuses."""
    raise refusal(abi.E_INTERNAL, "nothing is exchanged before there are layers")


class Engine:
    """One engine's share of this process."""

    def __init__(self, name):
        self.name = name
        self.lock = threading.Lock()  # around whatever changes these
        self.libraries = Libraries(f"moxie.{name} {abi.VERSION}", "name a libmoxie.so by the "
                                   "variable MOXIE_PLUGIN, or unset it")
        # What must be equal -> Shared, to the end of the process: an engine that loads other weights
        # makes its layers anew, and replays graphs of the old ones, in which the buffers' addresses
        # are.
        self.shared = {}
        self.borrowers = weakref.WeakSet()

    def library(self):
        """The library of MOXIE_PLUGIN, loaded once; MoxieError as of moxie.load."""
        return self.libraries[default_path()]

    def refuse(self, keys):
        """MoxieError with every reason why a configuration cannot work, or nothing."""
        with self.library().open(keys, self.name, all_gather=_not_called) as instance:
            instance.refuse()

    def room(self, keys, device, all_gather=None):
        """A Shared of this configuration with a place for another layer. Under the lock. Over
        several ranks they make one at the same time, because their layers come in one order."""
        group = id(getattr(all_gather, "group", None))  # others have other peers, of equal keys too
        return with_room(self.shared, (self.library().path, device, group, *sorted(keys.items())),
                         lambda: Shared(self.library(), keys, self.name, device, all_gather))

    def check(self):
        """Raises the failure of past forwards over ranks, if there is one: Experts.check."""
        for each in list(self.shared.values()):
            if each.experts.ranks > 1:
                each.experts.check()

    def layers(self):
        """How many layers of this engine there are."""
        with self.lock:
            return sum(each.layer is not None for each in self.borrowers)


class Borrower:
    """A layer of an engine's model; a subclass names its Engine."""

    engine = None
    marks = layer = None  # of the weights that were borrowed last
    shared = scales = None
    all_gather = None  # of moxie.Experts, where the layer is of several ranks

    def borrow(self, marks, keys, weights, orders, biases, scales):
        """Makes the layer of two weights [E, rows, columns], two biases and two scales, or None
        each; their numbers are read where they lie, now and later."""
        device = weights[0].device
        if kind_of(device).capturing():
            raise refusal(abi.E_CAPTURING, "this layer has not run yet, or its weights moved, and "
                          "a graph is being captured: run the model once before")
        with self.engine.lock:
            self.marks = self.layer = None  # whose place may be wanted
            self.scales = scales
            self.shared = self.engine.room(keys, device, self.all_gather)
            self.layer = self.shared.add_layer(weights, keys["weight_format"], orders, biases,
                                               scales)
            self.shared.kept = self.layer  # which has the buffers as long as there is one
            self.engine.borrowers.add(self)
            self.marks = marks


def check_rows(y, x, w1, weights, ids):
    """Only addresses go further: rows that are too short would be read past their ends."""
    wanted = [len(x), columns_of(w1)]
    if not (list(x.shape) == list(y.shape) == wanted and x.dtype == y.dtype
            and ids.shape == weights.shape and ids.dim() == 2 and len(ids) == len(x)
            and {each.device for each in (y, x, w1, weights, ids)} == {x.device}):
        given = {"output": y, "hidden_states": x, "topk_weights": weights, "topk_ids": ids}
        seen = ", ".join(f"{name} {each.dtype} {list(each.shape)} on {each.device}"
                         for name, each in given.items())
        raise refusal(abi.E_INVALID, f"{seen}; these experts on {w1.device} take output and "
                      f"hidden_states of one type and of {wanted}, and twice [{len(x)}, top_k]")
