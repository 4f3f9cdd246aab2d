#!/usr/bin/env python3
"""Tokens per second of SGLang with Moxie's experts and with its own, on a GPU.

    bench/sglang.py --plugin build/release/lib/libmoxie.so --layers 8 --json

Each contestant is an engine in a process of its own, by turns A B B A. Without --model it has the
sizes of --shape and random weights that SGLang makes, which needs no disk. A prompt of --prompt
tokens is timed, and --steps greedy tokens of each of --batch short ones, three times each. A fourth
time a profiler in SGLang's scheduler says how long the GPU was busy, which no other tenant of the
host moves: engines of few layers wait for the host. What Moxie's engine says of the same prompts is
compared with what SGLang says, as far as their tokens agree. Over several GPUs --engine has
tp_size, and ep_size where each has whole experts. Progress goes to stderr. Exit code 1: cannot
measure here, or Moxie computed nothing, or a contestant had not ended after --timeout-s; 2: usage;
3: the logarithms of probabilities differ by more than --tolerance.

With data parallel attention, --engine '{"tp_size": 2, "dp_size": 2, "enable_dp_attention": true,
"ep_size": 2}', prompts and sequences are those of each rank. Moxie's dispatcher moves the rows, and
a third contestant is Moxie's experts with rows that SGLang gathers. A GPU that waits for the others
is busy; of all ranks the one that was least is shown.
"""

import argparse
import json
import pathlib
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
# In the place of this folder, in which sglang is this file.
sys.path[0] = str(ROOT / "bench" / "layer")

from measure import engines  # noqa: E402
from measure.command import say  # noqa: E402
from measure.engines import COMPARED_PROMPTS, COMPARED_TOKENS, prompt_tokens  # noqa: E402
from measure.sglang_worker import answers  # noqa: E402

BENCH = engines.Bench(__file__, "sglang", "SGLang")
ENTRY_POINTS = """[sglang.srt.plugins]
moxie = moxie.sglang_plugin:register
moxie-bench = measure.sglang_worker:register
"""
QUANTIZATIONS = {"fp8_per_block": {"quant_method": "fp8", "activation_scheme": "dynamic",
                                   "fmt": "e4m3", "weight_block_size": [128, 128]}}


def parse(arguments):
    parser = engines.parser_of(__doc__, BENCH, "SGLang's Engine")
    parser.add_argument("--quantization", choices=list(QUANTIZATIONS),
                        help="of the random model, with a scale for each 128 x 128 weights")
    options = engines.check(parser, parser.parse_args(arguments))
    if options.model and options.quantization and not options.contestant:
        parser.error("--quantization is of the random model; one of --model has its own")
    return options


# ---- One contestant ----------------------------------------------------------------------------


def make_engine(options):
    import sglang
    room = max(options.prompt, *COMPARED_PROMPTS) + max(options.steps, COMPARED_TOKENS)
    return sglang.Engine(**{
        "model_path": options.model, "skip_tokenizer_init": True, "context_length": room + 16,
        "disable_radix_cache": True, "chunked_prefill_size": max(8192, options.prompt),
        "log_level": "info", **options.engine})


def ranks_of(options):
    """How many there are with sequences of their own."""
    return options.engine.get("dp_size", 1) if options.engine.get("enable_dp_attention") else 1


def timed(engine, prompts, steps, asked, least):
    """Seconds of each repeat, and those in which the GPU was busy. asked: answers of a word. least:
    of the GPUs, the one that was so least, or most."""
    greedy = {"temperature": 0, "max_new_tokens": steps, "ignore_eos": True}
    return engines.timed(lambda: engine.generate(input_ids=prompts, sampling_params=greedy),
                         lambda: asked("watch"),
                         lambda: [min(asked("busy"))] if least else asked("busy"))


def said(engine, options):
    """[[token, {token: logarithm of its probability}] of each step] of each compared prompt."""
    greedy = {"temperature": 0, "max_new_tokens": COMPARED_TOKENS, "ignore_eos": True}
    prompts = [prompt_tokens(min(tokens, options.prompt), 1000 + number)
               for number, tokens in enumerate(COMPARED_PROMPTS)]
    found = engine.generate(input_ids=prompts, sampling_params=greedy, return_logprob=True,
                            top_logprobs_num=5)
    return [[[token, {int(each[1]): each[0] for each in entries}]
             for token, entries in zip(answer["output_ids"],
                                       answer["meta_info"]["output_top_logprobs"])]
            for answer in found]


def run_contestant(options):
    """Everything of one engine, for JSON."""
    import sglang
    start, ranks = time.perf_counter(), ranks_of(options)
    engine = make_engine(options)
    with tempfile.TemporaryDirectory() as folder:
        def asked(what):
            return answers(engine, what, folder, options.engine.get("tp_size", 1))

        if options.engine.get("load_format") == "dummy":
            asked("grow")
        found = {"version": sglang.__version__, "ready_s": round(time.perf_counter() - start, 1),
                 "said": said(engine, options),
                 "prefill": timed(engine, [prompt_tokens(options.prompt, number)
                                           for number in range(ranks)], 1, asked, ranks > 1),
                 "decode": {str(batch): timed(
                     engine, [prompt_tokens(16, number) for number in range(ranks * batch)],
                     options.steps, asked, ranks > 1) for batch in options.batch},
                 "moxie": engines.source_of(options.plugin, BENCH),
                 "moxie_layers": min(asked("layers"))}
    engine.shutdown()
    return found


# ---- All of them -------------------------------------------------------------------------------


def make_config(options, folder):
    """A model without weights, in the format that was asked for."""
    engines.dummy_model(options, folder)
    if options.quantization:
        path = pathlib.Path(folder) / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()),
                                    "quantization_config": QUANTIZATIONS[options.quantization]}))
    return folder


CONTESTANTS = {"moxie": {}, "sglang": {}}  # and what is in the engine's arguments of each
RANKS_CONTESTANTS = {"moxie": {"moe_a2a_backend": "flashinfer", "moe_runner_backend": "triton"},
                     "sglang": {}, "moxie-experts": {}}


def contestants(options):
    return RANKS_CONTESTANTS if ranks_of(options) > 1 else CONTESTANTS


def start(name, options, arguments):
    say(f"{name}: an engine starts")
    environment = engines.environment_of(name != "sglang", options, options.folder, ENTRY_POINTS)
    own = argparse.Namespace(**{**vars(options),
                                "engine": {**options.engine, **contestants(options)[name]}})
    return engines.start(BENCH, name, own, arguments, [environment])[0]


def measure(options, arguments):
    if not options.model:
        options.model = make_config(options, str(pathlib.Path(options.folder) / "model"))
        options.engine = {"load_format": "dummy", **options.engine}
    runs = engines.in_turns(contestants(options), options.rounds,
                            lambda name: start(name, options, arguments))
    return engines.measured(BENCH, options, arguments, runs, ranks_of(options))


def main(arguments):
    options = parse(arguments)
    return engines.main(BENCH, options, lambda options: measure(options, arguments), run_contestant)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
