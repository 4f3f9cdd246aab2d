#!/usr/bin/env python3
"""Tokens per second of a randomly initialised model with experts_implementation moxie and others.

    bench/transformers.py --shape qwen3-30b-a3b --device cuda --graph --plugin libmoxie.so --json

First the logits of every contestant are compared with those of the first named in --against, whose
routes all take: a rounding that sends a token to another expert is nobody's error. Then prefill and
decode are timed in rounds of A B B A, so that a machine that slows down slows all. Progress goes to
stderr. Exit code 1: Moxie cannot run here; 2: usage; 3: Moxie's logits differ by more than
--tolerance, or are no numbers.
"""

import argparse
import contextlib
import os
import pathlib
import statistics
import sys
import time

# In the place of this folder, in which transformers is this file.
sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent / "hosts" / "python")
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parent / "layer"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import AutoConfig, StaticCache  # noqa: E402
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: E402

import moxie.transformers as adapter  # noqa: E402
from measure import numbers  # noqa: E402
from measure.command import (  # noqa: E402
    CannotRun, at_least, named_path, processor, say, show, words)
from measure.models import SHAPES, config_of, random_model  # noqa: E402
from moxie import MoxieError  # noqa: E402

def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="default: %(default)s")
    parser.add_argument("--config", help="a config.json instead of --shape")
    parser.add_argument("--layers", type=at_least(0),
                        help="layers instead of the model's own; 0: its own")
    others = sorted({"eager", *ALL_EXPERTS_FUNCTIONS} - {"moxie"})
    parser.add_argument("--against", type=words(others), default="eager,grouped_mm",
                        help="other implementations, the first of which has the logits that count; "
                        "default: %(default)s")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: the first "
                        "of CUDA_VISIBLE_DEVICES; default: %(default)s")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--batch", type=at_least(1), default=1,
                        help="sequences; default: %(default)s")
    parser.add_argument("--prompt", type=at_least(1), default=512,
                        help="tokens of each sequence; default: %(default)s")
    parser.add_argument("--steps", type=at_least(1), default=32,
                        help="tokens decoded after it; default: %(default)s")
    parser.add_argument("--rounds", type=at_least(1), default=3,
                        help="rounds of A B B A; default: %(default)s")
    parser.add_argument("--graph", action="store_true",
                        help="decode by replaying a captured CUDA graph")
    parser.add_argument("--tolerance", type=at_least(0, float), default=5e-2,
                        help="most relative difference of the logits; default: %(default)s")
    parser.add_argument("--threads", type=at_least(1, most=1024),
                        help="of torch and Moxie, on the CPU")
    parser.add_argument("--forward-tokens-max", type=at_least(1),
                        help="Moxie's bound of one call")
    parser.add_argument("--plugin", type=named_path,
                        help="libmoxie.so; default: MOXIE_PLUGIN of the environment")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args(arguments)
    if options.graph and options.device == "cpu":
        parser.error("--graph needs --device cuda")
    try:
        options.model_config = make_config(options)
    except (OSError, ValueError) as error:  # what transformers has for files and for their text
        what = "" if not options.config or pathlib.Path(options.config).exists() else (
            "there is no such file or folder, and as the name of a model: ")
        parser.error(f"--config {options.config}: {what}{error}")
    if type(options.model_config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        parser.error(f"--config {options.config}: transformers has no causal language model of "
                     f"{type(options.model_config).__name__}; its text_config may be one")
    return options


def make_config(options):
    """The model's, of as many layers as were asked for."""
    if not options.config:
        return config_of(options.shape, options.layers)
    cut = {"num_hidden_layers": options.layers} if options.layers else {}
    return AutoConfig.from_pretrained(options.config, **cut)


class Contestant:
    """One implementation on the model that all of them share."""

    def __init__(self, name, model, options):
        self.name, self.model, self.options = name, model, options
        self.cache, self.graph, self.token, self.failure = None, None, None, None
        self.seconds = {"prefill": [], "decode": []}

    def choose(self):
        self.model.set_experts_implementation(self.name)

    def logits(self, prompt):
        self.choose()
        try:
            return self.model(prompt, use_cache=False).logits
        except ImportError as error:
            raise CannotRun(f"{self.name} cannot run here: {error}") from error

    def synchronise(self):
        if self.options.device != "cpu":
            torch.cuda.synchronize()

    def step(self):
        """One token of every sequence, into where the next step reads it."""
        out = self.model(self.token, past_key_values=self.cache, use_cache=True)
        self.token.copy_(out.logits[:, -1:].argmax(-1))

    def prefill(self, prompt):
        if self.cache is None:
            room = prompt.shape[1] + self.options.steps + 4  # of the steps before a capture
            self.cache = StaticCache(config=self.model.config, max_cache_len=room)
        else:
            self.cache.reset()
        out = self.model(prompt, past_key_values=self.cache, use_cache=True)
        token = out.logits[:, -1:].argmax(-1)
        if self.token is None:
            self.token = token
        else:
            self.token.copy_(token)

    def capture(self, prompt):
        """One step as a graph; what cannot be captured is timed without, and the reason kept."""
        self.prefill(prompt)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.step()
            self.graph = graph
        except RuntimeError as error:
            self.failure = str(error).splitlines()[0]
            say(f"{self.name}: no graph: {self.failure}")
            torch.cuda.synchronize()

    def warm_up(self, prompt):
        self.choose()
        self.prefill(prompt)
        self.step()
        if self.options.graph:
            self.capture(prompt)
        self.synchronise()

    def race(self, prompt):
        self.choose()
        self.synchronise()
        start = time.perf_counter()
        self.prefill(prompt)
        self.synchronise()
        middle = time.perf_counter()
        advance = self.graph.replay if self.graph else self.step
        for _ in range(self.options.steps):
            advance()
        self.synchronise()
        self.seconds["prefill"].append(middle - start)
        self.seconds["decode"].append(time.perf_counter() - middle)

    def result(self):
        tokens = {"prefill": self.options.batch * self.options.prompt,
                  "decode": self.options.batch * self.options.steps}
        found = {"implementation": self.name, "graph": self.graph is not None}
        if self.failure:
            found["no_graph_because"] = self.failure
        for part, seconds in self.seconds.items():
            found[part] = {"tokens_per_second": round(tokens[part] / statistics.median(seconds), 1),
                           "most": round(tokens[part] / min(seconds), 1),
                           "least": round(tokens[part] / max(seconds), 1)}
        return found


@contextlib.contextmanager
def routed_as(model, routes):
    """Writes into `routes` where each layer's tokens go, or has them go where it says."""
    empty = not routes

    def hook(number):
        def note(_, args):
            x, ids, weights = args
            if empty:
                routes.append((ids, weights))
                return args
            return x, routes[number][0], routes[number][1].to(weights.dtype)
        return note

    hooks = [model.get_submodule(name).register_forward_pre_hook(hook(number))
             for number, name in enumerate(adapter.describe(model))]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


def compare(contestants, prompt):
    """{name: relative difference of the whole, of the median token} from the first but Moxie, whose
    routes all take; None where a logit is no number."""
    model, routes, found = contestants[0].model, [], {}
    with routed_as(model, routes):
        wanted = contestants[1].logits(prompt).float()
    for contestant in contestants:
        with routed_as(model, routes):
            apart = contestant.logits(prompt).float() - wanted
        whole = (apart.norm() / wanted.norm()).item()
        median = (apart.norm(dim=-1) / wanted.norm(dim=-1)).median().item()
        found[contestant.name] = {"whole": numbers.finite(whole),
                                  "median_token": numbers.finite(median)}
        say(f"logits of {contestant.name}: {whole:.2e} from those of {contestants[1].name}, "
            f"the median token's {median:.2e}")
    return found


def describe(options):
    """Where and of what the numbers are."""
    if options.device == "cpu":
        machine = f"{processor()}, {torch.get_num_threads()} threads"
    else:
        machine = torch.cuda.get_device_name()
    layers = options.model_config.get_text_config().num_hidden_layers
    kept = ("shape", "config", "dtype", "batch", "prompt", "steps", "rounds", "graph",
            "forward_tokens_max")
    return {"machine": machine, "torch": torch.__version__,
            "transformers": transformers.__version__,
            "command": " ".join(["bench/transformers.py", *sys.argv[1:]]),
            **{key: value for key, value in vars(options).items() if key in kept},
            "layers": layers}


def report(found):
    print(f"{found['machine']}, torch {found['torch']}, transformers {found['transformers']}")
    print(f"{'':12} {'prefill tokens/s':>24} {'decode tokens/s':>24}")
    for each in found["results"]:
        cells = [f"{each[part]['tokens_per_second']} ({each[part]['least']}..{each[part]['most']})"
                 for part in ("prefill", "decode")]
        print(f"{each['implementation']:12} {cells[0]:>24} {cells[1]:>24}"
              f"{'  graph' if each['graph'] else ''}")


def check_that_moxie_ran(contestant):
    """A model that lets nobody choose runs the same code under every name."""
    contestant.choose()
    ran = adapter.describe(contestant.model)
    layers = contestant.model.config.get_text_config().num_hidden_layers
    if not ran or adapter.NOT_PREPARED in ran.values():
        raise CannotRun(f"Moxie ran none or not all of this {contestant.model.config.model_type} "
                        f"of {layers} layers, so nothing was measured: its experts are "
                        f"{ran or 'none'}; of models with dense layers first, take more --layers")


def measure(options):
    """Everything, as the JSON has it."""
    adapter.configure(plugin=options.plugin, forward_tokens_max=options.forward_tokens_max)
    adapter._library()  # a model takes minutes, and the first forward would be the first to miss it
    say("making the model")
    with torch.no_grad():
        model = random_model(options.model_config, options.device, options.dtype).eval()
        names = ["moxie", *options.against]
        contestants = [Contestant(name, model, options) for name in names]
        prompt = torch.randint(0, model.config.get_text_config().vocab_size,
                               (options.batch, options.prompt), device=options.device)
        found = describe(options)
        found["logits"] = compare(contestants, prompt)
        check_that_moxie_ran(contestants[0])
        for contestant in contestants:
            say(f"warming up {contestant.name}")
            contestant.warm_up(prompt)
        for number in range(options.rounds):
            say(f"round {number + 1} of {options.rounds}")
            for contestant in contestants + contestants[::-1]:
                contestant.race(prompt)
    found["results"] = [contestant.result() for contestant in contestants]
    return found


def main(arguments):
    options = parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        say("torch sees no GPU; --device cpu runs this without one")
        return 1
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        found = measure(options)
    except MoxieError as error:
        say(f"moxie: {error}")
        return 1
    except CannotRun as error:
        say(str(error))
        return 1
    show(found, options.json, report)
    apart = found["logits"]["moxie"]["whole"]
    return 0 if apart is not None and apart <= options.tolerance else 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
