"""The experts of a model: one configuration at work, and a forward on raw addresses.

    experts = Experts(load(path), {"hidden_size": 2048, ..., "num_layers": 48})
    layer = experts.add_layer(matrix(...), matrix(...))
    layer.forward(tokens, x, ids, weights, y)

Nothing here knows a tensor library: whoever has tensors says where they lie.
"""

import collections
import collections.abc
import ctypes
import operator
import threading
import weakref
from typing import NamedTuple

from moxie.abi import (
    DEVICE_CPU, DTYPE_BFLOAT, DTYPE_FLOAT, DTYPE_FLOAT8_E4M3FN, DTYPE_INT, DTYPE_UINT, E_CAPACITY,
    E_CONFIG, E_INVALID, E_UNAVAILABLE, E_UNSUPPORTED, FORMAT_BF16, FORMAT_F16, FORMAT_F32,
    FORMAT_FP8_BLOCK128, FORMAT_FP8_CHANNEL, FORMAT_FP8_TENSOR, FORMAT_INT4_G32, FORMAT_MXFP4,
    FORMAT_NVFP4, IDS_GLOBAL, OK, Batch, Device, Dtype, Error, Matrix, MoxieError, Step, Tensor,
    Weights, ask, signals_wait)
from moxie.host import Library


class Words(dict):
    """What the words of one kind stand for; another word is refused with those that there are."""

    def __init__(self, kind, words):
        super().__init__(words)
        self.kind = kind

    def __missing__(self, word):
        raise MoxieError(E_INVALID, -1,
                         f"{word!r} is no {self.kind}; want one of {', '.join(self)}")


FORMATS = Words("weight format", {
    "f32": FORMAT_F32, "bf16": FORMAT_BF16, "f16": FORMAT_F16, "fp8_tensor": FORMAT_FP8_TENSOR,
    "fp8_channel": FORMAT_FP8_CHANNEL, "fp8_block128": FORMAT_FP8_BLOCK128,
    "int4_g32": FORMAT_INT4_G32, "mxfp4": FORMAT_MXFP4, "nvfp4": FORMAT_NVFP4})
DTYPES = Words("number type", {  # by its name: DLPack's code, bits
    "f32": (DTYPE_FLOAT, 32),
    "bf16": (DTYPE_BFLOAT, 16),
    "f16": (DTYPE_FLOAT, 16),
    "e4m3": (DTYPE_FLOAT8_E4M3FN, 8),
    "u8": (DTYPE_UINT, 8),
    "i32": (DTYPE_INT, 32),
    "i64": (DTYPE_INT, 64),
})
ERROR_BYTES = 1024
NO_TENSOR = Tensor()


I32, I64 = range(-(1 << 31), 1 << 31), range(-(1 << 63), 1 << 63)


def _whole(what, values, within):
    """The values as ints of a range, where ctypes would cut larger ones."""
    try:
        whole = [operator.index(value) for value in values]
    except TypeError:
        whole = None
    if whole is None or not all(value in within for value in whole):
        raise MoxieError(E_INVALID, -1, f"{what}: {values!r}; want whole numbers from "
                         f"{within[0]} to {within[-1]}")
    return whole


def _instance(what, value, kind, maker):
    if not isinstance(value, kind):
        raise MoxieError(E_INVALID, -1, f"{what}: a {type(value).__name__}; want what "
                         f"moxie.{maker} makes")


def tensor(address, shape, number="f32", strides=None, device=(DEVICE_CPU, 0)):
    """A Tensor of numbers at an address, which whoever owns it keeps valid.

    number: "f32", "bf16", "f16", "e4m3", "u8", "i32" or "i64"; another raises MoxieError.
    strides: in numbers; without them the tensor is compact. device: DLPack's type and the device's
    index.
    """
    code, bits = DTYPES[number]
    where = _whole("device (DLPack's type, index)", device, I32)
    shape = _whole("shape", shape, I64)
    strides = _whole("strides", strides, I64) if strides is not None else None
    if len(where) != 2 or strides is not None and len(strides) != len(shape):
        raise MoxieError(E_INVALID, -1, f"shape {shape}, strides {strides}, device {where}; want as "
                         "many strides as dimensions, and of a device its type and index")
    if address is not None:
        address = _whole("address", (address,), range(1 << 64))[0]
    dims = ctypes.c_int64 * len(shape)
    return Tensor(data=address, device=Device(type=where[0], id=where[1]), ndim=len(shape),
                  dtype=Dtype(code=code, bits=bits, lanes=1), shape=dims(*shape),
                  strides=dims(*strides) if strides is not None else None)


def matrix(values, weight_format, order, orientation=0, bias=None, scales=None, global_scales=None):
    """One projection of all experts: `values`, `bias` and the scales are Tensors, as abi.h has them
    for this weight_format: "f32", "bf16", "f16", "fp8_tensor", "fp8_channel", "fp8_block128",
    "int4_g32", "mxfp4" or "nvfp4". Another raises MoxieError. order and orientation: abi.ORDER_*
    and abi.ROWS_*."""
    order, orientation = _whole("order, orientation", (order, orientation), I32)
    parts = {"bias": bias, "scales": scales, "global_scales": global_scales}
    parts = {what: each if each is not None else Tensor() for what, each in parts.items()}
    parts["values"] = values
    for what, each in parts.items():
        _instance(what, each, Tensor, "tensor")
    return Matrix(format=FORMATS[weight_format], order=order, orientation=orientation, **parts)


class Rows(NamedTuple):
    """A two-dimensional tensor whose columns the configuration knows."""

    address: int
    stride: int  # numbers between two rows
    number: str  # as of tensor(): "bf16", "i64", ...; forward refuses another


class Layer:
    """The experts of one layer: a runner, and the description of the weights that it borrows."""

    def __init__(self, experts, index, weights, handle):
        self.experts, self.index, self.weights, self.handle = experts, index, weights, handle
        finalizer = weakref.finalize(self, experts.remove, index)
        finalizer.atexit = False  # a process that ends takes its memory with it

    def forward(self, tokens, x, ids, weights, y, stream=None, expert_map=None, rank_tokens=None):
        """Experts.forward of this layer."""
        self.experts.forward(self, tokens, x, ids, weights, y, stream, expert_map, rank_tokens)

    def weights_updated(self):
        """To be called after the numbers of the weights were changed in place."""
        self.experts.weights_updated(self)


class Experts:
    """An instance, its dispatcher, and a runner for each of up to num_layers layers.

    The layers share the planned buffers, so that calls follow each other: here under a lock, on a
    device by the order of the stream. Close it, use it in a with statement, or give it up with all
    its layers.

    capturing() says whether the calling thread captures a graph, which would be spoilt by the end
    of a layer, or of this: while it does, what was given up waits for the next call of any Experts
    of this library. close() does not wait.

    Over several ranks (ep_size of them, ep_rank is this one) each has a process with an Experts of
    the same keys, made by all at once, an all_gather as Library.open has it, and the weights of its
    own experts, the ep_rank-th part of the physical ones, redundant ones among them. Then each
    forward is of all ranks: as often on each and in one order of layers, with tokens of its own, or
    none.
    """

    def __init__(self, library, config, name="python", allocator=None, device=(DEVICE_CPU, 0),
                 all_gather=None, capturing=lambda: False):
        _instance("library", library, Library, "load")
        if not isinstance(config, collections.abc.Mapping):
            raise MoxieError(E_INVALID, -1, f"config: a {type(config).__name__}; want a dict of "
                             "the keys of docs/configuration.md")
        self.config = dict(config)
        _check_ranks(self.config, all_gather)
        self.capturing, self.given_up = capturing, library.given_up
        self.dead = collections.deque()  # layers to destroy when no step is under way
        self._drain()
        self.instance = library.open(self.config, name, allocator, all_gather)
        self.lock = threading.Lock()
        self.polling = threading.Lock()  # of check() alone, which waits for no forward
        self.made = {}  # of the layers that are not destroyed, by index: the runners
        self.error_text = ctypes.create_string_buffer(ERROR_BYTES)
        self.error = Error(rank=-1, text_bytes=ERROR_BYTES,
                           text=ctypes.addressof(self.error_text))
        self.dispatcher = ctypes.c_void_p()
        try:
            chosen = {key: value for key, (_, value, _) in self.instance.snapshot().items()}
            self._refuse(chosen)
            self._check_keys(library, chosen)
            self._choose(library, chosen)
            self._make_batch(device)
            self.instance.check(self.moves.create, self.instance.handle,
                                ctypes.byref(self.dispatcher))
        except BaseException:
            with signals_wait():
                if self.dispatcher:  # a signal's, behind a create that succeeded
                    self.moves.destroy(self.dispatcher)
                self.instance.close()
            raise
        self.held = self.instance, self.moves, self.runs, self.dispatcher, self.made
        self.finalizer = weakref.finalize(self, _give_up, capturing, self.given_up, self.held)
        self.finalizer.atexit = False

    def close(self):
        """Gives back all that this has, once: the layers compute no more, and their weights may go.
        Waits for forwards of other threads; on a device, what they enqueued has to be done."""
        with self.lock, self.polling, signals_wait():
            if self.finalizer.detach():
                _close(*self.held)
            self._drain()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _refuse_closed(self):
        """Before the library is given what it no longer has."""
        if not self.dispatcher:
            raise MoxieError(E_INVALID, -1, "these experts are closed: make others")

    def _check_keys(self, library, chosen):
        """A word that is no key would be ignored in silence, and be a wrong result later."""
        unknown = sorted(self.config.keys() - chosen.keys())
        if unknown:
            raise MoxieError(E_CONFIG, -1, f"{library.path} has no key {', '.join(unknown)}; "
                             "docs/configuration.md lists what it has", unknown)

    def _refuse(self, chosen):
        """Raises what Instance.refuse does, once the other ranks have heard of it: from a create."""
        try:
            self.instance.refuse()
        except MoxieError:
            found = self.instance.dispatchers.get(chosen["dispatcher"])
            if found is not None and self.config.get("ep_size", 1) != 1:
                found.api.contents.create(self.instance.handle, ctypes.byref(self.dispatcher),
                                          ctypes.byref(self.error))
            raise

    def _choose(self, library, chosen):
        """The tables of the runner and dispatcher that the library resolved `auto` to."""
        for kind, table in (("runner", self.instance.runners),
                            ("dispatcher", self.instance.dispatchers)):
            if chosen[kind] not in table:
                raise _not_here(library, kind, chosen[kind], chosen["device"])
        self.runs = self.instance.runners[chosen["runner"]].api.contents
        self.moves = self.instance.dispatchers[chosen["dispatcher"]].api.contents
        self.layers_max, self.ranks = int(chosen["num_layers"]), int(chosen["ep_size"])
        self.waits = self.ranks > 1 and chosen["device"] == "cpu"  # within a forward
        self.free = collections.deque()  # given back, of the `taken` first ones
        self.taken = 0
        self.tokens_max = int(chosen["forward_tokens_max"])
        if self.tokens_max < 1:
            raise MoxieError(E_CAPACITY, -1, "forward_tokens_max is not set: set it to the tokens "
                             "of one call; more are cut into calls of that many")

    def _make_batch(self, device):
        """What every call passes, made once: a call fills in what differs."""
        hidden, top_k = self.config["hidden_size"], self.config["top_k"]
        columns = {"x": hidden, "ids": top_k, "weights": top_k, "y": hidden}
        fields = {name: tensor(None, (0, width), strides=(width, 1), device=device)
                  for name, width in columns.items()}
        self.batch = Batch(id_space=IDS_GLOBAL, **fields)
        parts = [getattr(self.batch, name) for name in columns]
        self.parts = [(part, part.dtype, part.shape, part.strides) for part in parts]
        self.step = Step()
        self.begun = None  # the tokens of the step that was begun last, and those of all ranks
        self.fields = fields  # own the shapes and strides

    def _call(self, slot, *arguments):
        """abi.ask without an allocation."""
        if slot(*arguments, ctypes.byref(self.error)) != OK:
            raise MoxieError(self.error.code, self.error.rank,
                             self.error_text.value.decode(errors="replace"))

    def _call_waiting(self, slot, *arguments):
        """_call of a slot that waits for other ranks and logs which is silent: Ctrl-C, which came
        meanwhile, would end that callback and be lost."""
        with signals_wait():
            self._call(slot, *arguments)

    def add_layer(self, w1, w2):
        """A Layer of two Matrix, whose tensors stay valid and in place as long as it lives."""
        for what, each in (("w1", w1), ("w2", w2)):
            _instance(what, each, Matrix, "matrix")
        with self.lock:
            self._refuse_closed()
            self._drain()
            if not self.free and self.taken == self.layers_max:
                raise MoxieError(E_CAPACITY, -1, f"all {self.layers_max} layers are in use: set "
                                 "num_layers to the layers that share this instance")
            index = self.free[0] if self.free else self.taken
            weights = Weights(w1=ctypes.pointer(w1), w2=ctypes.pointer(w2))
            handle = ctypes.c_void_p()
            try:
                self.instance.check(self.runs.create, self.instance.handle, index,
                                    ctypes.byref(weights), ctypes.byref(handle))
            except BaseException:
                if handle:
                    with signals_wait():
                        self.runs.destroy(handle)
                raise
            self.made[index] = handle
            if self.free:
                self.free.popleft()
            else:
                self.taken += 1
            return Layer(self, index, weights, handle)

    def check(self):
        """Raises the failure of past forwards that sticks, MoxieError with the rank to blame, if
        there is one; of replayed graphs nothing else says so. Waits for nobody but a close()."""
        with self.polling:
            self._refuse_closed()
            ask(self.moves.poll_error, self.dispatcher)

    def set_active_ranks(self, active):
        """After a failure goes on without the ranks whose truth value in `active` is false, one for
        each rank; called by all others alike, on streams that are done. Experts of those that are
        left out add nothing from here on, and they cannot come back."""
        wanted = bytes(map(bool, active))
        if len(wanted) != self.ranks:
            raise MoxieError(E_INVALID, -1, f"set_active_ranks: {len(wanted)} ranks; want one "
                             f"truth value for each of {self.ranks} (ep_size)")
        with self.lock:
            self._refuse_closed()
            self.begun = None
            self._call(self.moves.set_active_ranks, self.dispatcher,
                       (ctypes.c_uint8 * self.ranks)(*wanted))

    def has_room(self):
        """Whether another layer can be added."""
        return bool(self.free or self.dead) or self.taken < self.layers_max

    def weights_updated(self, layer):
        with self.lock:
            self._refuse_closed()
            self._call(self.runs.weights_updated, layer.handle, None, 0)

    def remove(self, index):
        """Destroys a layer's runner; later, where a finalizer calls it in the middle of a step."""
        self.dead.append(index)
        if self.lock.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self.lock.release()

    def _drain(self):
        if not (self.dead or self.given_up) or self.capturing():
            return
        with signals_wait():
            while self.dead:
                index = self.dead.popleft()
                handle = self.made.pop(index, None)
                if handle is not None:  # else they were closed
                    self.runs.destroy(handle)
                self.free.append(index)
            while self.given_up:
                try:
                    parts = self.given_up.popleft()
                except IndexError:
                    break  # another thread's Experts had the last
                _close(*parts)

    def _begin(self, tokens, rank_tokens):
        """A step goes on for as many layers as there are: only another size needs another."""
        if (tokens, rank_tokens) != self.begun:
            self.step.tokens = tokens
            everybody = (ctypes.c_int64 * self.ranks)(*rank_tokens) if rank_tokens else None
            self.step.rank_tokens = everybody  # read before the call returns
            self.begun = None  # nobody knows, where an interrupt ends this after the call
            self._call(self.moves.begin_forward, self.dispatcher, ctypes.byref(self.step))
            self.begun = tokens, rank_tokens

    def forward(self, layer, tokens, x, ids, weights, y, stream=None, expert_map=None,
                rank_tokens=None):
        """y = the weighted sum of each token's experts; each of the four is Rows.

        Ids that name no expert of the layer count as no expert. expert_map: a Tensor of i32 [n],
        which says what the ids 0 to n - 1 stand for here; others are no expert. More tokens than
        forward_tokens_max go in several calls. On a device, `stream` is the handle of one, and
        nothing is waited for.

        Over several ranks ids are those of all num_experts, and more tokens than
        forward_tokens_max are refused, because all ranks have to call equally often. rank_tokens,
        the tokens of each rank, the same on all of them or None on all, makes what is launched as
        large as this forward instead of the largest. A rank that does not call makes the others
        fail after timeout_ms, with E_PEER and its number; on a device later calls do, or check().
        """
        try:
            with self.lock:
                self._forward(layer, tokens, (x, ids, weights, y), stream,
                              expert_map if expert_map is not None else NO_TENSOR,
                              self._whole_tokens(rank_tokens))
        except (AttributeError, TypeError) as error:  # by which wrong types make themselves known
            raise MoxieError(E_INVALID, -1, f"forward: {error}; want tokens as an int, four Rows "
                             "whose address and stride are ints, as stream an int or None, as "
                             "expert_map a Tensor or None, as rank_tokens ints or None") from error

    def _whole_tokens(self, rank_tokens):
        if rank_tokens is None:
            return None
        rank_tokens = tuple(_whole("rank_tokens", rank_tokens, I64))
        if len(rank_tokens) != self.ranks:
            raise MoxieError(E_INVALID, -1, f"rank_tokens: {len(rank_tokens)} numbers; want one "
                             f"for each of {self.ranks} ranks (ep_size)")
        return rank_tokens

    def _calls(self, tokens):
        """The first token and the number of them of each call; one call where others make one."""
        if self.ranks > 1:
            return ((0, tokens),)
        return ((first, min(tokens - first, self.tokens_max))
                for first in range(0, tokens, self.tokens_max))

    def _forward(self, layer, tokens, given, stream, expert_map, rank_tokens):
        self._refuse_closed()
        if tokens < 0:
            raise MoxieError(E_INVALID, -1, f"tokens: {tokens}; want 0 or more")
        self.batch.layer, self.batch.stream = layer.index, stream
        self.batch.expert_map = expert_map
        for part, rows in zip(self.parts, given):
            _, dtype, _, strides = part
            dtype.code, dtype.bits = DTYPES[rows.number]
            strides[0] = rows.stride
        call = self._call_waiting if self.waits else self._call
        for first, count in self._calls(tokens):
            for (where, dtype, shape, _), rows in zip(self.parts, given):
                where.data = rows.address + first * rows.stride * (dtype.bits >> 3)
                shape[0] = count
            self._begin(count, rank_tokens)
            call(self.instance.api.forward, self.dispatcher, layer.handle,
                 ctypes.byref(self.batch))
        if self.dead or self.given_up:
            self._drain()


def _check_ranks(config, all_gather):
    """The library would ask for callbacks, of which whoever reads this knows nothing."""
    ranks = config.get("ep_size")
    if isinstance(ranks, int) and ranks > 1 and all_gather is None:
        raise MoxieError(E_UNSUPPORTED, -1, f"ep_size is {ranks}, and no all_gather says how the "
                         "ranks reach each other: pass one (moxie.ranks has one over "
                         "torch.distributed), or set ep_size to 1 and num_experts to the experts "
                         "that this rank holds, number their ids from 0, and add up what the ranks "
                         "return", ("ep_size",))


def _not_here(library, kind, name, device):
    """The error of a backend that the library knows and did not register."""
    if (kind, name) == ("runner", "none"):
        return MoxieError(E_UNSUPPORTED, -1, "runner is none, which leaves experts to a runner of "
                          "the host's own, and Experts are what computes them: set runner to auto",
                          ("runner",))
    reason = next((reason for *key, _, reason in library.probe() if key == [name, kind, device]),
                  "it is not registered")
    return MoxieError(E_UNAVAILABLE, -1, f"{kind} {name} cannot run on {device}: {reason}; load a "
                      "library that was built where nvcc is, or use another device", ("device",))


def _give_up(capturing, given_up, parts):
    if capturing():
        given_up.append(parts)
    else:
        _close(*parts)


def _close(instance, moves, runs, dispatcher, made):
    """Where nobody called close(), only layers that were given up are left: each other one holds
    its Experts."""
    with signals_wait():  # a destroy calls the allocator back
        while made:
            runs.destroy(made.popitem()[1])
        moves.destroy(dispatcher)
        dispatcher.value = None
        instance.close()
