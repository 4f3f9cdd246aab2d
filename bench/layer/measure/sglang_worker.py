"""What bench/sglang.py asks of SGLang's schedulers, where the model is: a plugin that SGLang calls
in each of its processes."""

import dataclasses
import json
import os
import pathlib
import sys

from measure.command import CannotRun
from measure.engines import gpu_busy_s, watch_gpu

LARGEST = 0.035  # of a weight, about as in trained ones
E4M3_MAX = 448.0


def register():
    """Gives the schedulers what ask() names; in other processes there is none."""
    module = sys.modules.get("sglang.srt.managers.scheduler")
    if module:
        module.Scheduler.bench_ask = ask
        create = module.SchedulerIpcChannels.create
        module.SchedulerIpcChannels.create = lambda **given: create(**of_first_rank(**given))


def of_first_rank(port_args, **given):
    """The same, but that no other rank takes what is asked. With data parallel attention each rank
    would in turn, and only of the first one's words do the others hear."""
    if rank() > 0:
        port_args = dataclasses.replace(port_args, rpc_ipc_name="inproc://nobody")
    return {"port_args": port_args, **given}


def rank():
    """Of a scheduler, among those that have parts of the model."""
    from sglang.srt.runtime_context import get_parallel
    return get_parallel().tp_rank


def ask(scheduler, what, folder):
    """Leaves its answer in a file of the folder, as SGLang brings none back."""
    answer = ASKED[what](scheduler)
    (pathlib.Path(folder) / str(rank())).write_text(json.dumps(answer))


def answers(engine, what, folder, ranks):
    """Of every scheduler of an engine, of which there are so many."""
    folder = pathlib.Path(folder) / what
    folder.mkdir(exist_ok=True)
    engine.collective_rpc("bench_ask", what=what, folder=str(folder))
    found = [json.loads(each.read_text()) for each in folder.iterdir()]
    if len(found) != ranks:  # of the others' failures SGLang tells nothing but in its log
        raise CannotRun(f"{len(found)} of {ranks} ranks have answered {what!r}")
    return found


def layers_here(scheduler):
    """Of Moxie's, in this process."""
    if not os.environ.get("MOXIE_PLUGIN"):
        return 0
    import moxie.sglang
    return moxie.sglang.layers_made()


def grow(scheduler):
    grow_dummies(scheduler.tp_worker.model_runner.model, rank())


def grow_dummies(model, rank_here):
    """SGLang's dummy weights, of 0.001 at most, to the size of trained ones, on one of its ranks.

    Else experts add nothing that a result could show, and those of all ranks are the same, as are
    their parts of the head. Those in fp8 are nearly all zero with a scale of one, so that they get
    others. As what is of one size is also alike, the head would say every token again.
    """
    import torch
    for name, weight in model.named_parameters():
        weight = weight.data
        is_apart = "experts" in name or "lm_head" in name
        largest = LARGEST * (1 + rank_here / 8 if is_apart else 1)
        if weight.ndim == 1 and "norm" in name:
            weight.fill_(1)
        elif weight.element_size() == 1:
            seeded = torch.Generator(weight.device).manual_seed(weight.numel())
            for part in weight if weight.ndim > 2 else [weight]:  # an expert's
                part.copy_(torch.empty(part.shape, device=weight.device).uniform_(
                    -E4M3_MAX, E4M3_MAX, generator=seeded))
        elif weight.ndim > 1:
            if "scale" in name:
                weight.fill_(largest / E4M3_MAX)
            else:
                weight.mul_(largest / 0.001)
            if "lm_head" in name:
                weight.copy_(weight.flip(1))


ASKED = {"grow": grow, "watch": watch_gpu, "busy": gpu_busy_s, "layers": layers_here}
