"""What the adapters of transformers and of engines have to know of torch: its devices and number
types, and the weights of a module of experts, in place, as moxie.experts takes them.

Nothing here is kept. What Moxie cannot compute raises MoxieError, by the name of the module.
"""

import contextlib
import threading
from typing import Any, Callable, NamedTuple

import torch
from torch.autograd import profiler

from moxie import abi
from moxie.experts import Experts, Rows, matrix, tensor


def refusal(code, text):
    """The MoxieError of a code (abi.E_*), to be raised."""
    return abi.MoxieError(code, -1, text)


NOTHING = contextlib.nullcontext()

# ---- What depends on the device ----------------------------------------------------------------


class Kind(NamedTuple):
    """What differs between the devices that tensors lie on."""

    dlpack: int
    key: Callable  # device -> the configuration's name of it
    keys: Callable  # () -> more of the configuration
    stream: Callable  # device -> torch's current stream there, or None
    capturing: Callable  # () -> whether that stream is being captured into a graph
    current: Callable  # device -> a context in which it is the current device


def _cuda_current(device):
    if torch.cuda.current_device() == device.index:
        return NOTHING
    return torch.cuda.device(device)


KINDS = {
    "cpu": Kind(
        dlpack=abi.DEVICE_CPU,
        key=lambda device: "cpu",
        keys=lambda: {"cpu_threads": torch.get_num_threads()},
        stream=lambda device: None,
        capturing=lambda: False,
        current=lambda device: NOTHING),
    "cuda": Kind(
        dlpack=abi.DEVICE_CUDA,
        key=lambda device: "sm_%d%d" % torch.cuda.get_device_capability(device),
        keys=dict,
        stream=torch.cuda.current_stream,
        capturing=torch.cuda.is_current_stream_capturing,
        current=_cuda_current),
}


def kind_of(device, name="experts"):
    """The Kind of a torch.device; MoxieError, by the name of the experts that are there, where
    Moxie runs on none such."""
    if device.type not in KINDS:
        change = ("keep them on one of these in the device_map, or, where they are offloaded, leave "
                  "prepare() out: each forward brings them" if device.type == "meta" else
                  "move the model with .to('cpu'), or use experts_implementation='grouped_mm'")
        raise refusal(abi.E_UNSUPPORTED, f"{name}: the weights are on {device}; Moxie runs on "
                      f"{' and '.join(KINDS)}: {change}")
    return KINDS[device.type]


NUMBERS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16",
           torch.int32: "i32", torch.int64: "i64"}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64)
E4M3 = torch.float8_e4m3fn
STORED = {**NUMBERS, E4M3: "e4m3", torch.uint8: "u8"}


class Allocator:
    """The planned buffers from torch, so that they count in its statistics and limits."""

    def __init__(self, device):
        self.device, self.held = device, {}
        self.stream = None  # of the last call that used them

    def allocate(self, kind, size, align):
        where = self.device if kind == abi.MEMORY_DEVICE else torch.device("cpu")
        memory = torch.empty(size + align, dtype=torch.uint8, device=where,
                             pin_memory=kind == abi.MEMORY_PINNED)
        address = -(-memory.data_ptr() // align) * align
        self.held[address] = memory
        return address

    def follow(self, stream, capturing):
        """A call on another stream than the last waits for that: both use the same buffers.
        capturing: whether the stream is being captured, as Kind's."""
        if stream is None or capturing():
            return  # of a CPU; and torch has waited for everything before it captures
        last, self.stream = self.stream, stream
        if last is not None and last != stream:
            stream.wait_stream(last)

    def release(self, address):
        memory = self.held.pop(address)
        if self.stream is not None and memory.is_cuda:
            memory.record_stream(self.stream)  # which may not have come so far yet


def _compact(each):
    """Itself, but for columns apart from each other, and numbers that torch has yet to negate, which
    no model has been seen to give."""
    each = each.resolve_neg()
    return each if each.stride(1) == 1 else each.contiguous()


class Shared:
    """The Experts of the layers that are alike, on one device, with buffers from torch. The lock
    makes one of following the stream of the last call and enqueueing."""

    kept = None  # a Layer that holds the buffers where all others go, if somebody wants that

    def __init__(self, library, config, name, device, all_gather=None):
        kind, self.lock, self.allocator = kind_of(device), threading.Lock(), Allocator(device)
        with kind.current(device):
            self.experts = Experts(library, config, name, self.allocator,
                                   (kind.dlpack, device.index or 0), all_gather, kind.capturing)

    def add_layer(self, weights, weight_format, orders, biases, scales, transposed=False):
        """A Layer of gate and up, and of down: two tensors each of weights, on this device, in
        place; of biases and scales None where there are none."""
        with kind_of(weights[0].device).current(weights[0].device):
            return self.experts.add_layer(*(
                matrix_of(weight, weight_format, order, transposed, bias, scale)
                for weight, order, bias, scale in zip(weights, orders, biases, scales)))

    def follow_here(self, device):
        """The allocator's follow of torch's current stream, for what is copied on it before or
        after forwards."""
        kind = kind_of(device)
        with self.lock:
            self.allocator.follow(kind.stream(device), kind.capturing)

    def forward(self, layer, x, ids, weights, y, expert_map=None, rank_tokens=None):
        """Layer.forward on tensors of two dimensions, whose shapes the caller has compared, on
        torch's current stream. A profile of torch's has it as `moxie`."""
        kind, given = kind_of(x.device), (*map(_compact, (x, ids, weights)), y)  # kept to the end
        rows = [Rows(each.data_ptr(), each.stride(0), NUMBERS[each.dtype]) for each in given]
        profiled = getattr(profiler, "_is_profiler_enabled", False)  # of torch 2.1 and newer
        shown = profiler.record_function("moxie") if profiled else NOTHING
        with shown, kind.current(x.device), self.lock:
            stream = kind.stream(x.device)
            self.allocator.follow(stream, kind.capturing)
            layer.forward(len(x), *rows, stream.cuda_stream if stream is not None else None,
                          _describe(expert_map) if expert_map is not None else None, rank_tokens)


def keys_of(device, weight_format, number):
    """What a configuration says of a device and of number types; number: the name of the rows'."""
    kind = kind_of(device)
    return {**kind.keys(), "device": kind.key(device), "weight_format": weight_format,
            "input_format": number, "output_format": number}


def marks_of(tensors, *given):
    """All that is equal as long as a layer is that of these tensors, or None, and of what else is
    given, as cheap as a comparison of each forward has to be."""
    marks = [given]
    for each in tensors:
        if each is not None:
            marks += each.data_ptr(), each.dtype, each.shape, each.stride()
    return marks


def with_room(shared, key, make):
    """The first Shared of this key in a dictionary that has a place left, or a new one."""
    for turn in range(1 << 16):
        found = shared.get((*key, turn))
        if found is None:
            found = shared[(*key, turn)] = make()
            return found
        if found.experts.has_room():
            return found
    raise refusal(abi.E_INTERNAL, "too many layers")


# ---- What a module says about itself -----------------------------------------------------------

PLAIN = (torch.nn.Parameter, torch.Tensor)


def _local(each):
    """This process' part of a weight, where transformers has spread it over several."""
    return each.to_local() if type(each) not in PLAIN and hasattr(each, "to_local") else each


class Parts(NamedTuple):
    """The tensors of a module, read once for each use and kept as long: where reading one computes
    it (torch.nn.utils.parametrize), each reading makes another, which nobody else holds."""

    w1: Any  # the merged gate and up, or up alone
    w2: Any  # down
    biases: tuple  # of both, or None twice
    scales: tuple  # what fp8 and mxfp4 weights are multiplied by; of others None twice


def is_packed(module):
    """Whether it is one of moxie.transformers_mxfp4's, whose weights are mxfp4."""
    return "gate_up_proj_blocks" in module._parameters


def _names_of(module):
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def parts_of(module):
    """The Parts of an experts module, this process' share of each."""
    names, packed = _names_of(module), is_packed(module)
    w1, w2 = (_local(getattr(module, name + "_blocks" * packed)) for name in names)
    biases = scales = None, None
    if module.has_bias:
        biases = tuple(_local(getattr(module, name + "_bias")) for name in names)
    if packed:
        w1, w2 = w1.flatten(2), w2.flatten(2)
        scales = tuple(_local(getattr(module, name + "_scales")) for name in names)
    elif w1.dtype == E4M3:
        scales = tuple(_local(getattr(module, name + "_scale_inv", None)) for name in names)
    return Parts(w1, w2, biases, scales)


def tensors_of(parts):
    """Those that there are."""
    return [each for each in (parts.w1, parts.w2, *parts.biases, *parts.scales) if each is not None]


def _check_place(name, parts):
    """Refuses weights that are nowhere, or apart from each other."""
    devices = list(dict.fromkeys(each.device for each in tensors_of(parts)))
    for device in devices:
        kind_of(device, name)
    if len(devices) > 1:
        raise refusal(abi.E_UNSUPPORTED, f"{name}: the weights are on "
                      f"{' and '.join(map(str, devices))}; Moxie takes those of one device: give "
                      "the module one in the device_map")


def named(module, path=""):
    """A module in refusals. path: its dotted name in the model, where it is known."""
    return f"{path} ({type(module).__name__})" if path else type(module).__name__


def _check_whole(name, module, parts):
    """Refuses the part that FSDP leaves here between forwards: it would count as all experts. Where
    transformers spreads experts, the module counts those that are here."""
    here = parts.w1.shape[0]
    wanted = getattr(module, "num_experts", here)
    if here != wanted and any(type(getattr(module, each + "_blocks" * is_packed(module))) not in
                              PLAIN for each in _names_of(module)):
        raise refusal(abi.E_UNSUPPORTED, f"{name}: the weights of {here} of its {wanted} experts are "
                      "in this process, as FSDP leaves them outside a forward; Moxie takes those of "
                      "all: call the whole model, which brings them, instead of this module or "
                      "prepare(), or use transformers' expert parallelism")


def check_module(module, parts, path=""):
    """Refuses, by a MoxieError, what a description of the weights cannot say. path: as of named."""
    name = named(module, path)
    _check_place(name, parts)
    if getattr(module, "has_post_expert_norm", False):  # younger than the interface
        raise refusal(abi.E_UNSUPPORTED, f"{name}: normalises the output of each expert, which "
                      "Moxie does not; keep experts_implementation='grouped_mm' for this model")
    more = getattr(getattr(module, "config", None), "zero_expert_num", 0)
    if more:  # FP8Experts takes the place of modules that have them, and knows nothing of them
        raise refusal(abi.E_UNSUPPORTED, f"{name}: the model has {more} experts more, that give "
                      "their rows back (zero_expert_num); fp8 experts of transformers leave them "
                      "out: load the model in bfloat16")
    dtypes = (torch.uint8,) if is_packed(module) else (*FLOATS, E4M3)
    for what, each in zip(("gate and up", "down"), parts[:2]):
        if each.dim() != 3:  # of experts that are one by one, or gathered for each forward
            raise refusal(abi.E_UNSUPPORTED, f"{name}: the weights of {what} are "
                          f"{list(each.shape)}; Moxie takes those of all experts in one tensor of "
                          "three dimensions: keep experts_implementation='grouped_mm' for this "
                          "model")
        if type(each) not in PLAIN or each.dtype not in dtypes:
            raise refusal(abi.E_UNSUPPORTED, f"{name}: the weights of {what} are a "
                          f"{type(each).__name__} of {each.dtype}; Moxie takes plain tensors of "
                          "float32, bfloat16, float16 or float8_e4m3fn here: load the model with "
                          "one of the first three as dtype, or dequantised")
    _check_whole(name, module, parts)
    if any(each.is_neg() for each in tensors_of(parts)):
        raise refusal(abi.E_UNSUPPORTED, f"{name}: weights are views whose numbers torch negates as "
                      "it reads them (is_neg()); Moxie reads what is in memory: put what their "
                      "resolve_neg() returns in their place")
    if is_packed(module):
        _check_mxfp4(name, parts)
    elif E4M3 in (parts.w1.dtype, parts.w2.dtype):
        _check_fp8(name, module, parts)
    elif parts.w1.dtype != parts.w2.dtype:
        raise refusal(abi.E_UNSUPPORTED, f"{name}: the weights of gate and up are of "
                      f"{parts.w1.dtype}, those of down of {parts.w2.dtype}; Moxie takes one type "
                      "for both: load the model with one dtype")
    for what, each in zip(("gate and up", "down"), parts.biases):
        if each is not None and each.dtype not in FLOATS:
            raise refusal(abi.E_UNSUPPORTED, f"{name}: the biases of {what} are of {each.dtype}; "
                          "Moxie takes float32, bfloat16 or float16")


def _describe(each):
    """A torch tensor as Moxie's."""
    kind = kind_of(each.device)
    return tensor(each.data_ptr(), each.shape, STORED[each.dtype], each.stride(),
                  (kind.dlpack, each.device.index or 0))


def matrix_of(weight, weight_format, order, transposed, bias, scales):
    """A projection in place: of a view with turned columns, the orientation is what turns."""
    rows_in = transposed
    if weight.stride(-1) != 1 and weight.stride(-2) == 1:
        weight, rows_in = weight.transpose(-1, -2), not transposed
    return matrix(_describe(weight), weight_format, order,
                  abi.ROWS_IN if rows_in else abi.ROWS_OUT,
                  _describe(bias) if bias is not None else None,
                  _describe(scales) if scales is not None else None)


def columns_of(weights):
    """Numbers of a row of [E, rows, columns]: bytes hold two of 4 bits each."""
    return weights.shape[2] * (2 if weights.dtype == torch.uint8 else 1)


def sizes_of(module, parts):
    """hidden_size, intermediate_size and num_experts, of what this process holds."""
    experts, rows, columns = *parts.w1.shape[:2], columns_of(parts.w1)
    if module.is_transposed:
        rows, columns = columns, rows
    return {"hidden_size": columns, "intermediate_size": rows // (2 if module.has_gate else 1),
            "num_experts": experts}


# ---- fp8: what transformers.integrations.finegrained_fp8.FP8Experts keeps ----------------------

# FineGrainedFP8Config's weight_block_size; None is one scale for each projection.
FP8_FORMATS = {(128, 128): "fp8_block128", None: "fp8_tensor"}
# What scales may be stored as: float32 is read in place, the others are copied to float32.
SCALE_TYPES = [torch.float32, torch.bfloat16, torch.float16,
               *([torch.float8_e8m0fnu] if hasattr(torch, "float8_e8m0fnu") else [])]


def _block_size(module):
    block = getattr(module, "block_size", None)
    return tuple(block) if block is not None else None


def weight_format_of(module, parts):
    """The configuration's name of what the weights are stored as."""
    dtype = parts.w1.dtype
    if is_packed(module):
        return "mxfp4"
    return FP8_FORMATS[_block_size(module)] if dtype == E4M3 else NUMBERS[dtype]


def _scale_shapes(module, parts):
    """What the scales of each projection look like: gate and up have blocks of their own, because
    the checkpoints have quantised them apart."""
    sizes = sizes_of(module, parts)
    experts, halves = sizes["num_experts"], 2 if module.has_gate else 1
    if _block_size(module) is None:
        return [experts, halves, 1], [experts, 1, 1]
    hidden, inner = (-(-sizes[key] // 128) for key in ("hidden_size", "intermediate_size"))
    return [experts, halves * inner, hidden], [experts, hidden, inner]


def _fp8_error(name, text):
    return refusal(abi.E_UNSUPPORTED, f"{name}: {text}: load the model with "
                   "quantization_config=FineGrainedFP8Config(dequantize=True)")


def _check_fp8(name, module, parts):
    """Refuses fp8 that Moxie would read as other numbers than those that were quantised."""
    w1, w2, block = parts.w1, parts.w2, _block_size(module)
    if w1.dtype != w2.dtype:
        raise _fp8_error(name, f"gate and up are {w1.dtype} and down is {w2.dtype}; Moxie takes "
                         "one type for both")
    if block not in FP8_FORMATS:
        raise _fp8_error(name, f"weight_block_size is {list(block)}; Moxie takes [128, 128], or "
                         "one scale for each projection")
    if getattr(module, "activation_scheme", "dynamic") != "dynamic":
        raise _fp8_error(name, f"activation_scheme is {module.activation_scheme!r}; Moxie scales "
                         "activations by what they are ('dynamic')")
    inner = sizes_of(module, parts)["intermediate_size"]
    whole = getattr(module, "intermediate_dim", inner)
    # Before the scales: of one for each projection transformers leaves some ranks none, and all
    # have to refuse, or the others wait for those that do.
    if whole != inner and (block is None or inner % 128):
        cut = "what one scale is for" if block is None else "blocks of 128"
        raise _fp8_error(name, f"tensor parallelism leaves {inner} of {whole} intermediate units "
                         f"here, which cuts through {cut}: use fewer ranks, or expert parallelism; "
                         "or")
    for what, scales, shape in zip(("gate and up", "down"), parts.scales,
                                   _scale_shapes(module, parts)):
        _check_scales(name, what, scales, shape)


def _check_scales(name, what, scales, shape):
    if type(scales) not in PLAIN or scales.dtype not in SCALE_TYPES:
        raise _fp8_error(name, f"the scales of {what} are {getattr(scales, 'dtype', 'missing')}; "
                         "Moxie takes float32, bfloat16, float16 or float8_e8m0fnu")
    if list(scales.shape) != shape:
        raise refusal(abi.E_UNSUPPORTED, f"{name}: the scales of {what} are "
                      f"{list(scales.shape)}; Moxie takes {shape}, where gate and up have blocks "
                      "of their own: quantise them apart")


def _check_mxfp4(name, parts):
    """By the name of the module, which the library does not know."""
    for what, values, scales in zip(("gate and up", "down"), parts[:2], parts.scales):
        wanted = [*values.shape[:2], values.shape[2] // 16]
        if values.shape[2] % 16 or list(scales.shape) != wanted or scales.dtype != torch.uint8:
            raise refusal(abi.E_UNSUPPORTED, f"{name}: the weights of {what} are "
                          f"{list(values.shape)} and their scales {scales.dtype} of "
                          f"{list(scales.shape)}; Moxie takes 16 bytes for each scale, and those "
                          f"as uint8 of {wanted}: load the checkpoint anew")


def _aligned(each):
    """Itself, or a copy of numbers of 32 bits that lie anywhere, as in a file that is mapped."""
    if each is None or each.element_size() < 4 or each.data_ptr() % 4 == 0:
        return each
    return each.detach().clone()


def _readable(scales):
    if scales is None:
        return None
    scales = scales.detach()
    return _aligned((scales if scales.dtype == torch.uint8 else scales.float()).contiguous())


def readable(parts):
    """The Parts as Moxie reads them: the module's own tensors, or copies, which have to be kept, and
    may be written to wherever they were made."""
    with torch.inference_mode(False), torch.no_grad():
        return Parts(_aligned(parts.w1), _aligned(parts.w2), tuple(map(_aligned, parts.biases)),
                     tuple(map(_readable, parts.scales)))


def shaped_scales(scales, weight_format):
    """fp8_tensor's are [E] and [E, 2] for Moxie."""
    if scales is None or weight_format != "fp8_tensor":
        return scales
    return scales[:, :, 0] if scales.shape[1] == 2 else scales[:, 0, 0]


def layers_of(config):
    """How many layers of one size a model of this configuration may have."""
    return max(1, int(getattr(config, "num_hidden_layers", None) or 1))
