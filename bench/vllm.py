#!/usr/bin/env python3
"""Tokens per second of vLLM with Moxie's experts and with its own, on a GPU.

    bench/vllm.py --plugin build/release/lib/libmoxie.so --layers 8 --json

Each contestant is an engine in a process of its own, by turns A B B A. Without --model it is
Qwen3-30B-A3B with random weights, made by transformers. A prompt of --prompt tokens is timed, and
--steps greedy tokens of each of --batch short ones, three times each. A fourth time a profiler says
how long the GPU was busy, which no other tenant of the host moves: engines of few layers wait for
the host. What both say of the same prompts is compared, as far as their tokens agree. Progress goes
to stderr. Exit code 1: cannot measure here, or Moxie computed nothing; 2: usage; 3: the logarithms
of probabilities differ by more than --tolerance.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
# In the place of this folder, in which vllm is this file.
sys.path[0] = str(ROOT / "bench" / "layer")

from measure.command import CannotRun, at_least, counts, named_path, say, show  # noqa: E402
from measure.models import config_of, random_model  # noqa: E402

REPEATS = 3
COMPARED_TOKENS = 8
COMPARED_PROMPTS = (1000, 500, 37, 5)  # tokens, cut to --prompt


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plugin", type=named_path, default=os.environ.get("MOXIE_PLUGIN") or None,
                        help="libmoxie.so; default: MOXIE_PLUGIN of the environment")
    parser.add_argument("--model", help="a model's folder; default: one with random weights")
    parser.add_argument("--layers", type=at_least(1), default=8,
                        help="of the random model; default: %(default)s")
    parser.add_argument("--quantization", help="vLLM's word for it, fp8_per_block for example")
    parser.add_argument("--prompt", type=at_least(1), default=8000,
                        help="tokens of the prompt that is timed; default: %(default)s")
    parser.add_argument("--batch", type=counts("sequences", 1), default=[1, 16, 64],
                        help="sequences that decode at once; default: 1,16,64")
    parser.add_argument("--steps", type=at_least(1), default=128,
                        help="tokens decoded by each; default: %(default)s")
    parser.add_argument("--rounds", type=at_least(1), default=2,
                        help="of one engine each, every other the other way round; default: "
                        "%(default)s")
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON",
                        help="more arguments of vLLM's LLM, as an object")
    parser.add_argument("--tolerance", type=at_least(0, float), default=0.25,
                        help="most difference of a logarithm; default: %(default)s")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--contestant", help=argparse.SUPPRESS)  # this process is one
    parser.add_argument("--result", help=argparse.SUPPRESS)  # and writes its JSON here
    options = parser.parse_args(arguments)
    if not options.plugin:
        parser.error("--plugin, or MOXIE_PLUGIN of the environment, says which libmoxie.so")
    if not isinstance(options.engine, dict):
        parser.error("--engine is an object, such as '{\"gpu_memory_utilization\": 0.7}'")
    return options


# ---- One contestant ----------------------------------------------------------------------------


def prompt_of(tokens, number):
    """Different ones of every number, the same in every process."""
    return {"prompt_token_ids": [(7919 * number + 104729 * place) % 30011 + 5
                                 for place in range(tokens)]}


def make_engine(options):
    from vllm import LLM
    room = max(options.prompt, *COMPARED_PROMPTS) + options.steps + COMPARED_TOKENS
    return LLM(**{
        "model": options.model, "skip_tokenizer_init": True, "max_model_len": room,
        "enable_prefix_caching": False, "quantization": options.quantization,
        "max_num_batched_tokens": max(8192, options.prompt), **options.engine})


def busy_s(call):
    """Seconds in which the GPU was at anything, while `call` ran; 0 where there is none."""
    import torch
    if not torch.cuda.is_available():
        return 0.0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    spans = sorted((each.time_range.start, each.time_range.end) for each in profiler.events()
                   if each.device_type == torch.autograd.DeviceType.CUDA)
    return union(spans) / 1e6


def union(spans):
    """What sorted spans cover together: a kernel that begins early waits within another's time."""
    covered, until = 0.0, float("-inf")
    for start, end in spans:
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def timed(engine, prompts, steps):
    """Seconds of each repeat, and those in which the GPU was busy."""
    from vllm import SamplingParams
    greedy = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True, detokenize=False)
    found = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        engine.generate(prompts, greedy, use_tqdm=False)
        found.append(time.perf_counter() - start)
    return {"seconds": found[1:],
            "busy_s": busy_s(lambda: engine.generate(prompts, greedy, use_tqdm=False))}


def said(engine, options):
    """[[token, {token: logarithm of its probability}] of each step] of each compared prompt."""
    from vllm import SamplingParams
    greedy = SamplingParams(temperature=0, max_tokens=COMPARED_TOKENS, logprobs=5, ignore_eos=True,
                            detokenize=False)
    prompts = [prompt_of(min(tokens, options.prompt), 1000 + number)
               for number, tokens in enumerate(COMPARED_PROMPTS)]
    return [[[token, {int(each): entry.logprob for each, entry in entries.items()}]
             for token, entries in zip(answer.outputs[0].token_ids, answer.outputs[0].logprobs)]
            for answer in engine.generate(prompts, greedy, use_tqdm=False)]


def run_contestant(options):
    """Everything of one engine, written as JSON."""
    import vllm
    adapter = None
    if options.contestant == "moxie":
        import moxie.vllm as adapter
        adapter.register()  # as vLLM does where the package is installed
    start = time.perf_counter()
    engine = make_engine(options)
    found = {"vllm": vllm.__version__, "ready_s": round(time.perf_counter() - start, 1),
             "said": said(engine, options),
             "prefill": timed(engine, [prompt_of(options.prompt, 0)], 1),
             "decode": {str(batch): timed(
                 engine, [prompt_of(16, number) for number in range(batch)], options.steps)
                 for batch in options.batch},
             "moxie_layers": adapter.layers_made() if adapter else 0}
    pathlib.Path(options.result).write_text(json.dumps(found))


# ---- All of them -------------------------------------------------------------------------------


def make_model(options, folder):
    """A checkpoint with random weights, where nobody gave one."""
    say(f"making {options.layers} layers of Qwen3-30B-A3B")
    random_model(config_of("qwen3-30b-a3b", options.layers), "cuda").save_pretrained(folder)
    return folder


def start(name, options, arguments, folder):
    """The JSON of a contestant, which runs in a process of its own."""
    say(f"{name}: an engine starts")
    result = pathlib.Path(folder) / "result.json"
    result.unlink(missing_ok=True)
    environment = {
        **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "hosts" / "python"),
                                       *filter(None, [os.environ.get("PYTHONPATH")])])}
    environment.pop("MOXIE_PLUGIN", None)
    if name == "moxie":
        environment["MOXIE_PLUGIN"] = str(pathlib.Path(options.plugin).resolve())
    ran = subprocess.run(
        [sys.executable, __file__, *arguments, "--plugin", options.plugin, "--model", options.model,
         "--contestant", name, "--result", str(result)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if ran.returncode != 0 or not result.exists():
        raise CannotRun(f"{name}: its engine ended with {ran.returncode}:\n"
                        + "\n".join(ran.stdout.splitlines()[-20:]))
    found = json.loads(result.read_text())
    if name == "moxie" and found["moxie_layers"] == 0:
        raise CannotRun("Moxie computed no layer, so nothing was measured; vLLM's log says of it:\n"
                        + "\n".join(line for line in ran.stdout.splitlines() if "oxie" in line))
    return found


def apart(ours, theirs):
    """What differs between what two engines said, while their tokens agree."""
    most, same, tokens = 0.0, 0, 0
    for one, other in zip(ours, theirs):
        tokens += len(one)
        for (token, entries), (their_token, their_entries) in zip(one, other):
            shared = entries.keys() & their_entries.keys()
            most = max([most, *(abs(entries[each] - their_entries[each]) for each in shared)])
            if token != their_token:
                break
            same += 1
    return {"most": round(most, 4), "same_tokens": same, "tokens": tokens}


def rates(runs, options):
    """Tokens per second, of the median of all repeats, and a step's busy GPU."""
    def rate(tokens, steps, measured):
        seconds = statistics.median(each for run in measured for each in run["seconds"])
        busy = statistics.median(run["busy_s"] for run in measured)
        return {"tokens_per_second": round(tokens / seconds, 1),
                "gpu_ms_a_step": round(1e3 * busy / steps, 4)}

    return {"prefill": rate(options.prompt, 1, [run["prefill"] for run in runs]),
            "decode": {str(batch): rate(batch * options.steps, options.steps,
                                        [run["decode"][str(batch)] for run in runs])
                       for batch in options.batch}}


def measure(options, arguments):
    with tempfile.TemporaryDirectory() as folder:
        if options.model is None:
            options.model = make_model(options, str(pathlib.Path(folder) / "model"))
        runs = {"moxie": [], "vllm": []}
        for number in range(options.rounds):
            for name in list(runs) if number % 2 == 0 else list(runs)[::-1]:
                runs[name].append(start(name, options, arguments, folder))
    kept = ("layers", "quantization", "prompt", "batch", "steps", "rounds", "engine")
    return {"command": " ".join(["bench/vllm.py", *arguments]), "machine": machine(),
            "vllm": runs["vllm"][0]["vllm"], "moxie_layers": runs["moxie"][0]["moxie_layers"],
            **{key: getattr(options, key) for key in kept},
            "logprobs": apart(runs["moxie"][0]["said"], runs["vllm"][0]["said"]),
            "results": {name: rates(each, options) for name, each in runs.items()},
            "runs": [{"contestant": name, "ready_s": run["ready_s"], "prefill": run["prefill"],
                      "decode": run["decode"]} for name, each in runs.items() for run in each]}


def machine():
    import torch
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


def report(found):
    print(f"{found['machine']}, vLLM {found['vllm']}, {found['quantization'] or 'not quantised'}")
    ours, theirs = found["results"]["moxie"], found["results"]["vllm"]
    rows = [(f"prefill of {found['prompt']}", ours["prefill"], theirs["prefill"])]
    rows += [(f"decode, {batch}", ours["decode"][str(batch)], theirs["decode"][str(batch)])
             for batch in found["batch"]]
    print(f"{'':20}{'tokens per second':>26}{'GPU busy, ms a step':>28}")
    print(f"{'':20}" + f"{'moxie':>13}{'vllm':>13}" * 2)
    for name, *both in rows:
        print(f"{name:20}" + "".join(f"{each[key]:13}" for key in both[0] for each in both))
    logs = found["logprobs"]
    print(f"logarithms of probabilities differ by at most {logs['most']}, "
          f"{logs['same_tokens']} of {logs['tokens']} tokens are the same")


def main(arguments):
    options = parse(arguments)
    if options.contestant:
        run_contestant(options)
        return 0
    try:
        found = measure(options, arguments)
    except (CannotRun, ImportError) as error:
        say(str(error))
        return 1
    show(found, options.json, report)
    return 0 if found["logprobs"]["most"] <= options.tolerance else 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
