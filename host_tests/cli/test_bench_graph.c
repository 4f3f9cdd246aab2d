// The bench on a device with graphs: the fake driver, and a library of plain loops whose forwards
// are recorded and replayed as kernels are. What it says of a wrong output, and that nothing is
// left when any call fails.

#include "hosts/cli/bench_check.h"
#include "hosts/cli/conform_numbers.h"
#include "hosts/cli/rank.h"
#include "hosts/cli/router.h"

#include "host_tests/cli/bench_fakes.h"
#include "host_tests/suite.h"

#include <math.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define LAYER_SIZE_MAX 144

enum mistake {
    NO_MISTAKE,
    LAST_TOKEN_UNWRITTEN,
    MIDDLE_TOKEN_UNWRITTEN,
    WRONG_SUM,
    NINE_PERCENT,
    ELEVEN_PERCENT,
    ONE_RUN_OF_BLOCKS, // those of up follow gate's rows, not gate's blocks
    ONE_COLUMN_OF_BLOCKS,
    ZERO_WEIGHTS, // an output of zero, as the reference then is
};

static struct fake_cuda fake;
static struct fake_nvtx ranges;
static struct {
    enum mistake mistake;
    int runners, forwards, failing_forward;
    int64_t tokens; // of the step
    uint64_t routings[1024];
    int routings_count; // different ones that were computed
} library;

// ---- The library -------------------------------------------------------------------------------

struct matrix {
    const void *values;
    const float *scales;
    int32_t format;
    int64_t rows, inputs, half_rows;   // of an expert; of gate or up
    int64_t scale_rows, scale_columns; // of an expert
};

// A runner and a forward in one: what a launch copies.
struct work {
    struct matrix w1, w2;
    const uint16_t *x;
    const int32_t *ids;
    const float *weights;
    uint16_t *y;
    int64_t tokens, hidden, intermediate, top_k;
};

static struct matrix read_matrix(const moxie_matrix *matrix)
{
    const moxie_tensor *values = &matrix->values, *scales = &matrix->scales;
    int64_t halves = matrix->order == MOXIE_ORDER_PLAIN ? 1 : 2;

    ck_assert_int_eq(values->device.type, MOXIE_DEVICE_CUDA);
    return (struct matrix){
        .values = values->data,
        .scales = scales->data,
        .format = matrix->format,
        .rows = values->shape[1],
        .inputs = values->shape[2],
        .half_rows = values->shape[1] / halves,
        .scale_rows = scales->ndim > 1 ? scales->shape[1] : 1,
        .scale_columns = scales->ndim > 2 ? scales->shape[2] : 1,
    };
}

static float scale_of(const struct matrix *matrix, int64_t expert, int64_t row, int64_t column)
{
    int64_t half = row / matrix->half_rows;
    int64_t scale_row = half;
    int64_t scale_column = 0;

    if (matrix->format == MOXIE_FORMAT_FP8_CHANNEL) scale_row = row;
    if (matrix->format == MOXIE_FORMAT_FP8_BLOCK128) {
        int64_t halves = matrix->rows / matrix->half_rows;

        scale_row = half * (matrix->scale_rows / halves) + (row - half * matrix->half_rows) / 128;
        if (library.mistake == ONE_RUN_OF_BLOCKS) scale_row = row / 128;
        if (library.mistake != ONE_COLUMN_OF_BLOCKS) scale_column = column / 128;
    }
    return matrix
        ->scales[(expert * matrix->scale_rows + scale_row) * matrix->scale_columns + scale_column];
}

static float read_bf16(const uint16_t *number)
{
    float wide;

    widen(number, MOXIE_FORMAT_BF16, 1, &wide);
    return wide;
}

static float weight(const struct matrix *matrix, int64_t expert, int64_t row, int64_t column)
{
    int64_t at = (expert * matrix->rows + row) * matrix->inputs + column;

    if (matrix->format == MOXIE_FORMAT_BF16)
        return read_bf16((const uint16_t *)matrix->values + at);
    return (float)decode_e4m3(((const uint8_t *)matrix->values)[at]) *
           scale_of(matrix, expert, row, column);
}

static uint16_t to_bf16(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float dot(const struct matrix *matrix, int64_t expert, int64_t row, const float *in)
{
    float sum = 0;

    for (int64_t i = 0; i < matrix->inputs; i++)
        sum += weight(matrix, expert, row, i) * in[i];
    return sum;
}

static void add_expert(const struct work *work, int64_t expert, float scale, const float *x,
                       float *sum)
{
    float mid[LAYER_SIZE_MAX];

    for (int64_t i = 0; i < work->intermediate; i++) {
        float gate = dot(&work->w1, expert, i, x);

        mid[i] = gate / (1 + expf(-gate)) * dot(&work->w1, expert, work->intermediate + i, x);
    }
    for (int64_t i = 0; i < work->hidden; i++)
        sum[i] += scale * dot(&work->w2, expert, i, mid);
}

static void remember(const struct work *work)
{
    uint64_t routing = 1;

    for (int64_t i = 0; i < work->tokens * work->top_k; i++)
        routing = routing * 31 + (uint64_t)work->ids[i];
    for (int i = 0; i < library.routings_count; i++)
        if (library.routings[i] == routing) return;
    ck_assert_int_lt(library.routings_count, 1024);
    library.routings[library.routings_count++] = routing;
}

static void compute(const void *arg)
{
    const struct work *work = arg;
    int64_t tokens = work->tokens - (library.mistake == LAST_TOKEN_UNWRITTEN);

    remember(work);
    for (int64_t token = 0; token < tokens; token++) {
        float x[LAYER_SIZE_MAX];
        float sum[LAYER_SIZE_MAX] = {library.mistake == WRONG_SUM ? 1.0f : 0.0f};
        float factor = library.mistake == NINE_PERCENT     ? 1.09f
                       : library.mistake == ELEVEN_PERCENT ? 1.11f
                                                           : 1;

        if (library.mistake == MIDDLE_TOKEN_UNWRITTEN && token > 0 && token < tokens - 1) continue;
        widen(work->x + token * work->hidden, MOXIE_FORMAT_BF16, (uint64_t)work->hidden, x);
        for (int64_t k = token * work->top_k; k < (token + 1) * work->top_k; k++)
            add_expert(work, work->ids[k], work->weights[k], x, sum);
        for (int64_t i = 0; i < work->hidden; i++)
            work->y[token * work->hidden + i] = to_bf16(factor * sum[i]);
    }
}

static int32_t create_runner(moxie_instance *instance, int32_t layer, const moxie_weights *weights,
                             moxie_runner **out, moxie_error *error)
{
    struct work *runner = calloc(1, sizeof *runner);

    (void)instance;
    (void)layer;
    (void)error;
    ck_assert_ptr_nonnull(runner);
    runner->w1 = read_matrix(weights->w1);
    runner->w2 = read_matrix(weights->w2);
    if (library.mistake == ZERO_WEIGHTS)
        memset(weights->w2->values.data, 0,
               sizeof(uint16_t) *
                   (size_t)(weights->w2->values.shape[0] * runner->w2.rows * runner->w2.inputs));
    runner->hidden = weights->w2->values.shape[1];
    runner->intermediate = weights->w2->values.shape[2];
    library.runners++;
    *out = (moxie_runner *)(void *)runner;
    return MOXIE_OK;
}

static void destroy_runner(moxie_runner *runner)
{
    library.runners -= runner != NULL;
    free(runner);
}

static int32_t create_dispatcher(moxie_instance *instance, moxie_dispatcher **out,
                                 moxie_error *error)
{
    (void)error;
    *out = (moxie_dispatcher *)(void *)instance;
    return MOXIE_OK;
}

static int32_t begin_forward(moxie_dispatcher *dispatcher, const moxie_step *step,
                             moxie_error *error)
{
    (void)dispatcher;
    (void)error;
    library.tokens = step->tokens;
    return MOXIE_OK;
}

static int32_t forward(moxie_dispatcher *dispatcher, moxie_runner *runner, const moxie_batch *batch,
                       moxie_error *error)
{
    struct work work;

    (void)dispatcher;
    memcpy(&work, runner, sizeof work);
    ck_assert_ptr_nonnull(batch->stream);
    if (++library.forwards == library.failing_forward) {
        (void)strncpy(error->text, "the planted failure", error->text_bytes - 1);
        return MOXIE_E_DEVICE;
    }
    work.x = batch->x.data;
    work.ids = batch->ids.data;
    work.weights = batch->weights.data;
    work.y = batch->y.data;
    work.tokens = library.tokens;
    work.top_k = batch->ids.shape[1];
    fake.launch(compute, &work, sizeof work);
    return MOXIE_OK;
}

static const moxie_runner_api runner_api = {
    .struct_size = sizeof runner_api, .create = create_runner, .destroy = destroy_runner};
static const moxie_dispatcher_api dispatcher_api = {.struct_size = sizeof dispatcher_api,
                                                    .create = create_dispatcher,
                                                    .begin_forward = begin_forward};
static const moxie_runner_info runner_info = {
    .struct_size = sizeof runner_info, .name = "loops", .device = "sm_90", .api = &runner_api};
static const moxie_dispatcher_info dispatcher_info = {.struct_size = sizeof dispatcher_info,
                                                      .name = "local",
                                                      .device = "sm_90",
                                                      .api = &dispatcher_api};
static const moxie_api api = {.struct_size = sizeof api, .forward = forward};

// ---- The bench ---------------------------------------------------------------------------------

// Of one rank, whose few results nobody reads.
static int bench_job_here(const struct bench_job *job, struct fault *fault)
{
    const moxie_bounds bounds = {.struct_size = sizeof bounds, .experts_local = job->shape.experts};
    const moxie_plan plan = {.struct_size = sizeof plan, .bounds = &bounds};
    struct link link = {.descriptor = -1, .ranks = 1, .silence_ms = 10000};
    int ends[2];
    struct rank rank = {
        .link = &link,
        .instance = {.api = &api, .plan = &plan},
        .runner_info = &runner_info,
        .dispatcher_info = &dispatcher_info,
    };
    int st = EXIT_OK;

    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    link.descriptor = ends[0];
    library.forwards = 0;
    library.routings_count = 0;
    TRY(device_open(&rank.device, "sm_90", 0, fault));
    TRY(bench_graphs(&rank, job, fault));
out:
    ck_assert_int_eq(library.runners, 0);
    ck_assert_int_eq(ranges.depth(), 0);
    (void)close(ends[0]);
    (void)close(ends[1]);
    return device_finish(&rank.device, st, fault);
}

static int bench(const struct bench_shape *shape, struct fault *fault)
{
    const struct bench_job job = {
        .shape = *shape,
        .format = MOXIE_FORMAT_BF16,
        .row_format = MOXIE_FORMAT_BF16,
        .tokens_max = 3,
        .cells = 2,
        .tokens = {1, 3},
        .replays = BENCH_REPLAYS,
    };

    return bench_job_here(&job, fault);
}

// Sizes that leave a part of a block of fp8_block128 in every direction.
static int bench_format(int32_t format, enum mistake mistake, struct fault *fault)
{
    const struct bench_job job = {
        .shape = {LAYER_SIZE_MAX, 136, 2, 1},
        .format = format,
        .row_format = MOXIE_FORMAT_BF16,
        .tokens_max = 1,
        .cells = 1,
        .tokens = {1},
        .replays = 2,
    };

    library.mistake = mistake;
    *fault = (struct fault){.text = ""};
    return bench_job_here(&job, fault);
}

static const struct bench_shape small = {16, 16, 4, 2};

START_TEST(a_bench_leaves_nothing)
{
    struct fault fault = {.text = ""};

    ck_assert_msg(bench(&small, &fault) == EXIT_OK, "%s", fault.text);
    ck_assert_int_eq(fake.live(), 0);
    // For each number of tokens: 8 at once, 8 into a graph.
    ck_assert_int_eq(library.forwards, 2 * 16);
    ck_assert_int_eq(fake.calls("cuStreamBeginCapture_v2"), 2);
    // One to settle, 30 that are timed, and one ahead of each.
    ck_assert_int_eq(fake.calls("cuGraphLaunch"), 2 * 2 * 31);
    // Of 12 for one token and 1728 for three, 31 times 8 draws each.
    ck_assert_int_ge(library.routings_count, 200);
}
END_TEST

// How the next events of the fake NVTX begin: an `event` of what is done at so many tokens.
static void expect_event(int *index, char event, const char *what, int tokens)
{
    char wanted[64];

    (void)snprintf(wanted, sizeof wanted, "%c%s 16,16,4,2 bf16 tokens %d", event, what, tokens);
    ck_assert_str_eq(ranges.event(*index), wanted);
    *index += 1;
}

static void expect_range(int *index, const char *what, int tokens)
{
    expect_event(index, '+', what, tokens);
    expect_event(index, '-', what, tokens);
}

START_TEST(a_profiler_sees_named_ranges)
{
    static const int tokens[] = {1, 3};
    struct fault fault;
    int index = 0;

    ck_assert_int_eq(bench(&small, &fault), EXIT_OK);
    for (int cell = 0; cell < 2; cell++) {
        expect_range(&index, "warm-up", tokens[cell]);
        expect_range(&index, "capture", tokens[cell]);
        expect_event(&index, '+', "settle", tokens[cell]);
        expect_range(&index, "replay", tokens[cell]);
        expect_event(&index, '-', "settle", tokens[cell]);
        for (int i = 0; i < 30; i++) {
            expect_range(&index, "replay", tokens[cell]);
            expect_range(&index, "check", tokens[cell]);
        }
        expect_range(&index, "check", tokens[cell]);
    }
    ck_assert_str_eq(ranges.event(index), "");
}
END_TEST

static int bench_small(struct fault *fault)
{
    return bench(&small, fault);
}

START_TEST(every_call_may_fail)
{
    static const char *const names[] = {
        "cuMemGetInfo_v2",      "cuMemAlloc_v2",
        "cuMemcpyHtoD_v2",      "cuMemcpyDtoH_v2",
        "cuMemcpyDtoDAsync_v2", "cuMemsetD8Async",
        "cuStreamSynchronize",  "cuStreamBeginCapture_v2",
        "cuStreamEndCapture",   "cuGraphInstantiateWithFlags",
        "cuGraphLaunch",        "cuEventCreate",
        "cuEventRecord",        "cuEventElapsedTime",
    };

    bench_break_calls(&fake, names, sizeof names / sizeof names[0], 4, bench_small);
}
END_TEST

START_TEST(the_library_may_fail)
{
    struct fault fault;

    for (int nth = 1; nth <= 32; nth++) {
        fake.reset();
        library.failing_forward = nth;
        ck_assert_int_eq(bench(&small, &fault), EXIT_TROUBLE);
        ck_assert_ptr_nonnull(strstr(fault.text, "the planted failure"));
        ck_assert_int_eq(fake.live(), 0);
    }
}
END_TEST

START_TEST(wrong_outputs_are_found)
{
    static const struct {
        enum mistake mistake;
        const char *said;
    } rows[] = {
        {LAST_TOKEN_UNWRITTEN, "the output was not written, or is not finite: token 0, column 0"},
        {MIDDLE_TOKEN_UNWRITTEN, "the output was not written, or is not finite: token 1, column 0"},
        {WRONG_SUM, "1 tokens: the last one's relative error is"},
        {ZERO_WEIGHTS, "1 tokens: the last one's relative error is"},
    };
    struct fault fault;

    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        library.mistake = rows[i].mistake;
        ck_assert_int_eq(bench(&small, &fault), EXIT_TOLERANCE);
        ck_assert_msg(strstr(fault.text, rows[i].said) != NULL, "%s", fault.text);
        ck_assert_int_eq(fake.live(), 0);
    }
}
END_TEST

// Also that every set has scales: the token that is checked went through the last one. An error of
// 9% is the quantising of rows, and no mistake, with fp8 weights and short rows only.
START_TEST(scales_are_read_as_described)
{
    static const int32_t formats[] = {MOXIE_FORMAT_FP8_TENSOR, MOXIE_FORMAT_FP8_CHANNEL,
                                      MOXIE_FORMAT_FP8_BLOCK128};
    const struct bench_shape long_rows = {512, 512, 8, 2};
    const struct bench_shape short_rows = {512, 511, 8, 2};
    struct fault fault;

    for (int i = 0; i < 3; i++) {
        ck_assert(bench_check_error_max(formats[i], &long_rows) == 6e-2);
        ck_assert(bench_check_error_max(formats[i], &short_rows) == 1e-1);
        fake.reset();
        ck_assert_msg(bench_format(formats[i], NINE_PERCENT, &fault) == EXIT_OK, "%s", fault.text);
        ck_assert_int_eq(fake.calls("cuMemcpyDtoDAsync_v2"), 7 * 4 + 2 * 10);
        ck_assert_int_eq(bench_format(formats[i], ELEVEN_PERCENT, &fault), EXIT_TOLERANCE);
        ck_assert_msg(strstr(fault.text, "at most 1e-01 is wanted") != NULL, "%s", fault.text);
    }
    for (int mistake = ONE_RUN_OF_BLOCKS; mistake <= ONE_COLUMN_OF_BLOCKS; mistake++)
        ck_assert_msg(bench_format(MOXIE_FORMAT_FP8_BLOCK128, (enum mistake)mistake, &fault) ==
                          EXIT_TOLERANCE,
                      "mistake %d", mistake);
    ck_assert_int_eq(bench_format(MOXIE_FORMAT_BF16, NO_MISTAKE, &fault), EXIT_OK);
    ck_assert_int_eq(bench_format(MOXIE_FORMAT_BF16, NINE_PERCENT, &fault), EXIT_TOLERANCE);
    ck_assert_msg(strstr(fault.text, "at most 2e-02 is wanted") != NULL, "%s", fault.text);
    ck_assert_int_eq(fake.live(), 0);
}
END_TEST

START_TEST(what_cannot_be_checked_is_refused)
{
    static const struct {
        struct bench_shape shape;
        int32_t format;
        const char *said;
    } rows[] = {
        {{16, 16, 4, 2}, MOXIE_FORMAT_F32, "not in f32"},
        {{2097153, 16, 4, 2}, MOXIE_FORMAT_FP8_TENSOR, "rows of at most 2097152 numbers"},
        {{16, 2097153, 4, 2}, MOXIE_FORMAT_BF16, "intermediate 2097153"},
    };
    static const struct bench_shape largest = {2097152, 2097152, 4, 2};
    struct fault fault = {.text = ""};

    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        ck_assert_int_eq(bench_check_possible(&rows[i].shape, rows[i].format, &fault),
                         EXIT_REFUSED);
        ck_assert_msg(strstr(fault.text, rows[i].said) != NULL, "%s", fault.text);
    }
    ck_assert_int_eq(bench_check_possible(&largest, MOXIE_FORMAT_FP8_BLOCK128, &fault), EXIT_OK);
    ck_assert_int_eq(bench_check_possible(&largest, MOXIE_FORMAT_F16, &fault), EXIT_OK);
    ck_assert_int_eq(bench_check_possible(&largest, MOXIE_FORMAT_MXFP4, &fault), EXIT_OK);
}
END_TEST

START_TEST(weight_sets_are_as_many_as_fit)
{
    static const struct bench_shape two_fit = {64, 64, 128, 1};
    static const struct bench_shape none_fits = {64, 64, 512, 1};
    struct fault fault;

    ck_assert_int_eq(bench(&two_fit, &fault), EXIT_OK);
    // Two projections of the second set are copies of the first; the rest measures the device.
    ck_assert_int_eq(fake.calls("cuMemcpyDtoDAsync_v2"), 2 + 2 * 10);
    ck_assert_int_eq(fake.live(), 0);
    ck_assert_int_eq(bench(&none_fits, &fault), EXIT_REFUSED);
    ck_assert_msg(strstr(fault.text, "the experts take 12.0 MiB") == fault.text, "%s", fault.text);
    ck_assert_int_eq(fake.live(), 0);
}
END_TEST

static void set_up(void)
{
    bench_fakes_find(&fake, &ranges);
}

static void add_tests(TCase *tests)
{
    tcase_add_checked_fixture(tests, set_up, NULL);
    tcase_add_test(tests, a_bench_leaves_nothing);
    tcase_add_test(tests, a_profiler_sees_named_ranges);
    tcase_add_test(tests, every_call_may_fail);
    tcase_add_test(tests, the_library_may_fail);
    tcase_add_test(tests, wrong_outputs_are_found);
    tcase_add_test(tests, scales_are_read_as_described);
    tcase_add_test(tests, what_cannot_be_checked_is_refused);
    tcase_add_test(tests, weight_sets_are_as_many_as_fit);
}

SUITE_MAIN("cli_bench_graph", 120, add_tests)
