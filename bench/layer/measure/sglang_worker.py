"""What bench/sglang.py asks of SGLang's schedulers, where the model is: a plugin that SGLang calls
in each of its processes."""

import dataclasses
import json
import os
import pathlib
import re
import sys

from measure.command import CannotRun
from measure.engines import gpu_busy_s, watch_gpu

LARGEST = 0.035  # of a weight, about as in trained ones
E4M3_MAX = 448.0
EXPERTS_MAX = 4096  # for seeds that differ


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
    for each in folder.iterdir():  # of a question before
        each.unlink()
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
    model = scheduler.tp_worker.model_runner.model
    grow_dummies(model, rank())
    derived = getattr(model, "post_load_weights", None)
    if derived:  # latent attention multiplies by parts of a weight that are kept apart
        derived()


def grow_dummies(model, rank_here):
    """SGLang's dummy weights, of 0.001 at most, to the size of trained ones, on one of its ranks.

    Else experts add nothing that a result could show, and ranks' parts of the head are the same.
    Those in fp8 are nearly all zero with a scale of one, so that they get others. As what is of one
    size is also alike, the head would say every token again.
    """
    parts = parts_of(model)
    for name, weight in model.named_parameters():
        weight = weight.data
        largest = LARGEST * (1 + rank_here / 8 if "lm_head" in name else 1)
        if name in parts:
            for part in parts[name]:
                draw(*part)
        elif weight.ndim == 1 and "norm" in name:
            weight.fill_(1)
        elif weight.element_size() == 1:
            draw(weight, weight.numel())
        elif weight.ndim > 1:
            if "scale" in name:
                weight.fill_(largest / E4M3_MAX)
            else:
                weight.mul_(largest / 0.001)
            if "lm_head" in name:
                weight.copy_(weight.flip(1))


def parts_of(model):
    """{a parameter: [what draw() takes, of one expert each]}. An expert's numbers are the same on
    whichever rank and in whichever slot it is, and however many ranks share it, as contestants
    place them otherwise, and those of a shared one if it is a slot behind the others or a module of
    its own."""
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "w13_weight"):
            routed = len(module.w13_weight) - module.num_fused_shared_experts
            experts = [module.moe_ep_rank * routed + slot + 1 if slot < routed else 0
                       for slot in range(len(module.w13_weight))]
            weights = ("w13_weight", "w2_weight")
            shard = module.moe_tp_rank, module.moe_tp_size
        elif name.endswith(("shared_expert", "shared_experts")):
            experts, weights = [0], ("gate_up_proj.weight", "down_proj.weight")
            group = module.get_submodule("down_proj").tp_group  # None where every rank has all
            shard = (group.rank_in_group, group.world_size) if group else (0, 1)
        else:
            continue
        layer = int(re.search(r"\d+", name)[0])
        for number, each in enumerate(weights):
            weight = module.get_parameter(each).data
            found[f"{name}.{each}"] = [
                (part, (layer * EXPERTS_MAX + expert) * 2 + number, len(part) if number else 2,
                 *shard)
                for expert, part in zip(experts, weight if weight.ndim > 2 else [weight])]
    return found


def draw(weight, seed, rows=1, shard=0, shards=1):
    """Numbers of this seed, as large as trained ones or, in fp8, as its codes can be: those of one
    shard of all, where a weight is so many rows of which each shard has as much."""
    import torch
    most = E4M3_MAX if weight.element_size() == 1 else LARGEST
    seeded = torch.Generator(weight.device).manual_seed(seed)
    whole = torch.empty(rows, shards, weight.numel() // rows, device=weight.device)
    weight.copy_(whole.uniform_(-most, most, generator=seeded)[:, shard].reshape(weight.shape))


ASKED = {"grow": grow, "watch": watch_gpu, "busy": gpu_busy_s, "layers": layers_here}
