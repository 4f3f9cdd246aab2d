"""Moxie as an experts implementation of Hugging Face transformers.

    import moxie.transformers

    moxie.transformers.configure(plugin="/opt/lib/libmoxie.so")
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="moxie")

The weights stay where the model has them, in whatever orientation and order. Layers of a model that
are of one size share one instance, and with it the memory between the two products.
"""

import contextlib
import inspect
import os
import sys
import threading
import weakref
from typing import Any, NamedTuple

import torch
import transformers
from packaging.version import Version  # which transformers needs, too
from torch.autograd import forward_ad

if Version(transformers.__version__).release < (5, 10):
    raise ImportError("moxie.transformers needs transformers 5.10 or newer; this is "
                      f"{transformers.__version__}")

from transformers.integrations.moe import ExpertsInterface

try:
    from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
except ImportError:  # it is younger than ExpertsInterface
    FP8ExpertsInterface = None

from moxie import abi, gates, transformers_mxfp4
from moxie.host import Libraries, default_path
from moxie.modules import (
    FLOATS, INTEGERS, NUMBERS, Shared, check_module, keys_of, kind_of, layers_of, marks_of, named,
    parts_of, readable, refusal, shaped_scales, sizes_of, tensors_of, weight_format_of, with_room)

TOKENS_MAX = 4096  # of one call: enough for the weights to be read once per many rows

# ---- Settings ----------------------------------------------------------------------------------

# The keys that a model has said already, and where it says them.
_SHAPE = "it is a dimension of the weights"
_INPUT = "it is the type of hidden_states: load the model with dtype=torch.bfloat16"
_CODE = "it is what the code of the experts computes"
_ROUTER = "it is what the model's own code multiplies by"
_SPREAD = "it is for engines that spread experts: here a module's experts are those that it holds"
DERIVED = {
    "device": "it is where the experts are: move the model with .to('cpu'), or use "
              "experts_implementation='grouped_mm'",
    "weight_format": "it is what the experts are stored as: load the model with "
                     "dtype=torch.bfloat16",
    "input_format": _INPUT, "output_format": _INPUT,
    "hidden_size": _SHAPE, "intermediate_size": _SHAPE, "num_experts": _SHAPE,
    "top_k": "it is the width of top_k_index: prepare(model, top_k=...)",
    "activation": _CODE, "activation_alpha": _CODE, "activation_beta": _CODE,
    "activation_limit": _CODE,
    "routed_scaling_factor": _ROUTER, "apply_router_weight_on_input": _ROUTER,
    "num_redundant_experts": _SPREAD, "num_fused_shared_experts": _SPREAD,
    "ep_size": _SPREAD, "ep_rank": _SPREAD, "tp_size": _SPREAD, "dp_size": _SPREAD,
}


def _derived(keys):
    """A line for each of the keys that nobody can set here."""
    return "".join(f"\n  {key} cannot be set here: {DERIVED[key]}" for key in keys
                   if key in DERIVED)


DEFAULTS = {"plugin": None, "forward_tokens_max": TOKENS_MAX}
_settings = dict(DEFAULTS)  # of configure; of other keys those that were set
_lock = threading.RLock()  # around whatever changes these, or makes what they hold
_libraries = Libraries(f"moxie.transformers {abi.VERSION}", "name a libmoxie.so with "
                       "moxie.transformers.configure(plugin=...) or the variable MOXIE_PLUGIN")
_shared = weakref.WeakValueDictionary()  # what must be equal -> Shared
_layers = weakref.WeakKeyDictionary()  # experts module -> Prepared


def configure(plugin=..., forward_tokens_max=..., **keys):
    """Says which library to load, and what else a forward may be.

    plugin: the path of a libmoxie; without it MOXIE_PLUGIN of the environment, or the one that the
    loader finds. forward_tokens_max: the most tokens of one call, which the memory is planned
    for; a larger batch goes in several. keys: any others of docs/configuration.md, such as
    device_memory_budget_bytes. None takes back what was set before; what is not named stays. Where
    that changes a setting, what was prepared before is prepared anew, and graphs that were captured
    are to be captured again.
    """
    given = dict(keys, plugin=plugin, forward_tokens_max=forward_tokens_max)
    given = {key: value for key, value in given.items() if value is not ...}
    if given.get("plugin") is not None:
        if not isinstance(given["plugin"], (str, os.PathLike)):
            raise refusal(abi.E_CONFIG, f"configure: plugin is {given['plugin']!r}, a "
                          f"{type(given['plugin']).__name__}: give the path of a library, or None "
                          "for MOXIE_PLUGIN's")
        given["plugin"] = os.fspath(given["plugin"])
        if not given["plugin"]:
            raise refusal(abi.E_CONFIG, "configure: plugin is an empty path: name a library, or "
                          "None for MOXIE_PLUGIN's")
    for key, value in given.items():
        if value is not None and not isinstance(value, (int, float, str)):
            raise refusal(abi.E_CONFIG, f"configure: {key} is {value!r}, a {type(value).__name__}: "
                          "give an int, a float or a str, or None to take it back")
    tokens = given.get("forward_tokens_max")
    if tokens is not None and not (isinstance(tokens, int) and tokens >= 1):
        raise refusal(abi.E_CONFIG, f"configure: forward_tokens_max is {tokens!r}: give the most "
                      f"tokens of one call, 1 or more, or None for {TOKENS_MAX}")
    if not DERIVED.keys().isdisjoint(given):
        raise refusal(abi.E_CONFIG, "configure: the model says it already" + _derived(given))
    with _lock:
        said = {key: value for key, value in {**_settings, **given}.items() if value is not None}
        wanted = {**DEFAULTS, **said}
        if wanted != _settings:
            for key in _settings.keys() - wanted.keys():
                del _settings[key]
            _settings.update(wanted)
            _layers.clear()


def _library():
    """The library that is configured, loaded once; MoxieError as of moxie.load."""
    return _libraries[_settings["plugin"] or default_path()]


# ---- Preparing ---------------------------------------------------------------------------------


def _check_device(key, device):
    """Refuses a GPU that the library does not know; of one that it knows it says more itself."""
    known = sorted({known for _, _, known, _, _ in _library().probe()})
    if key not in known:
        what = f"compute capability {key[3:-1]}.{key[-1]}" if key.startswith("sm_") else key
        raise refusal(abi.E_UNAVAILABLE, f"the experts are on {device}, of {what}, and "
                      f"{_library().path} knows kernels for {' and '.join(known)}: move the model "
                      "with .to('cpu'), or use experts_implementation='grouped_mm'")


def _make_shared(config, device):
    """A Shared of a configuration, part of which configure said."""
    _check_device(config["device"], device)
    try:
        return Shared(_library(), config, "transformers", device)
    except abi.MoxieError as error:
        if not _derived(error.keys):
            raise
        raise abi.MoxieError(error.code, error.rank, error.text + _derived(error.keys),
                             error.keys) from error


@contextlib.contextmanager
def _memory_named(tokens):
    """Out of memory within it names the key that makes buffers smaller, which is `tokens` now."""
    try:
        yield
    except abi.MoxieError as error:
        if error.code != abi.E_MEMORY:
            raise
        raise abi.MoxieError(error.code, error.rank, f"{error.text}: set forward_tokens_max lower "
                             f"(now {tokens}) by moxie.transformers.configure",
                             ("forward_tokens_max",)) from error


class Prepared(NamedTuple):
    """A module's layer, and what of the module and its input it was made for."""

    seen: list
    shared: Shared
    layer: Any
    copies: list  # with the module's own, so that no others come to lie where these were


def _seen(parts, *given):
    """All that a layer was made from. `given`: the input's number type, its device, and top_k."""
    w1, w2, biases, scales = parts
    return marks_of((w1, w2, *biases, *scales), *given)


def _holds(each, module):
    return (isinstance(each, torch.nn.Module) and each is not module
            and any(part is module for part in each.modules()))


def _model_here(model, module):
    """The innermost of transformers' models within `model` that has this module, or `model`, where
    it is not the module itself: what calls the module in a forward, however many are in `model`."""
    inside = [each for each in model.modules()
              if isinstance(each, transformers.PreTrainedModel) and _holds(each, module)]
    return inside[-1] if inside else model if model is not module else None


def _model_calling(module):
    """The innermost of transformers' models in whose forward we are and that has this module; else
    the outermost module that has it, or None. Nothing in a module says whose it is, and its
    configuration may be several models'. Asked while a layer is made, not at each forward."""
    found, frame = None, sys._getframe(1)
    while frame is not None and not isinstance(found, transformers.PreTrainedModel):
        code = frame.f_code
        # No others: before Python 3.13 looking at its locals keeps them until the function ends.
        if "forward" in code.co_name and "self" in code.co_varnames:
            each = frame.f_locals.get("self")
            if _holds(each, module):
                found = each
        frame = frame.f_back
    return found


def _share(module, model, config, device):
    """The Shared of this model's layers of this configuration with a place left, or a new one. No
    two models have one, or graphs of both, replayed on two streams, would use the same buffers.
    Layers that no model called are told apart by what transformers configured them with."""
    # A reference, because another model may come to have the id of one that is gone.
    owner = id(module.config) if model is None else weakref.ref(model)
    return with_room(_shared, (_library().path, owner, device, *sorted(config.items())),
                     lambda: _make_shared(config, device))


def _prepare(module, parts, model, path, number, device, top_k):
    """Makes the layer of a module of this model, for input of a number type and top_k."""
    _layers.pop(module, None)
    check_module(module, parts, path)
    if kind_of(device).capturing():
        raise refusal(abi.E_CAPTURING, f"{type(module).__name__}: this layer is not prepared, and "
                      "cannot be while a graph is captured: call moxie.transformers.prepare(model)"
                      ", or the model once, before the capture")
    order, activation = gates.recognise(module, device, named(module, path))
    weight_format, read = weight_format_of(module, parts), readable(parts)
    config = {**keys_of(device, weight_format, number), "num_layers": layers_of(module.config),
              **_settings, **sizes_of(module, parts), **activation, "top_k": top_k}
    config.pop("plugin")
    shaped = [shaped_scales(each, weight_format) for each in read.scales]
    with _memory_named(config["forward_tokens_max"]):
        shared = _share(module, model, config, device)
        layer = shared.add_layer(read[:2], weight_format, (order, abi.ORDER_PLAIN), read.biases,
                                 shaped, module.is_transposed)
    copies = [(mine, theirs.detach()) for mine, theirs in zip(tensors_of(read), tensors_of(parts))
              if mine.data_ptr() != theirs.data_ptr()]
    prepared = Prepared(_seen(parts, number, device, top_k), shared, layer, copies)
    shared.follow_here(device)  # copies were asked for there
    _layers[module] = prepared
    return prepared


def _ready(module, parts, *given, model=None, path=""):
    """What was prepared for a module; made where that is nothing, or for something else. Without a
    model it is the one that calls. path: the module's dotted name, for refusals."""
    seen = _seen(parts, *given)
    prepared = _layers.get(module)
    if prepared is None or prepared.seen != seen:
        with _lock:
            prepared = _layers.get(module)  # another thread may just have made it
            if prepared is None or prepared.seen != seen:
                model = model if model is not None else _model_calling(module)
                prepared = _prepare(module, parts, model, path, *given)
    return prepared


def _named_experts(model):
    """[(name, module)] of those in a model that choose their implementation by the interface."""
    if not isinstance(model, torch.nn.Module):
        raise refusal(abi.E_INVALID, f"model: a {type(model).__name__}; want a torch.nn.Module, as "
                      "from_pretrained gives one")
    return [(name, each) for name, each in model.named_modules()
            if {"has_gate", "is_transposed", "config"} <= each.__dict__.keys()
            and hasattr(each, "_apply_gate")]


def _experts_modules(model):
    return [module for _, module in _named_experts(model)]


# What configurations call the experts of a token.
_TOP_K_NAMES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k",
                "top_k_experts")


def _top_k_of(config):
    for name in _TOP_K_NAMES:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
        if isinstance(value, (list, tuple)) and value:  # one for each layer
            if value.count(value[0]) == len(value):
                return value[0]
            raise refusal(abi.E_INVALID, f"{type(config).__name__}.{name} is {list(value)}, and a "
                          "module does not say which layer it is: run the model once instead of "
                          "prepare(model)")
    raise refusal(abi.E_INVALID, f"{type(config).__name__} does not say how many experts a token "
                  "has: give prepare(model, top_k=...)")


def _number_of(model, w1):
    """What the experts of a model will be given: what they are stored as, or with fp8 what the
    model's first parameter of another type is, which is the embedding."""
    dtypes = [w1.dtype, *(each.dtype for each in model.parameters())]
    return next((NUMBERS[dtype] for dtype in dtypes if dtype in FLOATS), "bf16")


def prepare(model, top_k=None):
    """Makes every layer of a model ready, so that the first forward can already be captured; of
    each, whatever its experts_implementation is now.

    Otherwise each is made at its first forward. What is ready stays as it is, so that graphs that
    were captured do too. Weights that a device_map offloads lie nowhere until a forward brings
    them: they are refused, as all that cannot be described is, by the module's name in the model.
    Returns how many layers there are.
    """
    modules = _named_experts(model)
    for name, module in modules:
        parts = parts_of(module)
        _ready(module, parts, _number_of(model, parts.w1), parts.w1.device,
               top_k if top_k is not None else _top_k_of(module.config),
               model=_model_here(model, module), path=name)
    return len(modules)


def weights_updated(model):
    """To be called after weights were changed in place. Weights that moved are noticed."""
    with _lock, torch.no_grad():
        for module in _experts_modules(model):
            if module in _layers:
                _update(module, _layers[module], parts_of(module))


def _update(module, prepared, parts):
    if prepared.seen != _seen(parts, *prepared.seen[0]):
        del _layers[module]  # it describes memory that may be somebody else's by now
        return
    prepared.shared.follow_here(parts.w1.device)  # which may still be reading the copies
    for mine, theirs in prepared.copies:
        mine.copy_(theirs)
    prepared.layer.weights_updated()


def release(model):
    """Gives back what was made for a model, and with it what graphs that were captured use; a later
    forward makes it again."""
    with _lock:
        for module in _experts_modules(model):
            _layers.pop(module, None)


NOT_PREPARED = "moxie, not prepared yet"


def describe(model):
    """{name: what it runs on} of the modules whose implementation can be chosen: a runner of Moxie
    and its device, "moxie, not prepared yet", or another implementation's name. Where it is empty,
    or a module is missing, transformers does not let anyone choose."""
    return {name: _describe_module(module) for name, module in _named_experts(model)}


def _describe_module(module):
    chosen, prepared = module.config._experts_implementation, _layers.get(module)
    if chosen != "moxie":
        return str(chosen)
    if prepared is None:
        return NOT_PREPARED
    keys = prepared.shared.experts.instance.snapshot()
    return f"{keys['runner'][1]} on {keys['device'][1]}"


# ---- Forward -----------------------------------------------------------------------------------


class InferenceOnly(torch.autograd.Function):
    """Lets a forward pass that nobody told to do without gradients through, but not back."""

    @staticmethod
    def forward(ctx, result, *inputs):
        return result()  # of an input torch would make a view, which += may not change

    @staticmethod
    def backward(ctx, *gradients):
        raise refusal(abi.E_UNSUPPORTED, "Moxie computes no gradients: to train, use "
                      "model.set_experts_implementation('grouped_mm')")


def _check_input(module, x, ids, weights, w1):
    name = type(module).__name__
    if not w1.device == x.device == ids.device == weights.device:
        raise refusal(abi.E_INVALID, f"{name}: the experts are on {w1.device}, hidden_states on "
                      f"{x.device}, top_k_index on {ids.device} and top_k_weights on "
                      f"{weights.device}; all must be on one device")
    kind_of(w1.device, name)
    for what, each, dtypes in (("hidden_states", x, FLOATS), ("top_k_index", ids, INTEGERS),
                               ("top_k_weights", weights, FLOATS)):
        if each.layout is not torch.strided or not each.data_ptr() and each.numel():
            raise refusal(abi.E_UNSUPPORTED, f"{name}: {what} is a {type(each).__name__} "
                          f"({each.layout}); Moxie takes tensors whose numbers are at an address, "
                          "row by row: give what its to_local() or to_dense() returns, or use "
                          "model.set_experts_implementation('eager')")
        if each.dtype not in dtypes or each.dim() != 2:
            raise refusal(abi.E_UNSUPPORTED, f"{name}: {what} is {each.dtype} of shape "
                          f"{list(each.shape)}; Moxie takes two dimensions of float32, bfloat16 or "
                          "float16, and for top_k_index of int32 or int64: load the model with one "
                          "of the first three as dtype")
    if ids.shape != weights.shape or ids.shape[0] != x.shape[0]:
        raise refusal(abi.E_INVALID, f"{name}: hidden_states is {list(x.shape)}, top_k_index "
                      f"{list(ids.shape)} and top_k_weights {list(weights.shape)}; Moxie takes "
                      "[tokens, hidden_size], and twice [tokens, top_k]")


def _check_hidden(module, x, prepared):
    """Only addresses go further: a row that is too short would be read past its end."""
    hidden = prepared.shared.experts.config["hidden_size"]
    if x.shape[1] != hidden:
        raise refusal(abi.E_INVALID, f"{type(module).__name__}: hidden_states is {list(x.shape)}; "
                      f"these experts take [tokens, {hidden}]")


def _unrecorded(module, what, verb):
    return refusal(abi.E_UNSUPPORTED, f"{type(module).__name__}: {what} would not hold what Moxie "
                   f"computes: {verb} the model after model.set_experts_implementation('eager')")


def _is_recorded():
    """Whether torch records operations, as make_fx does: by a module that it has imported then."""
    recorder = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return recorder is not None and recorder.get_proxy_mode() is not None


def _is_fake(tensor):
    """Whether it has a shape and no numbers: of a module that torch has imported then."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(tensor, module.FakeTensor)


# Of torch.func, whose tensors are nowhere: those of grad, vmap and the like.
_is_wrapped = getattr(getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor",
                      lambda each: False)


def _check_transforms(module, tensors):
    """Refuses derivatives that are taken on the way: no backward would come to refuse them."""
    wrapped = any(map(_is_wrapped, tensors))
    if wrapped or (getattr(forward_ad, "_current_level", 0) >= 0  # else it takes its time
                   and any(forward_ad.unpack_dual(each).tangent is not None for each in tensors)):
        what = "no transforms of torch.func" if wrapped else "no derivatives in forward mode"
        raise refusal(abi.E_UNSUPPORTED, f"{type(module).__name__}: Moxie computes {what}: use "
                      "model.set_experts_implementation('eager')")


def _forward(module, x, ids, weights):
    if torch.jit.is_tracing():
        raise _unrecorded(module, "a trace", "trace")
    if _is_recorded():
        raise _unrecorded(module, "a graph of make_fx", "trace")
    if _is_fake(x):
        raise _unrecorded(module, "a fake tensor", "run")
    parts = parts_of(module)
    _check_transforms(module, (x, ids, weights, *tensors_of(parts)))
    graded = torch.is_grad_enabled() and any(
        each.requires_grad for each in (x, weights, *tensors_of(parts)))
    if graded and module.training:
        raise refusal(abi.E_UNSUPPORTED, f"{type(module).__name__}: Moxie computes no gradients, "
                      "and the model is in training mode: call model.eval(), or train with "
                      "model.set_experts_implementation('grouped_mm')")
    _check_input(module, x, ids, weights, parts.w1)
    prepared = _ready(module, parts, NUMBERS[x.dtype], x.device, ids.shape[1])
    _check_hidden(module, x, prepared)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    prepared.shared.forward(prepared.layer, x, ids, weights, y)
    return InferenceOnly.apply(lambda: y, x, weights, *tensors_of(parts)) if graded else y


# A compiled model calls it as it is, between two graphs. Older torch takes no reason.
_REASON = {"reason": "Moxie's calls lie between graphs: leave fullgraph out; to export, "
                     "model.set_experts_implementation('eager')"}
_opaque_forward = torch.compiler.disable(_forward, **(
    _REASON if "reason" in inspect.signature(torch.compiler.disable).parameters else {}))
_is_exporting = getattr(torch.compiler, "is_exporting", bool)  # older ones cannot be asked


def forward(module, hidden_states, top_k_index, top_k_weights):
    """ExpertsInterface's function: [T, H], ids [T, k], weights [T, k] to [T, H].

    Ids that are not those of an expert here, as expert parallelism makes them, add nothing.
    """
    if torch.compiler.is_dynamo_compiling():  # where is_exporting() is constant, of torch 2.11 True
        return _opaque_forward(module, hidden_states, top_k_index, top_k_weights)
    if _is_exporting():
        raise _unrecorded(module, "an exported program", "export")
    return _forward(module, hidden_states, top_k_index, top_k_weights)


ExpertsInterface.register("moxie", forward)
if FP8ExpertsInterface is not None:
    FP8ExpertsInterface.register("moxie", forward)
transformers_mxfp4.register()
