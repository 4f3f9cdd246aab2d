"""hosts/python/moxie/experts.py over several ranks, a process each, against sums in Python."""

import contextlib
import ctypes
import math
import multiprocessing
import os
import signal
import sys
import time
import traceback
import unittest

from test_python_experts import CONFIG, EXPERTS, HIDDEN, TOKENS_MAX, Input, Model

from moxie import Experts, MoxieError, abi, load

GATHER_BYTES = 1 << 16
WAIT_S = 30
DEAD = 3  # what a process says that ends on purpose


class Meeting:
    """What the ranks tell each other: a place for each in memory that all have."""

    def __init__(self, context, ranks):
        self.ranks, self.barrier = ranks, context.Barrier(ranks)
        self.places = context.Array(ctypes.c_uint8, ranks * GATHER_BYTES, lock=False)

    def all_gather(self, rank, data):
        view = memoryview(self.places).cast("B")
        view[rank * GATHER_BYTES:rank * GATHER_BYTES + len(data)] = data
        self.barrier.wait(WAIT_S)
        found = b"".join(bytes(view[each * GATHER_BYTES:each * GATHER_BYTES + len(data)])
                         for each in range(self.ranks))
        self.barrier.wait(WAIT_S)
        return found


class Rank:
    """A rank's part of a test: an Experts of its own, and layers of whole models."""

    def __init__(self, meeting, rank, **config):
        self.rank, self.ranks, self.meeting = rank, meeting.ranks, meeting
        self.config = {**CONFIG, "ep_size": self.ranks, "tp_size": self.ranks,
                       "dp_size": self.ranks, "ep_rank": rank, **config}
        self.experts = Experts(load(os.environ["MOXIE_PLUGIN"]), self.config,
                               all_gather=lambda data: meeting.all_gather(rank, data))

    def layer(self, model):
        return self.experts.add_layer(*model.part(self.rank, self.ranks).matrices())

    def forward(self, layer, model, tokens, seed=0, left_out=(), **more):
        """Compares a forward of some tokens with what the model gives; experts of ranks that are
        left out give nothing."""
        given = Input(tokens, seed=1000 * seed + self.rank, gap=self.rank)
        layer.forward(tokens, *given.rows(), **more)
        gone = {expert for rank in left_out for expert in range(EXPERTS) if
                expert // (EXPERTS // self.ranks) == rank}
        for token in range(tokens):
            ids = [expert if expert not in gone else -1 for expert in given.ids[2 * token:][:2]]
            row = given.x[token * given.pitch:][:HIDDEN]
            wanted = model.wanted(row, ids, given.weights[2 * token:][:2])
            seen = given.y[token * given.pitch:][:HIDDEN]
            assert all(math.isclose(*pair, rel_tol=1e-4, abs_tol=1e-5)
                       for pair in zip(seen, wanted)), (self.rank, token, seen, wanted)


@contextlib.contextmanager
def refused(code, text, rank=None):
    """As assertRaises: a MoxieError of this code, whose text has this in it, and whose rank."""
    try:
        yield
    except MoxieError as error:
        assert error.code == code and text in error.text, (error.code, error.text)
        assert rank is None or error.rank == rank, (error.rank, rank)
    else:
        raise AssertionError(f"nothing was refused; want {text!r}")


# ---- What each rank does -----------------------------------------------------------------------


def own_tokens(meeting, rank, dispatcher):
    """Each has another number of tokens in each forward, now and then none."""
    here, models = Rank(meeting, rank, dispatcher=dispatcher), (Model(1), Model(2, bias=True))
    layers, last = [here.layer(each) for each in models], meeting.ranks - 1
    steps = [[(step + each) % (TOKENS_MAX + 1) for each in range(meeting.ranks)]
             for step in range(4)]
    steps += [[0] * last + [2], [1] * last + [1], [1] * last + [TOKENS_MAX]]
    for step, everybody in enumerate(steps):
        for layer, model in zip(layers, models):
            for rank_tokens in (None, everybody):
                here.forward(layer, model, everybody[rank], step, rank_tokens=rank_tokens)
    for step, everybody in enumerate(steps):
        here.forward(layers[0], models[0], everybody[rank], step, rank_tokens=everybody)
    here.experts.check()


def too_many(meeting, rank):
    """All refuse alike, before anything moves, and go on."""
    here, model = Rank(meeting, rank), Model(3)
    layer = here.layer(model)
    with refused(abi.E_CAPACITY, f"step.tokens: {TOKENS_MAX + 1}"):
        here.forward(layer, model, TOKENS_MAX + 1)
    with refused(abi.E_INVALID, f"rank_tokens: 1 numbers; want one for each of {meeting.ranks}"):
        here.forward(layer, model, 1, rank_tokens=(1,))
    with refused(abi.E_INVALID, "rank_tokens"):
        here.forward(layer, model, 1, rank_tokens=("1",) * meeting.ranks)
    with refused(abi.E_INVALID, "step.rank_tokens"):
        here.forward(layer, model, 1, rank_tokens=(2,) * meeting.ranks)
    here.forward(layer, model, 1, rank_tokens=(1,) * meeting.ranks)
    others = [1 if each == rank else TOKENS_MAX + 1 for each in range(meeting.ranks)]
    with refused(abi.E_CAPACITY, "step.rank_tokens"):
        here.forward(layer, model, 1, rank_tokens=others)
    with refused(abi.E_INVALID, f"set_active_ranks: 1 ranks; want one truth value for each of "
                 f"{meeting.ranks}"):
        here.experts.set_active_ranks((True,))
    here.forward(layer, model, 2, rank_tokens=(2,) * meeting.ranks)


def unequal_rank_tokens(meeting, rank):
    """Who was told that no rank has as many says so; the other hears nothing, and starts again."""
    here, model = Rank(meeting, rank, timeout_ms=2000), Model(5)
    layer = here.layer(model)
    told, code, text = (((1, 1), abi.E_COLLECTIVE_MISMATCH, "rank 1 has sent 3 rows"),
                        ((1, 3), abi.E_PEER, "rank 0 sent no results"))[rank]
    with refused(code, text, 1 - rank):
        here.forward(layer, model, told[rank], rank_tokens=told)
    meeting.all_gather(rank, b" ")
    here.experts.set_active_ranks((True, True))
    here.forward(layer, model, 3 * rank, rank_tokens=(0, 3))


def one_dies(meeting, rank):
    """The others hear who, keep hearing it, and go on without."""
    here, model, last = Rank(meeting, rank, timeout_ms=2000), Model(4), meeting.ranks - 1
    layer = here.layer(model)
    here.forward(layer, model, 2)
    if rank == last:
        os._exit(DEAD)
    for ask in (lambda: here.forward(layer, model, 1), here.experts.check):
        with refused(abi.E_PEER, f"rank {last}", last):
            ask()
    here.experts.set_active_ranks(each != last for each in range(meeting.ranks))
    here.experts.check()
    here.forward(layer, model, 1, left_out=(last,))


def masks_that_differ(meeting, rank):
    """Rank 1 keeps the last one, which says nothing, and the others do not: all hear it at once."""
    here, model, last = Rank(meeting, rank, timeout_ms=60000), Model(7), meeting.ranks - 1
    layer = here.layer(model)
    here.forward(layer, model, 1)
    meeting.all_gather(rank, b" ")
    if rank < last:
        here.experts.set_active_ranks(rank == 1 or each < last for each in range(meeting.ranks))
        start = time.monotonic()
        with (refused(abi.E_PEER, f"rank {last} was left out by rank", last) if rank == 1 else
              refused(abi.E_COLLECTIVE_MISMATCH, "rank 1 goes on with the ranks 0xf", 1)):
            here.forward(layer, model, 1)
        assert time.monotonic() - start < WAIT_S / 2
    meeting.all_gather(rank, b" ")
    if rank < last:
        here.experts.set_active_ranks(each < last for each in range(meeting.ranks))
        here.forward(layer, model, 2, left_out=(last,))


def interrupted(meeting, rank):
    """What a signal's handler raises is not lost in the callback that logs who is silent."""
    class Interrupt(Exception):
        pass

    def handle(*_):
        raise Interrupt
    here, model = Rank(meeting, rank, timeout_ms=500), Model(6)
    layer = here.layer(model)
    here.forward(layer, model, 2)
    if rank == 0:
        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            here.forward(layer, model, 1)
        except Interrupt:
            pass
        else:
            raise AssertionError("the interrupt went unheard")
        with refused(abi.E_PEER, "rank 1 sent no rows", 1):
            here.experts.check()
    meeting.all_gather(rank, b" ")


def unequal_keys(meeting, rank):
    with refused(abi.E_COLLECTIVE_MISMATCH, "top_k"):
        Rank(meeting, rank, top_k=1 + rank)


def one_is_refused(meeting, rank):
    """The others hear from create, and need not wait for an all_gather that never comes."""
    code, text = ((abi.E_UNAVAILABLE, "rank 1 failed with CONFIG"),
                  (abi.E_CONFIG, "device_memory_budget_bytes"))[rank]
    with refused(code, text):
        Rank(meeting, rank, **({"device_memory_budget_bytes": 1000} if rank == 1 else {}))
    meeting.all_gather(rank, b" ")


def no_answer(meeting, rank):
    """What all_gather raises is the cause; what it returns is looked at."""
    def make(all_gather):
        Experts(load(os.environ["MOXIE_PLUGIN"]), {
            **CONFIG, "ep_size": 2, "tp_size": 2, "dp_size": 2, "ep_rank": rank},
            all_gather=all_gather)

    def raising(data):
        raise OSError("the others cannot be reached")
    for all_gather, code, text in ((raising, abi.E_UNAVAILABLE, "all_gather"),
                                   (lambda data: data, abi.E_INVALID, "want those of all")):
        with refused(code, text):
            try:
                make(all_gather)
            except MoxieError as error:
                assert all_gather is not raising or isinstance(error.__cause__, OSError), error
                raise

    def ending(data):
        sys.exit(3)
    try:
        make(ending)
    except SystemExit as ended:
        assert ended.code == 3 and isinstance(ended.__cause__, MoxieError), ended
    else:
        raise AssertionError("sys.exit went unheard")


# ---- The tests ---------------------------------------------------------------------------------


def work(meeting, rank, told, test, given):
    """The whole of a process."""
    text = ""
    try:
        test(meeting, rank, *given)
    except BaseException:
        text = traceback.format_exc()
    told.put((rank, text))


class Ranks(unittest.TestCase):
    def run_ranks(self, test, *given, ranks=2, dead=()):
        context = multiprocessing.get_context("spawn")
        meeting, told = Meeting(context, ranks), context.Queue()
        everybody = [context.Process(target=work, args=(meeting, rank, told, test, given))
                     for rank in range(ranks)]
        for each in everybody:
            each.start()
        try:
            failures = [told.get(timeout=WAIT_S) for _ in range(ranks - len(dead))]
            for rank, each in enumerate(everybody):
                each.join(WAIT_S)
                self.assertEqual(each.exitcode, DEAD if rank in dead else 0)
            self.assertEqual([text for _, text in failures if text], [])
        finally:
            for each in everybody:
                each.kill()

    def test_tokens_of_their_own(self):
        for dispatcher, ranks in (("alltoall", 4), ("allgather", 2)):
            with self.subTest(dispatcher=dispatcher):
                self.run_ranks(own_tokens, dispatcher, ranks=ranks)

    def test_more_than_planned(self):
        self.run_ranks(too_many)

    def test_rank_tokens_that_differ(self):
        self.run_ranks(unequal_rank_tokens)

    def test_one_dies(self):
        self.run_ranks(one_dies, ranks=4, dead=(3,))

    def test_masks_that_differ(self):
        self.run_ranks(masks_that_differ, ranks=4)

    def test_a_signal_while_one_is_silent(self):
        self.run_ranks(interrupted)

    def test_keys_that_differ(self):
        self.run_ranks(unequal_keys)

    def test_one_is_refused(self):
        self.run_ranks(one_is_refused)

    def test_an_all_gather_that_fails(self):
        self.run_ranks(no_answer)


if __name__ == "__main__":
    sys.exit(unittest.main())
