#!/usr/bin/env python3
"""Tokens per second of vLLM with Moxie's experts and with its own, on a GPU.

    bench/vllm.py --plugin build/release/lib/libmoxie.so --layers 8 --json

Each contestant is an engine in a process of its own, by turns A B B A. Without --model it has the
sizes of --shape and random weights, made by transformers, or by vLLM, which needs no disk for all
layers, with --engine '{"load_format": "dummy"}'. A prompt of --prompt tokens is timed, and
--steps greedy tokens of each of --batch short ones, three times each. A fourth time a profiler in
vLLM's workers says how long the GPU was busy, which no other tenant of the host moves: engines of
few layers wait for the host. What others say of the same prompts is compared with what vLLM says,
as far as their tokens agree. Progress goes to stderr. Exit code 1: cannot measure here, or Moxie
computed nothing, or a contestant had not ended after --timeout-s; 2: usage; 3: the logarithms of
probabilities differ by more than --tolerance.

With --ranks each contestant is as many data parallel engines, a GPU each, with the experts spread
over them. Each has such prompts of its own, so that tokens are those of all; a GPU that waits for
the others is busy. What is compared is unequal: a later rank has fewer prompts and longer answers,
so that ranks with nothing to do follow those that go on. A third contestant is Moxie's experts with
rows that vLLM moves (MOXIE_EXCHANGE=vllm).
"""

import os
import pathlib
import socket
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
# In the place of this folder, in which vllm is this file.
sys.path[0] = str(ROOT / "bench" / "layer")

from measure import engines  # noqa: E402
from measure.command import at_least, say  # noqa: E402
from measure.engines import (  # noqa: E402
    COMPARED_PROMPTS, COMPARED_TOKENS, gpu_busy_s, prompt_tokens, watch_gpu)
from measure.models import config_of, random_model  # noqa: E402

BENCH = engines.Bench(__file__, "vllm", "vLLM")
ENTRY_POINTS = "[vllm.general_plugins]\nmoxie = moxie.vllm_plugin:register\n"


def parse(arguments):
    parser = engines.parser_of(__doc__, BENCH, "vLLM's LLM")
    parser.add_argument("--quantization", help="vLLM's word for it, fp8_per_block for example")
    parser.add_argument("--ranks", type=at_least(1), default=1,
                        help="data parallel engines with expert parallelism; default: %(default)s")
    return engines.check(parser, parser.parse_args(arguments))


# ---- One contestant ----------------------------------------------------------------------------


def rank():
    """Of this process among the contestant's."""
    return int(os.environ.get("VLLM_DP_RANK", "0"))


def prompt_of(tokens, number):
    """Different ones of every number and rank, the same for every contestant."""
    return {"prompt_token_ids": prompt_tokens(tokens, number + 10000 * rank())}


def make_engine(options):
    from vllm import LLM
    room = max(options.prompt, *COMPARED_PROMPTS) + max(options.steps,
                                                        options.ranks * COMPARED_TOKENS)
    return LLM(**{
        "model": options.model, "skip_tokenizer_init": True, "max_model_len": room,
        "enable_prefix_caching": False, "quantization": options.quantization,
        "max_num_batched_tokens": max(8192, options.prompt),
        "enable_expert_parallel": options.ranks > 1, **options.engine})


def grow_dummies(worker, rank_here):
    """vLLM's dummy weights, of 0.001 at most, to the size of trained ones, in one of its workers.

    Else experts add nothing that a result could show, and those of all ranks are the same.
    """
    for name, weight in worker.get_model().named_parameters():
        if weight.ndim == 1 and "norm" in name:
            weight.data.fill_(1)
        elif weight.ndim > 1 and weight.element_size() > 1:  # fp8 has it in its scales
            weight.data.mul_(35 * (1 + rank_here / 8 if "experts" in name else 1))


def timed(engine, prompts, steps):
    """Seconds of each repeat, and those in which the GPU was busy."""
    from vllm import SamplingParams
    greedy = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True, detokenize=False)
    return engines.timed(lambda: engine.generate(prompts, greedy, use_tqdm=False),
                         lambda: engine.collective_rpc(watch_gpu),
                         lambda: engine.collective_rpc(gpu_busy_s))


def said(engine, options):
    """[[token, {token: logarithm of its probability}] of each step] of each compared prompt."""
    from vllm import SamplingParams
    greedy = SamplingParams(temperature=0, max_tokens=COMPARED_TOKENS * (1 + rank()), logprobs=5,
                            ignore_eos=True, detokenize=False)
    prompts = [prompt_of(min(tokens, options.prompt), 1000 + number)
               for number, tokens in enumerate(COMPARED_PROMPTS)][rank() % len(COMPARED_PROMPTS):]
    return [[[token, {int(each): entry.logprob for each, entry in entries.items()}]
             for token, entries in zip(answer.outputs[0].token_ids, answer.outputs[0].logprobs)]
            for answer in engine.generate(prompts, greedy, use_tqdm=False)]


def layers_here(worker):
    """Of Moxie's, in one of vLLM's workers."""
    import moxie.vllm
    return moxie.vllm.layers_made()


def run_contestant(options):
    """Everything of one engine, for JSON."""
    import vllm
    start = time.perf_counter()
    engine = make_engine(options)
    if options.engine.get("load_format") == "dummy":
        engine.collective_rpc(grow_dummies, args=(rank(),))
    return {"version": vllm.__version__, "ready_s": round(time.perf_counter() - start, 1),
             "said": said(engine, options),
             "prefill": timed(engine, [prompt_of(options.prompt, 0)], 1),
             "decode": {str(batch): timed(
                 engine, [prompt_of(16, number) for number in range(batch)], options.steps)
                 for batch in options.batch},
             "moxie": engines.source_of(options.plugin, BENCH),
             "moxie_layers": (min(engine.collective_rpc(layers_here))
                              if options.contestant != "vllm" else 0)}


# ---- All of them -------------------------------------------------------------------------------


def make_model(options, folder):
    """A checkpoint with random weights, where nobody gave one; without any if vLLM makes them."""
    if options.engine.get("load_format") == "dummy":
        return engines.dummy_model(options, folder)
    say(f"making {options.layers} layers of {options.shape}")
    random_model(config_of(options.shape, options.layers), "cuda").save_pretrained(folder)
    import torch
    torch.cuda.empty_cache()  # which the engines would find taken
    return folder


CONTESTANTS = {"moxie": {}, "vllm": {}}  # and what is in the environment of each
RANKS_CONTESTANTS = {**CONTESTANTS, "moxie-experts": {"MOXIE_EXCHANGE": "vllm"}}


def contestants(options):
    return RANKS_CONTESTANTS if options.ranks > 1 else CONTESTANTS


def environments(name, options):
    """What each process of a contestant runs in."""
    shared = {**engines.environment_of(name != "vllm", options, options.folder, ENTRY_POINTS),
              "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # of functions for its workers
              **contestants(options)[name]}
    if options.ranks == 1:
        return [shared]
    with socket.socket() as probe:  # a port that is free
        probe.bind(("127.0.0.1", 0))
        meeting = {"VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_SIZE": str(options.ranks),
                   "VLLM_DP_MASTER_PORT": str(probe.getsockname()[1])}
    return [{**shared, **meeting, "VLLM_DP_RANK": str(each), "VLLM_DP_RANK_LOCAL": str(each)}
            for each in range(options.ranks)]


def start(name, options, arguments):
    """What a contestant's processes found together."""
    say(f"{name}: {'an engine starts' if options.ranks == 1 else f'{options.ranks} engines start'}")
    return joined(engines.start(BENCH, name, options, arguments, environments(name, options)))


def joined(found):
    """The numbers of all ranks as of one engine: they took as long as the slowest, and the GPU of
    the one that came last to what they do together has waited least."""
    def slowest(runs):
        return {"seconds": [max(each) for each in zip(*(run["seconds"] for run in runs))],
                "busy_s": min(run["busy_s"] for run in runs)}

    return {**found[0], "ready_s": max(each["ready_s"] for each in found),
            "said": [prompt for each in found for prompt in each["said"]],
            "prefill": slowest([each["prefill"] for each in found]),
            "decode": {batch: slowest([each["decode"][batch] for each in found])
                       for batch in found[0]["decode"]}}


def measure(options, arguments):
    if not options.model:
        options.model = make_model(options, str(pathlib.Path(options.folder) / "model"))
    runs = engines.in_turns(contestants(options), options.rounds,
                            lambda name: start(name, options, arguments))
    return engines.measured(BENCH, options, arguments, runs, options.ranks)


def main(arguments):
    options = parse(arguments)
    return engines.main(BENCH, options, lambda options: measure(options, arguments), run_contestant)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
