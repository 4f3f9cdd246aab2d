#!/usr/bin/env python3
"""Tokens per second of vLLM with Moxie's experts and with its own, on a GPU.

    bench/vllm.py --plugin build/release/lib/libmoxie.so --layers 8 --json

Each contestant is an engine in a process of its own, by turns A B B A. Without --model it is
Qwen3-30B-A3B with random weights, made by transformers, or by vLLM, which needs no disk for all 48
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

import argparse
import json
import math
import os
import pathlib
import signal
import socket
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
    parser.add_argument("--layers", type=at_least(1, most=48), default=8,
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
    parser.add_argument("--ranks", type=at_least(1), default=1,
                        help="data parallel engines with expert parallelism; default: %(default)s")
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON",
                        help="more arguments of vLLM's LLM, as an object")
    parser.add_argument("--tolerance", type=at_least(0, float), default=0.25,
                        help="most difference of a logarithm; default: %(default)s")
    parser.add_argument("--timeout-s", type=at_least(1), default=3600,
                        help="seconds after which a contestant is stopped, and what it was at is "
                        "said; default: %(default)s")
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


def rank():
    """Of this process among the contestant's."""
    return int(os.environ.get("VLLM_DP_RANK", "0"))


def prompt_of(tokens, number):
    """Different ones of every number and rank, the same for every contestant."""
    number += 10000 * rank()
    return {"prompt_token_ids": [(7919 * number + 104729 * place) % 30011 + 5
                                 for place in range(tokens)]}


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


def watch_gpu(worker):
    """From here on, in one of vLLM's workers: a process of its own, with all that this one needs."""
    import torch
    if torch.cuda.is_available():
        worker.gpu_watch = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA])
        worker.gpu_watch.start()


def gpu_busy_s(worker):
    """Seconds since watch_gpu in which the worker's GPU was at anything; 0 where there is none."""
    import torch
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.synchronize()
    worker.gpu_watch.stop()
    spans = sorted((each.time_range.start, each.time_range.end)
                   for each in worker.gpu_watch.events()
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
    engine.collective_rpc(watch_gpu)
    engine.generate(prompts, greedy, use_tqdm=False)
    return {"seconds": found[1:], "busy_s": max(engine.collective_rpc(gpu_busy_s))}


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


def source_of(plugin):
    """The commit of the library that is measured."""
    import moxie
    return moxie.load(plugin, "bench/vllm.py").source_id


def run_contestant(options):
    """Everything of one engine, written as JSON."""
    import vllm
    start = time.perf_counter()
    engine = make_engine(options)
    if options.engine.get("load_format") == "dummy":
        engine.collective_rpc(grow_dummies, args=(rank(),))
    found = {"vllm": vllm.__version__, "ready_s": round(time.perf_counter() - start, 1),
             "said": said(engine, options),
             "prefill": timed(engine, [prompt_of(options.prompt, 0)], 1),
             "decode": {str(batch): timed(
                 engine, [prompt_of(16, number) for number in range(batch)], options.steps)
                 for batch in options.batch},
             "moxie": source_of(options.plugin),
             "moxie_layers": (min(engine.collective_rpc(layers_here))
                              if options.contestant != "vllm" else 0)}
    pathlib.Path(options.result).write_text(json.dumps(found))


# ---- All of them -------------------------------------------------------------------------------


def make_model(options, folder):
    """A checkpoint with random weights, where nobody gave one, or without any if vLLM makes them."""
    config = config_of("qwen3-30b-a3b", options.layers)
    if options.engine.get("load_format") == "dummy":
        config.update({"architectures": ["Qwen3MoeForCausalLM"], "dtype": "bfloat16"})
        config.save_pretrained(folder)
        return folder
    say(f"making {options.layers} layers of Qwen3-30B-A3B")
    random_model(config, "cuda").save_pretrained(folder)
    return folder


CONTESTANTS = {"moxie": {}, "vllm": {}}  # and what is in the environment of each
RANKS_CONTESTANTS = {**CONTESTANTS, "moxie-experts": {"MOXIE_EXCHANGE": "vllm"}}


def contestants(options):
    return RANKS_CONTESTANTS if options.ranks > 1 else CONTESTANTS


def installed(folder):
    """What pip leaves of moxie for vLLM to find, in a folder of its own."""
    site = pathlib.Path(folder) / "site"
    described = site / "moxie-0.dist-info"
    described.mkdir(parents=True, exist_ok=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: moxie\nVersion: 0\n")
    (described / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nmoxie = moxie.vllm_plugin:register\n")
    return str(site)


def environments(name, options, folder):
    """What each process of a contestant runs in."""
    path = [str(ROOT / "hosts" / "python"), installed(folder),
            *filter(None, [os.environ.get("PYTHONPATH")])]
    shared = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(path),
              "PYTHONFAULTHANDLER": "1",  # every process says where it is when it gets SIGABRT
              "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # of functions for its workers
              **contestants(options)[name]}
    shared.pop("MOXIE_PLUGIN", None)
    if name != "vllm":
        shared["MOXIE_PLUGIN"] = str(pathlib.Path(options.plugin).resolve())
    if options.ranks == 1:
        return [shared]
    with socket.socket() as probe:  # a port that is free
        probe.bind(("127.0.0.1", 0))
        meeting = {"VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_SIZE": str(options.ranks),
                   "VLLM_DP_MASTER_PORT": str(probe.getsockname()[1])}
    return [{**shared, **meeting, "VLLM_DP_RANK": str(each), "VLLM_DP_RANK_LOCAL": str(each)}
            for each in range(options.ranks)]


def start(name, options, arguments, folder):
    """The JSON of each process of a contestant."""
    say(f"{name}: {'an engine starts' if options.ranks == 1 else f'{options.ranks} engines start'}")
    folder = pathlib.Path(tempfile.mkdtemp(dir=folder))
    processes, logs, results = [], [], []
    for number, environment in enumerate(environments(name, options, folder)):
        logs.append(folder / f"{number}.log")
        results.append(folder / f"{number}.json")
        with logs[-1].open("w") as log:
            processes.append(subprocess.Popen(
                [sys.executable, __file__, *arguments, "--plugin", options.plugin,
                 "--model", options.model, "--contestant", name, "--result", str(results[-1])],
                env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True))
    codes = codes_of(processes, options.timeout_s)
    for code, log in zip(codes, logs):
        if code:
            raise CannotRun(f"{name}: its engine ended with {code}:\n{end_of(log, 20)}")
    if None in codes:
        raise CannotRun(f"{name}: had not ended after {options.timeout_s} s (--timeout-s):\n"
                        + "\n".join(end_of(log, 100) for log in logs))
    found = [json.loads(result.read_text()) for result in results]
    if name != "vllm" and min(each["moxie_layers"] for each in found) == 0:
        raise CannotRun("Moxie computed no layer, so nothing was measured; vLLM's log says of it:\n"
                        + "\n".join(line for log in logs for line in log.read_text().splitlines()
                                    if "oxie" in line))
    return joined(found)


def end_of(log, lines):
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def codes_of(processes, timeout_s):
    """How each has ended; None of those that were stopped, as they would wait for one that failed,
    or had not ended in time."""
    codes, until = [None], time.monotonic() + timeout_s
    try:
        while None in codes and not any(codes) and time.monotonic() < until:
            time.sleep(0.1)
            codes = [each.poll() for each in processes]
        if not any(codes) and None in codes:
            for each in processes:
                stop(each, signal.SIGABRT)
            time.sleep(2)  # until they have said where they are
    finally:  # of an interrupt, too
        for each in processes:
            stop(each, signal.SIGKILL)
            each.wait()
    return codes


def stop(process, number):
    """A signal for a contestant's process and those that vLLM has made."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass


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


def apart(ours, theirs):
    """What differs between what two engines said, while their tokens agree: "most" of a logarithm,
    None where one is no number or no token agrees, so that there is nothing to compare."""
    differences, same, tokens = [], 0, 0
    for one, other in zip(ours, theirs):
        tokens += len(one)
        for (token, entries), (their_token, their_entries) in zip(one, other):
            shared = entries.keys() & their_entries.keys()
            differences += [abs(entries[each] - their_entries[each]) for each in shared]
            if token != their_token:
                break
            same += 1
    comparable = same > 0 and all(map(math.isfinite, differences))
    return {"most": round(max(differences), 4) if comparable else None,
            "same_tokens": same, "tokens": tokens}


def rates(runs, options):
    """Tokens per second, of the median of all repeats, and a step's busy GPU; None without one."""
    def rate(tokens, steps, measured):
        seconds = statistics.median(each for run in measured for each in run["seconds"])
        busy = statistics.median(run["busy_s"] for run in measured)
        return {"tokens_per_second": round(tokens / seconds, 1),
                "gpu_ms_a_step": round(1e3 * busy / steps, 4) or None}

    return {"prefill": rate(options.ranks * options.prompt, 1, [run["prefill"] for run in runs]),
            "decode": {str(batch): rate(options.ranks * batch * options.steps, options.steps,
                                        [run["decode"][str(batch)] for run in runs])
                       for batch in options.batch}}


def measure(options, arguments):
    with tempfile.TemporaryDirectory() as folder:
        if options.model is None:
            options.model = make_model(options, str(pathlib.Path(folder) / "model"))
        runs = {name: [] for name in contestants(options)}
        for number in range(options.rounds):
            for name in list(runs) if number % 2 == 0 else list(runs)[::-1]:
                runs[name].append(start(name, options, arguments, folder))
    kept = ("layers", "quantization", "ranks", "prompt", "batch", "steps", "rounds", "engine")
    return {"command": " ".join(["bench/vllm.py", *arguments]), "machine": machine(),
            "vllm": runs["vllm"][0]["vllm"], "moxie": runs["moxie"][0]["moxie"],
            "moxie_layers": runs["moxie"][0]["moxie_layers"],
            **{key: getattr(options, key) for key in kept},
            "logprobs": {name: apart(each[0]["said"], runs["vllm"][0]["said"])
                         for name, each in runs.items() if name != "vllm"},
            "results": {name: rates(each, options) for name, each in runs.items()},
            "runs": [{"contestant": name, "ready_s": run["ready_s"], "prefill": run["prefill"],
                      "decode": run["decode"]} for name, each in runs.items() for run in each]}


def machine():
    import torch
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


def report(found):
    print(f"{found['machine']}, Moxie {found['moxie']}, vLLM {found['vllm']}, "
          f"{found['quantization'] or 'not quantised'}, ranks: {found['ranks']}")
    results = found["results"]
    rows = [(f"prefill of {found['prompt']}", [each["prefill"] for each in results.values()])]
    rows += [(f"decode, {batch}", [each["decode"][str(batch)] for each in results.values()])
             for batch in found["batch"]]
    wide = 14 * len(results)
    print(f"{'':20}{'tokens per second':>{wide}}{'GPU busy, ms a step':>{wide}}")
    print(f"{'':20}" + "".join(f"{name:>14}" for name in results) * 2)
    for name, cells in rows:
        print(f"{name:20}" + "".join(f"{each[key] or '-':>14}" for key in cells[0] for each in cells))
    for name, logs in found["logprobs"].items():
        most = "more than can be said" if logs["most"] is None else f"at most {logs['most']}"
        print(f"{name}: logarithms of probabilities differ by {most}, {logs['same_tokens']} of "
              f"{logs['tokens']} tokens are the same")


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
    return 3 if any(each["most"] is None or each["most"] > options.tolerance
                    for each in found["logprobs"].values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
