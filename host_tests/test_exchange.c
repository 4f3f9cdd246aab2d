// plugin/exchange.c: what travels and what does not. Payload formats, rows that nobody may write,
// two instances at once, and no allocation in a step.

#include "plugin/exchange.h"

#include "host_tests/alloc_count.h"
#include "host_tests/crew.h"
#include "host_tests/suite.h"
#include "plugin/dispatcher.h"
#include "plugin/forward.h"
#include "plugin/runner.h"
#include "plugin/tensor.h"

#include <string.h>

static void meet(struct crew_member *member)
{
    moxie_host *host = &member->rank.mock.host;

    if (member->crew->ranks > 1 && host->barrier(host->ctx) != 0)
        ck_abort_msg("a rank did not come");
}

// ---- payload formats ---------------------------------------------------------------------------

struct payload {
    const char *key, *value;
    double bound;
};

static const struct payload payloads[] = {
    {"dispatch_format", "input", 2e-6},   {"dispatch_format", "fp8_block128", 6e-2},
    {"dispatch_format", "nvfp4", 2e-1},   {"activation_format", "bf16", 5e-3},
    {"activation_format", "f16", 5e-3},   {"activation_format", "fp8", 6e-2},
    {"activation_format", "nvfp4", 2e-1},
};

static void payload_keys(struct crew_member *member)
{
    const struct payload *payload = member->crew->arg;

    mock_set_str(&member->rank.mock, payload->key, payload->value);
}

START_TEST(payload_formats)
{
    struct payload payload = payloads[_i];
    struct crew crew = {.layer_name = "qwen3_moe_a",
                        .ranks = 3,
                        .dispatcher = "alltoall",
                        .configure = payload_keys,
                        .scenario = crew_forward,
                        .arg = &payload};
    double error;

    crew_run(&crew);
    error = golden_error(crew.y, &crew.layer.want);
    ck_assert_msg(error <= payload.bound, "%s %s: %g past %g", payload.key, payload.value, error,
                  payload.bound);
    // A quantised row that came out exact did not travel quantised.
    if (payload.bound > 1e-5) ck_assert_double_gt(error, 1e-5);
    crew_fini(&crew);
}
END_TEST

// ---- 16-bit results ----------------------------------------------------------------------------

static void narrow_keys(struct crew_member *member)
{
    mock_set_str(&member->rank.mock, "output_format", "bf16");
}

static float from_bf16(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;

    memcpy(&value, &wide, sizeof value);
    return value;
}

static void narrow_scenario(struct crew_member *member)
{
    int64_t count = member->tokens * member->crew->layer.hidden;
    uint16_t *narrow = malloc((size_t)count * sizeof *narrow + 1);

    ck_assert_ptr_nonnull(narrow);
    member->batch.batch.y.data = narrow;
    member->batch.batch.y.dtype.code = MOXIE_DTYPE_BFLOAT;
    member->batch.batch.y.dtype.bits = 16;
    crew_forward(member);
    for (int64_t i = 0; i < count; i++)
        member->y[i] = from_bf16(narrow[i]);
    free(narrow);
}

START_TEST(results_in_16_bits)
{
    struct crew crew = {.layer_name = "deepseek_v3_a",
                        .ranks = 4,
                        .dispatcher = "alltoall",
                        .configure = narrow_keys,
                        .scenario = narrow_scenario};

    crew_run(&crew);
    ck_assert_double_le(golden_error(crew.y, &crew.layer.want), 4e-3);
    crew_fini(&crew);
}
END_TEST

// ---- rows that nobody may write ----------------------------------------------------------------

#define CANARY 0xa5

struct rows_seen {
    unsigned char *first[MOXIE_RANKS_MAX], *results[MOXIE_RANKS_MAX];
    int64_t row_bytes, result_bytes, cap;
    int32_t counts[MOXIE_RANKS_MAX];
};

// One layer by halves; what was received is noted.
static void layer_by_halves(struct crew_member *member, struct rows_seen *seen)
{
    moxie_dispatcher *dispatcher = member->rank.dispatcher;
    const moxie_batch *batch = &member->batch.batch;
    moxie_error *error = &member->rank.mock.error;
    moxie_call call = {.struct_size = sizeof call};
    const moxie_rows *in, *out;

    crew_begin(member);
    ck_assert_int_eq(dispatcher_dispatch_send(dispatcher, batch, error), MOXIE_OK);
    ck_assert_int_eq(dispatcher_dispatch_recv(dispatcher, batch, &in, &out, error), MOXIE_OK);
    for (int32_t rank = 0; rank < member->crew->ranks; rank++) {
        const moxie_tensor *rows = &in->slabs[rank].rows;

        if (rank == member->index) continue;
        seen->first[rank] = tensor_data(rows);
        seen->results[rank] = tensor_data(&out->slabs[rank].rows);
        seen->row_bytes = tensor_stride_bytes(rows, 0);
        seen->result_bytes = tensor_stride_bytes(&out->slabs[rank].rows, 0);
        seen->cap = rows->shape[0];
        seen->counts[rank] = ((const int32_t *)in->counts.data)[rank];
        ck_assert_int_eq(((const int32_t *)out->counts.data)[rank], seen->counts[rank]);
    }
    ck_assert_int_eq(runner_run(member->rank.runner, &call, in, out, error), MOXIE_OK);
    ck_assert_int_eq(dispatcher_combine_send(dispatcher, batch, error), MOXIE_OK);
    ck_assert_int_eq(dispatcher_combine_recv(dispatcher, batch, error), MOXIE_OK);
}

static void check_canaries(const struct rows_seen *seen, int32_t rank)
{
    for (int64_t at = seen->counts[rank] * seen->row_bytes; at < seen->cap * seen->row_bytes; at++)
        ck_assert_int_eq(seen->first[rank][at], CANARY);
    for (int64_t at = seen->counts[rank] * seen->result_bytes; at < seen->cap * seen->result_bytes;
         at++)
        ck_assert_int_eq(seen->results[rank][at], CANARY);
}

// Every slab is poisoned whole; after a layer whose ids are partly garbage, only the rows that
// were reported may have changed.
static void canary_scenario(struct crew_member *member)
{
    static const int32_t garbage[] = {-1, INT32_MAX, INT32_MIN, 1 << 30};
    const struct layer *layer = &member->crew->layer;
    struct rows_seen seen = {.cap = 0};
    int32_t *ids = malloc((size_t)(layer->tokens * layer->top_k) * sizeof *ids);

    ck_assert_ptr_nonnull(ids);
    layer_by_halves(member, &seen);
    meet(member);
    for (int32_t rank = 0; rank < member->crew->ranks; rank++) {
        if (rank == member->index) continue;
        memset(seen.first[rank], CANARY, (size_t)(seen.cap * seen.row_bytes));
        memset(seen.results[rank], CANARY, (size_t)(seen.cap * seen.result_bytes));
    }
    meet(member);
    memcpy(ids, member->batch.batch.ids.data,
           (size_t)(member->tokens * layer->top_k) * sizeof *ids);
    for (int64_t i = 0; i < member->tokens * layer->top_k; i += 1 + i % 3)
        ids[i] = garbage[i % 4];
    member->batch.batch.ids.data = ids;
    layer_by_halves(member, &seen);
    meet(member);
    for (int32_t rank = 0; rank < member->crew->ranks; rank++) {
        if (rank != member->index) check_canaries(&seen, rank);
    }
    meet(member);
    free(ids);
}

START_TEST(garbage_ids_write_into_nobodys_rows)
{
    struct crew crew = {.layer_name = "qwen3_moe_a",
                        .ranks = 4,
                        .dispatcher = "alltoall",
                        .scenario = canary_scenario};

    crew_run(&crew);
    crew_fini(&crew);
}
END_TEST

// ---- rows that a step may bring ----------------------------------------------------------------

// What is launched for the experts is as large as the slabs say.
static void bound_scenario(struct crew_member *member)
{
    const int64_t planned = member->rank.instance->plan.limits.rows_cap;
    const int64_t *parts = member->crew->parts;
    struct rows_seen seen = {.cap = 0};

    ck_assert_int_lt(parts[0], planned);
    member->step.rank_tokens = parts;
    layer_by_halves(member, &seen);
    ck_assert_int_eq(seen.cap, parts[0]);
    member->step.rank_tokens = NULL;
    layer_by_halves(member, &seen);
    ck_assert_int_eq(seen.cap, planned);
}

static void roomy_keys(struct crew_member *member)
{
    mock_set_i64(&member->rank.mock, "forward_tokens_max", 4 * member->crew->parts[0]);
}

START_TEST(slabs_are_as_large_as_the_step)
{
    struct crew crew = {.layer_name = "mixtral_a",
                        .ranks = 3,
                        .dispatcher = _i == 0 ? "alltoall" : "allgather",
                        .configure = roomy_keys,
                        .scenario = bound_scenario};

    crew_run(&crew);
    ck_assert_double_le(golden_error(crew.y, &crew.layer.want), 2e-6);
    crew_fini(&crew);
}
END_TEST

// ---- rounds that differ -------------------------------------------------------------------------

static void two_rounds(struct crew_member *member)
{
    int64_t most = member->crew->parts[0];

    mock_set_i64(&member->rank.mock, "max_dispatch_tokens_per_rank", ceil_div(most, 2));
    mock_set_i64(&member->rank.mock, "dispatch_rounds_max", 2);
}

static void bring_one(struct crew_member *member)
{
    member->tokens = member->step.tokens = 1;
    for (int32_t i = 0; i < 4; i++)
        member->batch.dims[i][0] = 1;
}

// The last rank has a token, and believes that the others fit in a round: when they are in their
// second one, it is in the next forward.
static void rounds_scenario(struct crew_member *member)
{
    const struct limits *limits = &member->rank.instance->plan.limits;
    moxie_dispatcher *dispatcher = member->rank.dispatcher;
    moxie_error *error = &member->rank.mock.error;
    int64_t believed[MOXIE_RANKS_MAX] = {limits->tokens_max, limits->tokens_max, 1};
    const int is_last = member->index == member->crew->ranks - 1;
    int32_t answer;

    if (is_last) {
        member->step.rank_tokens = believed;
        bring_one(member);
        crew_forward(member);
    } else {
        member->step.rank_tokens = NULL;
    }
    crew_begin(member);
    answer = forward_run(dispatcher, member->rank.runner, &member->batch.batch, error);
    crew_expect(member, answer, MOXIE_E_COLLECTIVE_MISMATCH,
                is_last ? "rank 0 sends round 1 of its layer, and this rank round 0"
                        : "rank 2 sends round 0 of its layer, and this rank round 1");
    ck_assert_int_eq(error->rank, is_last ? 0 : 2);
    for (int64_t i = 0; i < member->tokens * member->crew->layer.hidden; i++)
        ck_assert_float_eq(member->y[i], 0.0f);
}

START_TEST(rows_of_another_round_are_none)
{
    struct crew crew = {.layer_name = "qwen3_moe_a",
                        .ranks = 3,
                        .dispatcher = "alltoall",
                        .configure = two_rounds,
                        .scenario = rounds_scenario};

    crew_run(&crew);
    crew_fini(&crew);
}
END_TEST

// ---- rounds without tokens ---------------------------------------------------------------------

// Rank 1 has one token, all others as many as there were.
static void leave_one(struct crew_member *member, int64_t counts[MOXIE_RANKS_MAX])
{
    memcpy(counts, member->crew->parts, sizeof member->crew->parts);
    counts[1] = 1;
    member->step.rank_tokens = counts;
    if (member->index == 1) bring_one(member);
}

static _Thread_local int64_t rows_most; // of the batch, that a sum was told of

static int32_t watched_sum(const struct sum_args *args, void *stream)
{
    if (args->tokens_earlier + args->tokens > rows_most)
        rows_most = args->tokens_earlier + args->tokens;
    return sum_cpu(args, stream);
}

// A round that fails makes rows of earlier rounds zero, where it fails in stream order.
static void earlier_scenario(struct crew_member *member)
{
    struct kernels kernels = kernels_cpu;
    struct device device = device_cpu;
    int64_t counts[MOXIE_RANKS_MAX];
    moxie_stats stats;

    leave_one(member, counts);
    kernels.sum = watched_sum;
    device.kernels = &kernels;
    member->rank.instance->device = &device;
    crew_forward(member);
    member->rank.instance->device = &device_cpu;
    instance_stats(member->rank.instance, &stats);
    ck_assert_uint_eq(stats.rounds, 2);
    ck_assert_int_eq(rows_most, member->tokens);
}

START_TEST(rows_of_earlier_rounds_end_with_the_tokens)
{
    struct crew crew = {.layer_name = "qwen3_moe_a",
                        .ranks = 2,
                        .dispatcher = "alltoall",
                        .configure = two_rounds,
                        .scenario = earlier_scenario};

    crew_run(&crew);
    crew_fini(&crew);
}
END_TEST

static void captured_rounds(struct crew_member *member)
{
    two_rounds(member);
    mock_set_i64(&member->rank.mock, "capture_routed_experts", 1);
}

// Counted from the first token of the step, in whatever round.
static void captured_scenario(struct crew_member *member)
{
    const struct layer *layer = &member->crew->layer;
    const int32_t *ids = member->batch.batch.ids.data;
    moxie_captured captured = {.struct_size = sizeof captured, .dp_rank = member->index};
    const int32_t valid = 1;
    const int32_t *rows;

    ck_assert_int_gt(member->tokens, 2);
    member->step.tokens_valid = &valid;
    crew_forward(member);
    crew_expect(member,
                instance_captured(member->rank.instance, &captured, &member->rank.mock.error),
                MOXIE_OK, NULL);
    rows = captured.ids.data;
    for (int64_t token = 0; token < member->tokens; token++) {
        for (int64_t t = 0; t < layer->top_k; t++)
            ck_assert_int_eq(rows[token * captured.ids.strides[0] + t],
                             token < valid ? ids[token * layer->top_k + t] : -1);
    }
}

START_TEST(captured_rounds_end_with_the_valid_tokens)
{
    struct crew crew = {.layer_name = "qwen3_moe_a",
                        .ranks = 2,
                        .dispatcher = "alltoall",
                        .configure = captured_rounds,
                        .scenario = captured_scenario};

    crew_run(&crew);
    crew_fini(&crew);
}
END_TEST

// Rows lie apart in every tensor of the batch, and a later round finds its own.
static void strided_scenario(struct crew_member *member)
{
    const int64_t top_k = member->crew->layer.top_k, hidden = member->crew->layer.hidden;
    moxie_batch *batch = &member->batch.batch;
    moxie_tensor *tensors[] = {&batch->x, &batch->ids, &batch->weights, &batch->y};
    moxie_captured captured = {.struct_size = sizeof captured, .dp_rank = member->index};
    const int32_t *ids = batch->ids.data, *rows;
    unsigned char *rooms[4];
    int64_t strides[4][2];

    for (int32_t i = 0; i < 4; i++) {
        const int64_t row = tensors[i]->shape[1] * tensor_element_bytes(tensors[i]);

        rooms[i] = calloc((size_t)member->tokens, 2 * (size_t)row);
        ck_assert_ptr_nonnull(rooms[i]);
        for (int64_t token = 0; token < member->tokens; token++)
            memcpy(rooms[i] + 2 * row * token, tensor_data(tensors[i]) + row * token, (size_t)row);
        strides[i][0] = 2 * tensors[i]->shape[1];
        strides[i][1] = 1;
        tensors[i]->strides = strides[i];
        tensors[i]->data = rooms[i];
    }
    crew_forward(member);
    for (int64_t token = 0; token < member->tokens; token++)
        memcpy(member->y + token * hidden, (float *)(void *)rooms[3] + 2 * token * hidden,
               (size_t)hidden * sizeof *member->y);
    crew_expect(member,
                instance_captured(member->rank.instance, &captured, &member->rank.mock.error),
                MOXIE_OK, NULL);
    rows = captured.ids.data;
    for (int64_t i = 0; i < member->tokens * top_k; i++)
        ck_assert_int_eq(rows[i / top_k * captured.ids.strides[0] + i % top_k], ids[i]);
    for (int32_t i = 0; i < 4; i++)
        free(rooms[i]);
}

START_TEST(rounds_find_rows_that_lie_apart)
{
    struct crew crew = {.layer_name = "qwen3_moe_a",
                        .ranks = 2,
                        .dispatcher = "alltoall",
                        .configure = captured_rounds,
                        .scenario = strided_scenario};

    crew_run(&crew);
    ck_assert_double_le(golden_error(crew.y, &crew.layer.want), 2e-6);
    crew_fini(&crew);
}
END_TEST

// ---- rows that are moved -----------------------------------------------------------------------

// Rank 1 brings a token, and only MAX_LEN moves as many rows as rank 0 has.
static void padding_scenario(struct crew_member *member)
{
    const int32_t *padding = member->crew->arg;
    const int64_t *parts = member->crew->parts;
    int64_t counts[MOXIE_RANKS_MAX];
    moxie_stats stats;

    ck_assert_int_gt(parts[0], 1);
    leave_one(member, counts);
    member->step.padding = *padding;
    crew_forward(member);
    if (*padding == MOXIE_PADDING_MAX_LEN) counts[1] = parts[0];
    instance_stats(member->rank.instance, &stats);
    ck_assert_uint_eq(stats.rows_sent, (uint64_t)counts[member->index]);
    ck_assert_uint_eq(stats.rows_received, (uint64_t)counts[1 - member->index]);
}

START_TEST(only_max_len_moves_rows_without_tokens)
{
    int32_t padding = _i;
    struct crew crew = {.layer_name = "qwen3_moe_a",
                        .ranks = 2,
                        .dispatcher = "allgather",
                        .scenario = padding_scenario,
                        .arg = &padding};

    crew_run(&crew);
    crew_fini(&crew);
}
END_TEST

// ---- no allocation in a step -------------------------------------------------------------------

static void quiet_scenario(struct crew_member *member)
{
    moxie_host *host = &member->rank.mock.host;
    uint64_t calls;
    int32_t failed = 0;

    crew_forward(member);
    meet(member);
    calls = member->rank.mock.allocate_calls;
    if (member->index == 0) alloc_count_begin();
    meet(member);
    // No assertion in here: they allocate.
    for (int32_t i = 0; i < 5; i++) {
        failed |= dispatcher_begin_forward(member->rank.dispatcher, &member->step, NULL);
        failed |=
            forward_run(member->rank.dispatcher, member->rank.runner, &member->batch.batch, NULL);
    }
    if (member->crew->ranks > 1) failed |= host->barrier(host->ctx);
    if (member->index == 0) {
        struct alloc_count count;

        alloc_count_end(&count);
        ck_assert_uint_eq(count.allocations, 0);
        ck_assert_uint_eq(count.frees, 0);
    }
    meet(member);
    ck_assert_int_eq(failed, 0);
    ck_assert_uint_eq(member->rank.mock.allocate_calls, calls);
}

START_TEST(forward_allocates_nothing)
{
    static const char *const dispatchers[] = {"local", "alltoall", "allgather"};
    struct crew crew = {.layer_name = "gpt_oss_a",
                        .ranks = _i == 0 ? 1 : 3,
                        .dispatcher = dispatchers[_i],
                        .scenario = quiet_scenario};

    crew_run(&crew);
    crew_fini(&crew);
}
END_TEST

// ---- two instances at once ---------------------------------------------------------------------

// A target and a draft model: the second layer's ranks live beside the first's, and their steps
// interleave.
static void beside(struct crew_member *member)
{
    struct crew *other = member->crew->arg;
    struct layer_rank *draft = calloc(1, sizeof *draft);
    int64_t parts[MOXIE_RANKS_MAX];
    struct layer_batch batch;
    moxie_step step = {.struct_size = sizeof step, .rank_tokens = parts};
    int64_t first = layer_part_first(other->layer.tokens, member->crew->ranks, member->index);

    ck_assert_ptr_nonnull(draft);
    for (int32_t rank = 0; rank < member->crew->ranks; rank++)
        parts[rank] = layer_part(other->layer.tokens, member->crew->ranks, rank);
    step.tokens = parts[member->index];
    layer_rank_init(draft, &other->layer, member->crew->group, member->index);
    mock_set_i64(&draft->mock, "forward_tokens_max", parts[0]);
    layer_rank_open(draft, &other->layer);
    layer_batch_of(&other->layer, first, step.tokens, other->y + first * other->layer.hidden,
                   &batch);
    for (int32_t i = 0; i < 10; i++) {
        crew_forward(member);
        ck_assert_int_eq(dispatcher_begin_forward(draft->dispatcher, &step, &draft->mock.error),
                         MOXIE_OK);
        ck_assert_int_eq(
            forward_run(draft->dispatcher, draft->runner, &batch.batch, &draft->mock.error),
            MOXIE_OK);
    }
    layer_rank_close(draft);
    free(draft);
}

START_TEST(two_instances_share_nothing)
{
    struct crew draft = {.layer_name = "mixtral_a"};
    struct crew crew = {.layer_name = "qwen3_moe_a",
                        .ranks = 3,
                        .dispatcher = "alltoall",
                        .scenario = beside,
                        .arg = &draft};

    layer_open(&draft.layer, draft.layer_name);
    draft.y = calloc((size_t)(draft.layer.tokens * draft.layer.hidden), sizeof *draft.y);
    ck_assert_ptr_nonnull(draft.y);
    crew_run(&crew);
    ck_assert_double_le(golden_error(crew.y, &crew.layer.want), 2e-6);
    ck_assert_double_le(golden_error(draft.y, &draft.layer.want), 2e-6);
    crew_fini(&crew);
    crew_fini(&draft);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_loop_test(tests, payload_formats, 0, (int)(sizeof payloads / sizeof payloads[0]));
    tcase_add_test(tests, results_in_16_bits);
    tcase_add_test(tests, garbage_ids_write_into_nobodys_rows);
    tcase_add_loop_test(tests, slabs_are_as_large_as_the_step, 0, 2);
    tcase_add_test(tests, rows_of_another_round_are_none);
    tcase_add_test(tests, rows_of_earlier_rounds_end_with_the_tokens);
    tcase_add_test(tests, captured_rounds_end_with_the_valid_tokens);
    tcase_add_test(tests, rounds_find_rows_that_lie_apart);
    tcase_add_loop_test(tests, only_max_len_moves_rows_without_tokens, MOXIE_PADDING_NONE,
                        MOXIE_PADDING_SUM_LEN + 1);
    tcase_add_loop_test(tests, forward_allocates_nothing, 0, 3);
    tcase_add_test(tests, two_instances_share_nothing);
}

SUITE_MAIN("exchange", 120, add)
