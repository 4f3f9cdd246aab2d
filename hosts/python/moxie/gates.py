"""Which of Moxie's activations a module of transformers computes, found by computing it.

A module says what lies between its two projections only in code: a method that splits the columns,
an activation module, constants of its own. So the method is given numbers, and what comes out is
compared with what Moxie would make of them, for every order of columns and every activation.
"""

import itertools
import math

import torch
from torch.nn import functional

from moxie.abi import E_UNSUPPORTED, ORDER_GATE_UP, ORDER_INTERLEAVED, ORDER_PLAIN, ORDER_UP_GATE
from moxie.abi import MoxieError

SUPPORTED = ("silu, gelu, gelu_tanh, swigluoai (gate * sigmoid(alpha * gate) * (up + beta), gate "
             "clamped above and up both ways), and relu2 without a gate")
PLAIN = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda gate: functional.gelu(gate, approximate="tanh"),
}
ORDERS = {
    ORDER_GATE_UP: lambda gate, up: torch.cat((gate, up), dim=-1),
    ORDER_INTERLEAVED: lambda gate, up: torch.stack((gate, up), dim=-1).flatten(-2),
    ORDER_UP_GATE: lambda gate, up: torch.cat((up, gate), dim=-1),
}
# Where modules keep the constants of a clamped gate. A name that is missed means a refusal, never a
# wrong result.
ALPHAS, LIMITS = ("alpha", "swiglu_alpha"), ("limit", "swiglu_limit")
FAR = 1e4  # no clamp is farther out
DEVICE_ERRORS = tuple(getattr(torch, name) for name in ("OutOfMemoryError", "AcceleratorError")
                      if hasattr(torch, name))


def _constants(module, names, more):
    """The numbers of those names that the module has, and `more`."""
    found = [getattr(module, name, None) for name in names]
    return dict.fromkeys([float(each) for each in found if isinstance(each, (int, float))] + more)


def _swigluoai(gate, up, alpha, beta, limit):
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def _candidates(module, gate, up):
    """(configuration keys, result) of every activation with a gate, the common ones first."""
    for name, act in PLAIN.items():
        yield {"activation": name}, act(gate) * up
    parameters = itertools.product(_constants(module, ALPHAS, [1.702, 1.0]), (1.0, 0.0),
                                   _constants(module, LIMITS, [0.0]))
    for alpha, beta, limit in parameters:
        limit = 0.0 if limit == float("inf") else limit
        keys = {"activation": "swigluoai", "activation_alpha": alpha, "activation_beta": beta,
                "activation_limit": limit}
        yield keys, _swigluoai(gate, up, alpha, beta, limit)


def _samples(device, limits):
    """Gates and ups of every sign and size, in no relation to each other, some past every limit:
    those that the module names, and those of any size that it has under other names.

    Past 100 their signs are all four pairs. No large up is beside a small gate: of one just under
    zero little is left, which functions that are the same in numbers round in several ways."""
    numbers = {"dtype": torch.float32, "device": device}
    place = torch.arange(96, **numbers)
    reach = 2 * max([6.0, *(each for each in limits if each < FAR)])
    gate = torch.sin(place * 0.7) * torch.linspace(0.1, reach, 96, **numbers)
    up = torch.cos(place * 1.3) * torch.linspace(reach, 0.1, 96, **numbers)
    far = torch.logspace(2, math.log10(2 * FAR), 8, **numbers)
    gate = torch.cat((gate, far, -far, far, -far))
    up = torch.cat((up, far.flip(0), far.flip(0), -far.flip(0), -far.flip(0)))
    return gate.view(4, 32), up.view(4, 32)


def _same(seen, wanted):
    return seen.shape == wanted.shape and torch.allclose(seen.float(), wanted, rtol=1e-4, atol=1e-5)


def _described(module):
    act = getattr(module, "act_fn", None)
    act = f"act_fn {type(act).__name__}, " if act is not None else ""
    return f"{act}{'gated' if module.has_gate else 'not gated'}"


def recognise(module, device, name):
    """(order of w1's rows, configuration keys) of an experts module; MoxieError when it is none,
    which calls the module by this name."""
    gate, up = _samples(device, _constants(module, LIMITS, []))
    cause = None
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            if not module.has_gate:
                if _same(module.act_fn(gate), functional.relu(gate).square()):
                    return ORDER_PLAIN, {"activation": "relu2"}
            else:
                for order, merge in ORDERS.items():
                    seen = module._apply_gate(merge(gate, up))
                    for keys, wanted in _candidates(module, gate, up):
                        if _same(seen, wanted):
                            return order, keys
    except DEVICE_ERRORS:  # which say nothing of the activation
        raise
    except Exception as error:  # code of a model, which may want more than numbers
        cause = error
    raised = f" (it raised {type(cause).__name__}: {cause})" if cause is not None else ""
    raise MoxieError(E_UNSUPPORTED, -1, f"{name}: {_described(module)}: an activation that Moxie "
                     f"does not have{raised}; supported are {SUPPORTED}. Keep "
                     "experts_implementation='grouped_mm' for this model") from cause
