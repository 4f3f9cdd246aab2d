"""What vllm.py and sglang.py have alike: contestants that are engines in processes of their own."""

import argparse
import importlib.util
import json
import math
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

from measure.command import ROOT, CannotRun, at_least, counts, named_path, say, show
from measure.models import SHAPES, config_of

REPEATS = 3
SHAPE = "qwen3-30b-a3b"
RANDOM = [each for each in SHAPES if each != "tiny"]  # whose vocabulary is less than prompt_tokens'
COMPARED_TOKENS = 8
COMPARED_PROMPTS = (1000, 500, 37, 5)  # tokens, cut to --prompt


class Bench(NamedTuple):
    """One of the two programs."""

    script: str  # its path
    key: str  # the other contestant, the engine's package
    title: str  # how people write it

    @property
    def name(self):
        return f"bench/{pathlib.Path(self.script).name}"


# ---- Arguments ---------------------------------------------------------------------------------


def json_object(text):
    """An argparse type: arguments of an engine."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text} is no JSON object, as "
                                         '{"trust_remote_code": true} is')
    return found


def parser_of(doc, bench, arguments_of):
    """The options of both. arguments_of: whose arguments --engine has."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--plugin", type=named_path, default=os.environ.get("MOXIE_PLUGIN") or None,
                        help="libmoxie.so; default: MOXIE_PLUGIN of the environment")
    parser.add_argument("--model", help="a model's folder; default: one with random weights")
    parser.add_argument("--shape", choices=RANDOM, help=f"of the random model; default: {SHAPE}")
    parser.add_argument("--layers", type=at_least(1), default=8,
                        help="of the random model; default: %(default)s")
    parser.add_argument("--prompt", type=at_least(1), default=8000,
                        help="tokens of the prompt that is timed; default: %(default)s")
    parser.add_argument("--batch", type=counts("sequences", 1), default=[1, 16, 64],
                        help="sequences that decode at once; default: 1,16,64")
    parser.add_argument("--steps", type=at_least(1), default=128,
                        help="tokens decoded by each; default: %(default)s")
    parser.add_argument("--rounds", type=at_least(1), default=2,
                        help="of one engine each, every other the other way round; default: "
                        "%(default)s")
    parser.add_argument("--engine", type=json_object, default={}, metavar="JSON",
                        help=f"more arguments of {arguments_of}, as a JSON object")
    parser.add_argument("--tolerance", type=at_least(0, float), default=0.25,
                        help="most difference of a logarithm; default: %(default)s")
    parser.add_argument("--timeout-s", type=at_least(1), default=3600,
                        help="seconds after which a contestant is stopped, and what it was at is "
                        "said; default: %(default)s")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    # Of the tests, whose engines are stand-ins.
    parser.add_argument("--no-gpu", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--contestant", help=argparse.SUPPRESS)  # this process is one
    parser.add_argument("--result", help=argparse.SUPPRESS)  # and writes its JSON here
    return parser


def check(parser, options):
    if not options.plugin:
        parser.error("--plugin, or MOXIE_PLUGIN of the environment, says which libmoxie.so")
    if options.contestant:  # has the model that was made
        return options
    if options.model and options.shape:
        parser.error("--shape is of the random model; --model has its own")
    if not options.model:
        options.shape = options.shape or SHAPE
        most = SHAPES[options.shape][1]["num_hidden_layers"]
        if options.layers > most:
            parser.error(f"--layers {options.layers}: {options.shape} has {most}")
    return options


def library_fault(plugin, bench):
    """Why a library cannot be loaded, or None."""
    sys.path.insert(1, str(ROOT / "hosts" / "python"))
    import moxie
    try:
        moxie.load(plugin, bench.name, "name a libmoxie.so with --plugin")
    except moxie.MoxieError as error:
        return f"moxie: {error}"
    return None


def sees_gpu():
    """Whether torch does, which takes seconds to load."""
    import torch
    return torch.cuda.is_available()


def check_here(bench, options):
    """CannotRun with every reason why no contestant could run here, before a model is made."""
    reasons = []
    if not options.no_gpu and not sees_gpu():
        reasons.append(f"torch sees no GPU, and {bench.name} measures on one: run it where "
                       "nvidia-smi lists one, with a torch that is built for CUDA")
    if importlib.util.find_spec(bench.key) is None:
        reasons.append(f"{bench.title} is not installed for {sys.executable}: install it there "
                       f"(pip install {bench.key}), or run {bench.name} with a Python that has it")
    reasons.append(library_fault(options.plugin, bench))
    if any(reasons):
        raise CannotRun("\n".join(filter(None, reasons)))


# ---- One contestant ----------------------------------------------------------------------------


def dummy_model(options, folder):
    """The folder of the random model without weights: all that an engine wants to make some."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    config = config_of(options.shape, options.layers)
    config.update({"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]],
                   "dtype": "bfloat16"})
    config.save_pretrained(folder)
    return folder


def prompt_tokens(tokens, number):
    """Different ones of every number, the same for every contestant."""
    return [(7919 * number + 104729 * place) % 30011 + 5 for place in range(tokens)]


def watch_gpu(worker):
    """From here on, in one of the engine's workers: what has all that this one needs."""
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


def timed(generate, watch, busy):
    """Seconds of each repeat, and those in which the GPU was busy.

    generate: everything that is timed. watch: watch_gpu in every worker. busy: gpu_busy_s of each.
    """
    found = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        generate()
        found.append(time.perf_counter() - start)
    watch()
    generate()
    return {"seconds": found[1:], "busy_s": max(busy())}


def source_of(plugin, bench):
    """The commit of the library that is measured."""
    import moxie
    return moxie.load(plugin, bench.name).source_id


# ---- The processes of a contestant -------------------------------------------------------------


def installed(folder, entry_points):
    """What pip leaves of moxie for an engine to find, in a folder of its own."""
    site = pathlib.Path(folder) / "site"
    described = site / "moxie-0.dist-info"
    described.mkdir(parents=True, exist_ok=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: moxie\nVersion: 0\n")
    (described / "entry_points.txt").write_text(entry_points)
    return str(site)


def environment_of(ours, options, folder, entry_points):
    """What a process of a contestant runs in. ours: Moxie is in it."""
    path = [str(ROOT / "hosts" / "python"), installed(folder, entry_points),
            str(ROOT / "bench" / "layer"), *filter(None, [os.environ.get("PYTHONPATH")])]
    shared = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(path),
              "PYTHONFAULTHANDLER": "1"}  # every process says where it is when it gets SIGABRT
    shared.pop("MOXIE_PLUGIN", None)
    if ours:
        named = options.plugin  # a path, or what the loader finds
        shared["MOXIE_PLUGIN"] = str(pathlib.Path(named).resolve()) if "/" in named else named
    return shared


def start(bench, name, options, arguments, environments):
    """The JSON of each process of a contestant, one for each environment."""
    folder = pathlib.Path(tempfile.mkdtemp(dir=options.folder))
    processes, logs, results = [], [], []
    for number, environment in enumerate(environments):
        logs.append(folder / f"{number}.log")
        results.append(folder / f"{number}.json")
        with logs[-1].open("w") as log:
            processes.append(subprocess.Popen(
                [sys.executable, bench.script, *arguments, "--plugin", options.plugin, "--model",
                 options.model, "--engine", json.dumps(options.engine), "--contestant", name,
                 "--result", str(results[-1])],
                env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True))
    codes = codes_of(processes, options.timeout_s)
    for code, log in zip(codes, logs):
        if code:
            raise CannotRun(f"{name}: its engine ended with {code}:\n{end_of(log, 40)}")
    if None in codes:
        raise CannotRun(f"{name}: had not ended after {options.timeout_s} s (--timeout-s):\n"
                        + "\n".join(end_of(log, 100) for log in logs))
    found = [json.loads(result.read_text()) for result in results]
    if name != bench.key and min(each["moxie_layers"] for each in found) == 0:
        raise CannotRun(
            f"Moxie computed no layer, so nothing was measured; {bench.title}'s log says of it:\n"
            + "\n".join(line for log in logs
                        for line in log.read_text(errors="replace").splitlines() if "oxie" in line))
    return found


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
    """A signal for a contestant's process and those that the engine has made."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass


# ---- All of them -------------------------------------------------------------------------------


def in_turns(names, rounds, run):
    """{name: what each of its runs found}, by turns A B B A."""
    runs = {name: [] for name in names}
    for number in range(rounds):
        for name in list(runs) if number % 2 == 0 else list(runs)[::-1]:
            runs[name].append(run(name))
    return runs


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


def rates(runs, options, ranks):
    """Tokens per second, of the median of all repeats, and a step's busy GPU; None without one."""
    def rate(tokens, steps, measured):
        seconds = statistics.median(each for run in measured for each in run["seconds"])
        busy = statistics.median(run["busy_s"] for run in measured)
        return {"tokens_per_second": round(tokens / seconds, 1),
                "gpu_ms_a_step": round(1e3 * busy / steps, 4) or None}

    return {"prefill": rate(ranks * options.prompt, 1, [run["prefill"] for run in runs]),
            "decode": {str(batch): rate(ranks * batch * options.steps, options.steps,
                                        [run["decode"][str(batch)] for run in runs])
                       for batch in options.batch}}


def measured(bench, options, arguments, runs, ranks=1):
    """The JSON of it all."""
    kept = [key for key in ("shape", "layers", "ranks", "prompt", "batch", "steps", "rounds",
                            "engine") if key in options]
    first = {name: each[0] for name, each in runs.items()}
    return {"command": " ".join([bench.name, *arguments]), "machine": machine(options),
            bench.key: first[bench.key]["version"], "moxie": first["moxie"]["moxie"],
            "moxie_layers": first["moxie"]["moxie_layers"],
            **{key: getattr(options, key) for key in kept},
            "quantization": options.quantization or quantization_of(options.model),
            "logprobs": {name: apart(each["said"], first[bench.key]["said"])
                         for name, each in first.items() if name != bench.key},
            "results": {name: rates(each, options, ranks) for name, each in runs.items()},
            "runs": [{"contestant": name, "ready_s": run["ready_s"], "prefill": run["prefill"],
                      "decode": run["decode"]} for name, each in runs.items() for run in each]}


def quantization_of(folder):
    """What the model of a folder says of its weights; None where it says nothing."""
    path = pathlib.Path(folder) / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    return config.get("quantization_config", {}).get("quant_method")


def machine(options):
    """The GPU's name, which torch sees, as check_here has found."""
    if options.no_gpu:
        return "no GPU"
    import torch
    return torch.cuda.get_device_name()


def report(bench, found):
    model = "".join(f", {each}" for each in (
        found["shape"], found["quantization"] or found["shape"] and "not quantised") if each)
    ranks = f", ranks: {found['ranks']}" if "ranks" in found else ""
    print(f"{found['machine']}, Moxie {found['moxie']}, {bench.title} {found[bench.key]}"
          f"{model}{ranks}")
    results = found["results"]
    rows = [(f"prefill of {found['prompt']}", [each["prefill"] for each in results.values()])]
    rows += [(f"decode, {batch}", [each["decode"][str(batch)] for each in results.values()])
             for batch in found["batch"]]
    wide = 14 * len(results)
    print(f"{'':20}{'tokens per second':>{wide}}{'GPU busy, ms a step':>{wide}}")
    print(f"{'':20}" + "".join(f"{name:>14}" for name in results) * 2)
    for name, cells in rows:
        print(f"{name:20}"
              + "".join(f"{each[key] or '-':>14}" for key in cells[0] for each in cells))
    for name, logs in found["logprobs"].items():
        most = "more than can be said" if logs["most"] is None else f"at most {logs['most']}"
        print(f"{name}: logarithms of probabilities differ by {most}, {logs['same_tokens']} of "
              f"{logs['tokens']} tokens are the same")


def main(bench, options, measure, run_contestant):
    """The exit code. measure: the JSON of all contestants, whose files go to options.folder.
    run_contestant: what one of them found."""
    if options.contestant:
        pathlib.Path(options.result).write_text(json.dumps(run_contestant(options)))
        return 0
    try:
        check_here(bench, options)
        with tempfile.TemporaryDirectory() as options.folder:
            found = measure(options)
    except (CannotRun, ImportError) as error:
        say(str(error))
        return 1
    show(found, options.json, lambda found: report(bench, found))
    return 3 if any(each["most"] is None or each["most"] > options.tolerance
                    for each in found["logprobs"].values()) else 0
