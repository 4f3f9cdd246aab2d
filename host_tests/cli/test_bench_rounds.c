// Rounds without experts on the fake driver: what is captured, what the halves take, what a wrong
// output is told by, and that nothing is left when any call fails.

#include "hosts/cli/bench_check.h"
#include "hosts/cli/rank.h"
#include "hosts/cli/router.h"

#include "host_tests/cli/bench_fakes.h"
#include "host_tests/suite.h"

#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define HIDDEN 16
#define TOKENS 3
#define TOP_K  2

static struct fake_cuda fake;
static struct fake_nvtx ranges;
static struct {
    const char *failing; // the call that fails
    int runners, expands, folds, rounds;
    int step; // calls of this round so far
    int forgets_a_pair;
    const char *wire;
    moxie_slab slab;
    moxie_rows rows;
} library;

// ---- The library: one rank, whose rows come from itself ----------------------------------------

struct work {
    const uint16_t *x;
    uint16_t *y;
};

static uint16_t to_bf16(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)(bits >> 16);
}

static void add_up(const void *arg)
{
    const struct work *work = arg;
    float x[HIDDEN];

    for (int token = 0; token < TOKENS; token++) {
        widen(work->x + token * HIDDEN, MOXIE_FORMAT_BF16, HIDDEN, x);
        for (int i = 0; i < HIDDEN; i++)
            work->y[token * HIDDEN + i] = to_bf16((float)(TOP_K - library.forgets_a_pair) * x[i]);
    }
}

static int32_t answer(const char *call, int step, moxie_error *error)
{
    ck_assert_msg(library.step == step, "%s as call %d of a round", call, library.step);
    library.step++;
    if (library.failing == NULL || strcmp(library.failing, call) != 0) return MOXIE_OK;
    (void)strncpy(error->text, "the planted failure", error->text_bytes - 1);
    return MOXIE_E_DEVICE;
}

static int32_t begin_forward(moxie_dispatcher *dispatcher, const moxie_step *step,
                             moxie_error *error)
{
    (void)dispatcher;
    ck_assert_int_eq(step->tokens, TOKENS);
    library.step = 0;
    library.rounds++;
    return answer("begin_forward", 0, error);
}

static int32_t dispatch_send(moxie_dispatcher *dispatcher, const moxie_batch *batch,
                             moxie_error *error)
{
    (void)dispatcher;
    library.slab = (moxie_slab){.struct_size = sizeof library.slab, .rows = batch->x};
    library.rows = (moxie_rows){
        .struct_size = sizeof library.rows,
        .layout = MOXIE_LAYOUT_RANK_MAJOR,
        .slabs_count = 1,
        .slab_stride = sizeof library.slab,
        .slabs = &library.slab,
    };
    return answer("dispatch_send", 1, error);
}

static int32_t dispatch_recv(moxie_dispatcher *dispatcher, const moxie_batch *batch,
                             const moxie_rows **in, const moxie_rows **out, moxie_error *error)
{
    (void)dispatcher;
    (void)batch;
    *in = *out = &library.rows;
    return answer("dispatch_recv", 2, error);
}

static int32_t expand(moxie_runner *runner, const moxie_call *call, const moxie_rows *in,
                      const moxie_rows *out, const moxie_tensor *row_index, moxie_error *error)
{
    (void)error;
    ck_assert_ptr_nonnull(runner);
    ck_assert_ptr_nonnull(call->stream);
    ck_assert_ptr_eq(in->slabs->rows.data, library.slab.rows.data);
    ck_assert_int_eq(out->slabs->rows.shape[0], TOKENS * TOP_K);
    ck_assert_int_eq(row_index->shape[0], TOKENS);
    library.expands++;
    return library.failing != NULL && strcmp(library.failing, "expand") == 0 ? MOXIE_E_DEVICE
                                                                             : MOXIE_OK;
}

static int32_t fold(moxie_runner *runner, const moxie_call *call, const moxie_rows *expanded,
                    const moxie_tensor *row_index, const moxie_rows *out, moxie_error *error)
{
    (void)runner;
    (void)call;
    (void)row_index;
    ck_assert_int_eq(expanded->layout, MOXIE_LAYOUT_EXPERT_CONTIGUOUS);
    ck_assert_ptr_eq(out, &library.rows);
    library.folds++;
    return answer("fold", 3, error);
}

static int32_t combine_send(moxie_dispatcher *dispatcher, const moxie_batch *batch,
                            moxie_error *error)
{
    (void)dispatcher;
    (void)batch;
    return answer("combine_send", 4, error);
}

static int32_t combine_recv(moxie_dispatcher *dispatcher, const moxie_batch *batch,
                            moxie_error *error)
{
    struct work work = {.x = batch->x.data, .y = batch->y.data};

    (void)dispatcher;
    fake.launch(add_up, &work, sizeof work);
    return answer("combine_recv", 5, error);
}

static int32_t create_runner(moxie_instance *instance, int32_t layer, const moxie_weights *weights,
                             moxie_runner **out, moxie_error *error)
{
    (void)instance;
    (void)layer;
    (void)weights;
    (void)error;
    library.runners++;
    *out = (moxie_runner *)(void *)&library;
    return MOXIE_OK;
}

static void destroy_runner(moxie_runner *runner)
{
    library.runners -= runner != NULL;
}

static int32_t create_dispatcher(moxie_instance *instance, moxie_dispatcher **out,
                                 moxie_error *error)
{
    (void)error;
    *out = (moxie_dispatcher *)(void *)instance;
    return MOXIE_OK;
}

static int32_t config(const moxie_instance *instance, uint64_t index, moxie_config_entry *entry)
{
    (void)instance;
    if (index > 0) return MOXIE_E_INVALID;
    entry->key = "dispatch_format";
    entry->value = library.wire;
    return MOXIE_OK;
}

static const moxie_expand_api expand_api = {
    .struct_size = sizeof expand_api, .expand = expand, .fold = fold};

static const void *get_extension(const char *name)
{
    if (library.failing != NULL && strcmp(library.failing, "get_extension") == 0) return NULL;
    return strcmp(name, MOXIE_EXPAND_EXTENSION) == 0 ? &expand_api : NULL;
}

static const moxie_runner_api runner_api = {
    .struct_size = sizeof runner_api, .create = create_runner, .destroy = destroy_runner};
static const moxie_dispatcher_api dispatcher_api = {.struct_size = sizeof dispatcher_api,
                                                    .create = create_dispatcher,
                                                    .begin_forward = begin_forward,
                                                    .dispatch_send = dispatch_send,
                                                    .dispatch_recv = dispatch_recv,
                                                    .combine_send = combine_send,
                                                    .combine_recv = combine_recv};
static const moxie_runner_info runner_info = {
    .struct_size = sizeof runner_info, .name = "none", .device = "sm_90", .api = &runner_api};
static const moxie_dispatcher_info dispatcher_info = {.struct_size = sizeof dispatcher_info,
                                                      .name = "itself",
                                                      .device = "sm_90",
                                                      .api = &dispatcher_api};
static const moxie_api api = {
    .struct_size = sizeof api, .get_extension = get_extension, .config = config};

// ---- The bench ---------------------------------------------------------------------------------

// What rank 0 reports of its cell, in `told`.
static int bench(int op, char *told, size_t told_bytes, struct fault *fault)
{
    const struct bench_job job = {
        .shape = {HIDDEN, HIDDEN, 4, TOP_K},
        .format = MOXIE_FORMAT_BF16,
        .row_format = MOXIE_FORMAT_BF16,
        .tokens_max = TOKENS,
        .op = op,
        .replays = 2,
        .delay_us = 20,
        .cells = 1,
        .tokens = {TOKENS},
    };
    const moxie_bounds bounds = {
        .struct_size = sizeof bounds, .experts_local = 4, .dispatch_tokens = TOKENS};
    const moxie_plan plan = {.struct_size = sizeof plan, .bounds = &bounds};
    struct link link = {.ranks = 1, .silence_ms = 10000, .told_ns = INT64_MAX};
    struct rank rank = {
        .link = &link,
        .instance = {.api = &api, .plan = &plan},
        .runner_info = &runner_info,
        .dispatcher_info = &dispatcher_info,
    };
    int ends[2];
    int st = EXIT_OK;

    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    link.descriptor = ends[0];
    library.expands = library.folds = library.rounds = 0;
    TRY(device_open(&rank.device, "sm_90", 0, fault));
    TRY(bench_graphs(&rank, &job, fault));
    memset(told, 0, told_bytes);
    ck_assert_int_gt(recv(ends[1], told, told_bytes - 1, MSG_DONTWAIT), 16);
    memmove(told, told + 16, told_bytes - 16); // the header
out:
    ck_assert_int_eq(library.runners, 0);
    ck_assert_int_eq(ranges.depth(), 0);
    (void)close(ends[0]);
    (void)close(ends[1]);
    return device_finish(&rank.device, st, fault);
}

// [time_us, spread_us, rows, sent, came, event_us] of the first replay. Two events of the fake are
// 200 ms apart, and 100 more where a task of the graph is between them: combine has one.
static void expect_first_sample(const char *told, double time_us, double event_us)
{
    json_t *result = json_loads(told, JSON_DISABLE_EOF_CHECK, NULL);
    const json_t *samples = json_object_get(result, "samples");
    const json_t *first = json_array_get(samples, 0);

    ck_assert_uint_eq(json_array_size(samples), 2);
    ck_assert_double_eq_tol(json_number_value(json_array_get(first, 0)), time_us, 1);
    ck_assert_double_eq_tol(json_number_value(json_array_get(first, 1)), 0, 1e-9);
    ck_assert_double_eq_tol(json_number_value(json_array_get(first, 5)), event_us, 1);
    json_decref(result);
}

START_TEST(halves_are_timed_inside_the_graph)
{
    struct fault fault = {.text = ""};
    char told[4096];

    for (int op = BENCH_DISPATCH; op <= BENCH_BOTH; op++) {
        static const double wanted_us[] = {0, 200e3, 300e3, 200e3 / BENCH_FORWARDS};
        int halves = op != BENCH_BOTH;

        fake.reset();
        ck_assert_msg(bench(op, told, sizeof told, &fault) == EXIT_OK, "%s", fault.text);
        ck_assert_int_eq(fake.live(), 0);
        // At once, and into the two graphs: only the first two expand.
        ck_assert_int_eq(library.rounds, 3 * BENCH_FORWARDS);
        ck_assert_int_eq(library.expands, 2 * BENCH_FORWARDS);
        ck_assert_int_eq(library.folds, 3 * BENCH_FORWARDS);
        ck_assert_int_eq(fake.calls("cuEventRecordWithFlags"), halves ? 2 + 3 * BENCH_FORWARDS : 0);
        ck_assert_int_eq(fake.calls("cuGraphLaunch"), 2 * 3);
        expect_first_sample(told, wanted_us[op], halves ? 200e3 : 0);
    }
}
END_TEST

START_TEST(a_forgotten_pair_is_found)
{
    struct fault fault = {.text = ""};
    char told[4096];

    library.forgets_a_pair = 1;
    ck_assert_int_eq(bench(BENCH_BOTH, told, sizeof told, &fault), EXIT_TOLERANCE);
    ck_assert_msg(strstr(fault.text, "relative error is 5.000e-01; at most 2e-02") != NULL, "%s",
                  fault.text);
    ck_assert_int_eq(fake.live(), 0);
}
END_TEST

static int bench_combine(struct fault *fault)
{
    char told[4096];

    return bench(BENCH_COMBINE, told, sizeof told, fault);
}

START_TEST(every_call_may_fail)
{
    static const char *const calls[] = {"begin_forward", "dispatch_send", "dispatch_recv", "expand",
                                        "fold",          "combine_send",  "combine_recv"};
    static const char *const driver[] = {"cuEventRecordWithFlags", "cuEventElapsedTime",
                                         "cuEventCreate",          "cuMemAlloc_v2",
                                         "cuMemGetInfo_v2",        "cuMemcpyDtoDAsync_v2",
                                         "cuMemsetD8Async",        "cuGraphInstantiateWithFlags"};
    struct fault fault = {.text = ""};

    library.wire = "fp8_block128";
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        library.failing = calls[i];
        ck_assert_int_eq(bench_combine(&fault), EXIT_TROUBLE);
        ck_assert_msg(strstr(fault.text, calls[i]) != NULL, "%s", fault.text);
        ck_assert_int_eq(fake.live(), 0);
    }
    library.failing = "get_extension";
    ck_assert_int_eq(bench_combine(&fault), EXIT_REFUSED);
    ck_assert_msg(strstr(fault.text, "--op combine") != NULL, "%s", fault.text);
    library.failing = NULL;
    bench_break_calls(&fake, driver, sizeof driver / sizeof driver[0], 16, bench_combine);
}
END_TEST

static void set_up(void)
{
    bench_fakes_find(&fake, &ranges);
    library.wire = "input";
}

static void add_tests(TCase *tests)
{
    tcase_add_checked_fixture(tests, set_up, NULL);
    tcase_add_test(tests, halves_are_timed_inside_the_graph);
    tcase_add_test(tests, a_forgotten_pair_is_found);
    tcase_add_test(tests, every_call_may_fail);
}

SUITE_MAIN("cli_bench_rounds", 120, add_tests)
