"""moxie conform: whole libraries keep the contract, and planted faults break their rules and no other.

    MOXIE_COMMAND=build/dev/bin/moxie python3 test_conform.py passes PLUGIN [SKIPPED...]
    MOXIE_COMMAND=build/dev/bin/moxie python3 test_conform.py fault NAME PLUGIN
    MOXIE_COMMAND=build/dev/bin/moxie python3 test_conform.py usage PLUGIN [NAME...]
"""

import json
import os
import subprocess
import sys
import tempfile

COMMAND = os.environ["MOXIE_COMMAND"]
# Of one rule; a rule takes milliseconds, and a fault that hangs takes all of it.
DEADLINE_S = os.environ.get("MOXIE_DEADLINE_S", "20")
KEYS = ["name", "verdict", "where", "message"]

# The rules that the faults of a library break, and words of the place or message that says where.
FAULTS = {
    "null_slot": {"tables": "moxie_api.stats"},
    "null_dispatcher_slot": {"tables": "moxie_dispatcher_api.poll_error"},
    "wrong_version": {"version-stamp": "0.9"},
    "wrong_layout": {"layout-report": "offset"},
    "no_negotiation": {"negotiation": "host"},
    "ignored_tail": {"struct-sizes-in": "moxie_request with a newer field at offset"},
    "short_struct": {"struct-sizes-in": "moxie_request with struct_size", "struct-sizes-out": "moxie_probe with struct_size"},
    "dead_handle": {"dead-handles": "close of a dead instance"},
    "close_too_early": {"close-refused": "close, with a runner and a dispatcher"},
    "any_order": {"call-order": "after begin_forward"},
    "ignored_thread": {"thread-tags": "on a thread that thread_check refuses"},
    "init_at_once": {"creates-at-once": "by 4 threads at once"},
    "garbage_out": {"out-pointers": "open without get_i64"},
    "lost_error": {"capacity": "begin_forward of 17 tokens"},
    "empty_text": {"error-text": "the text is empty"},
    "unterminated_text": {"error-text": "the text has no end"},
    "text_overrun": {"error-text": "written at byte"},
    "write_on_refusal": {"bad-tensors": "of y was written", "capacity": "of y was written"},
    "wrong_type_taken": {"config-wrong-type": "no reason names"},
    "reads_again": {"config-snapshot": "read again"},
    "one_reason": {"validate-all-reasons": "no reason names"},
    "impure_plan": {"plan-pure": "plan of"},
    "reads_environment": {"plan-pure": "plan in another environment"},
    "asks_for_more": {"memory-planned": "buffer "},
    "leak": {"memory-freed": "bytes", "memory-failure": "bytes are held after the failure"},
    "double_release": {"memory-freed": "released, but not allocated"},
    "write_past_plan": {"memory-fences": "written at byte"},
    "allocation_in_forward": {"forward-allocates-nothing": "allocator"},
    "wrong_sum": {"plain-forward": "token 0 of 5"},
    "leaking_id": {"no-expert-ids": "id 4"},
    "negative_id": {"no-expert-ids": "id -1"},
    "ignored_tokens_valid": {"tokens-valid": "3 of 5 tokens valid"},
    "borrowed_shapes": {"call-order": "dimension 0 is -1", "halves": "dimension 0 is -1"},
    "wrong_order_of_halves": {"weight-layouts": "up before gate"},
    "empty_step_crash": {"zero-tokens": "begin_forward", "ranks-idle": "begin_forward"},
    "hang": {"plain-forward": "hung for"},
    "prints": {"silence": "printed"},
    "nothing_accepted": {"base-accepted": "none is accepted"},
    "one_host": {"struct-sizes-in": "moxie_request, 48 zero bytes longer",
                 **dict.fromkeys(["two-instances", "ranks-forward", "ranks-idle", "ranks-halves", "ranks-in-flight",
                                  "ranks-differ", "ranks-bootstrap", "host-reduces"], "load: it worked before")},
    "door": {"entry": "the second call answers differently",
             "probe": "reason is empty",
             "extension-names": "moxie.routing/999",
             "callbacks-required": "open without allocate, beside release",
             "callbacks-optional": "host.log is NULL",
             "config-absent": "no reason names hidden_size",
             "config-garbage": "killed by signal 6",
             "plan-agrees": "runner.create of a refused configuration",
             "log-lines": "its text holds a newline",
             "silence": "printed 17 bytes",
             "struct-sizes-in": "moxie_request with a newer field"},
    "numbers": {"weight-formats": "weights fp8_channel",
                "activations": "gelu, multiplied as f32",
                "number-formats": "router weights bf16",
                "router-weight-on-input": "with top_k 1, multiplied",
                "scaling-factor": "routed_scaling_factor 2.5, multiplied",
                "weights-updated": "weights have changed since create",
                "deterministic": "run 2 gave other bits"},
    "step": {"zero-tokens": "whose data are NULL",
             "call-order": "begin_forward after dispatch_send",
             "duplicate-ids": "token 0 of 5",
             "id-spaces": "id_space 0",
             "expert-map": "token 3 of 5",
             "strided-tensors": "token 0 of 5",
             "ranks-forward": "forward of 13 tokens",
             "halves": "dispatch, run, combine, against forward",
             "ranks-halves": "the halves, against forward",
             "ranks-in-flight": "two layers of slot 0",
             "receive-layouts": "rows without weights",
             "routing": "token 1, place 0: expert 11, want 3",
             "expand": "fold from layout 3"},
    "life": {"callbacks-required": "register_runner answers 5",
             "thread-tags": "run on a thread that thread_check refuses",
             "dead-handles": "run of a dead runner",
             "call-order": "combine of another y after dispatch_recv and run",
             "close-and-reload": "it worked before in this process, and now: no host can load it",
             "two-instances": "forward with the runner of another instance",
             "stats": "tokens grew by 0, after 10",
             "suspend": "resume, where suspend is UNSUPPORTED",
             "capture": "token 2, layer 0, place 1"},
    "ranks": {"ranks-forward": "of 4, allgather, forward of",
              "ranks-in-flight": "slot 1, with slot 0 between",
              "ranks-differ": "dispatcher.create: returned OK",
              "ranks-bootstrap": "dispatcher.create: returned OK",
              "host-reduces": "the sum of both ranks"},
}


def walk(plugin, *options, **variables):
    done = subprocess.run([COMMAND, "conform", "--plugin", plugin, "--json", *options], capture_output=True, text=True,
                          env={**os.environ, **variables})
    print(done.stderr)
    return done.returncode, json.loads(done.stdout)


def check(holds, text):
    if not holds:
        sys.exit(text)


def failures(document):
    return {rule["name"]: "%(where)s: %(message)s" % rule for rule in document["rules"] if rule["verdict"] == "fail"}


def passes(plugin, *skipped):
    code, document = walk(plugin)
    check(code == 0 and document["ok"] is True and document["plugin"] == plugin, failures(document))
    seen = {rule["name"] for rule in document["rules"] if rule["verdict"] == "skip"}
    check(seen == set(skipped), "skipped: %s, expected %s" % (seen, skipped))


def fault(name, plugin):
    expected = FAULTS[name]
    code, document = walk(plugin, "--deadline", "5" if name == "hang" else DEADLINE_S)
    seen = failures(document)
    check(code == 2 and document["ok"] is False, "exit code %d" % code)
    check(set(seen) == set(expected), "broken: %s, expected %s" % (seen, list(expected)))
    for rule, words in expected.items():
        check(words in seen[rule], "%s says %r, without %r" % (rule, seen[rule], words))
        print("%s: %s" % (rule, seen[rule]))


def usage(plugin, *libraries):
    rules = json.loads(subprocess.check_output([COMMAND, "conform", "--list", "--json"]))["rules"]
    names = {rule["name"] for rule in rules}
    check(len(rules) == len(names) > 30, "names of rules")
    unbroken = names.difference(*FAULTS.values())
    check(not unbroken, "no planted fault breaks %s: it may be unable to fail" % sorted(unbroken))
    odd = set(libraries) ^ set(FAULTS) if libraries else set()
    check(not odd, "either FAULTS or the build has no %s" % sorted(odd))
    code, document = walk(plugin, "--rule", "probe")
    check(code == 0 and [list(rule) for rule in document["rules"]] == [KEYS], document)
    with tempfile.NamedTemporaryFile(suffix=".so") as empty:
        code, document = walk(empty.name, "--rule", "entry")
        check(code == 2 and "dlopen" in failures(document)["entry"], document)
        code, document = walk(empty.name)
        check(list(failures(document)) == ["entry"], failures(document))
        folder, name = os.path.split(empty.name)
        code, document = walk(name, "--rule", "entry", LD_LIBRARY_PATH=folder)
        check(code == 2 and "too short" in failures(document)["entry"], document)
    for wrong in (["--rule", "nothing"], ["--deadline", "0"], ["argument"], ["--plugin", "/nonexistent.so"],
                  ["--plugin", "/nonexistent.so", "--json"], ["--plugin", "/nonexistent.so", "--rule", "entry"],
                  ["--plugin", "nonexistent.so"], ["--plugin", "nonexistent.so", "--rule", "probe"], ["--plugin", "/"], ["--plugin", ""], ["--trace"], ["--rule", "entry", "--rule", "probe"]):
        done = subprocess.run([COMMAND, "conform", "--plugin", plugin, *wrong], capture_output=True)
        check(done.returncode == 1 and done.stdout == b"" and done.stderr != b"", wrong)


if __name__ == "__main__":
    {"passes": passes, "fault": fault, "usage": usage}[sys.argv[1]](*sys.argv[2:])
