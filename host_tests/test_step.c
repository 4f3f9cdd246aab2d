// plugin/step.c: what a step and a batch may be, at each edge of the plan.

#include "plugin/step.h"

#include "host_tests/mock_host.h"
#include "host_tests/said.h"
#include "host_tests/suite.h"
#include "plugin/tensor.h"

#include <string.h>

#define RANKS  4 // EP; two share a DP rank's tokens
#define MOST   5 // tokens of a rank: 10 of a DP rank
#define SLICE  10
#define HIDDEN 64
#define TOP_K  2
#define TOKENS 4

struct sample {
    struct mock_host mock;
    moxie_instance *instance;
    moxie_step step;
    struct step_shape shape;
    int64_t rank_tokens[RANKS];
    struct said said;
};

static void sample_open(struct sample *s)
{
    static const struct registry none;

    ck_assert_msg(instance_open(&s->mock.host, &none, &s->instance, &s->mock.error) == MOXIE_OK,
                  "%s", s->mock.text);
    ACCEPTED(&s->said, instance_accepted(s->instance, &s->said.error));
}

static void sample_configure(struct sample *s)
{
    memset(s, 0, sizeof *s);
    said_init(&s->said);
    mock_host_init(&s->mock);
    mock_set_i64(&s->mock, "dp_size", 2);
    mock_set_i64(&s->mock, "tp_size", RANKS);
    mock_set_i64(&s->mock, "forward_tokens_max", 2 * MOST);
    mock_set_i64(&s->mock, "num_layers", 3);
    mock_set_i64(&s->mock, "forwards_in_flight_max", 2);
    s->step = (moxie_step){.struct_size = sizeof s->step};
}

// The rank of four that push to each other.
static void sample_init(struct sample *s, int32_t rank, int32_t capture)
{
    sample_configure(s);
    mock_set_i64(&s->mock, "ep_size", RANKS);
    mock_set_i64(&s->mock, "ep_rank", rank);
    mock_set_str(&s->mock, "dispatcher", "alltoall");
    mock_set_i64(&s->mock, "capture_routed_experts", capture);
    sample_open(s);
    ck_assert_int_eq(s->instance->plan.limits.forward_tokens_max, MOST);
}

// A rank whose host gathers all tokens itself.
static void sample_init_local(struct sample *s, int32_t capture)
{
    sample_configure(s);
    mock_set_str(&s->mock, "dispatcher", "local");
    mock_set_i64(&s->mock, "capture_routed_experts", capture);
    sample_open(s);
    ck_assert_int_eq(s->instance->plan.limits.forward_tokens_max, 4 * MOST);
}

static void sample_fini(struct sample *s)
{
    ck_assert_int_eq(instance_close(s->instance, &s->mock.error), MOXIE_OK);
    mock_host_fini(&s->mock);
}

static int32_t check(struct sample *s, int local)
{
    memset(&s->shape, 0xa5, sizeof s->shape);
    return step_check(s->instance, local, &s->step, &s->shape, &s->said.error);
}

// ---- Steps -------------------------------------------------------------------------------------

START_TEST(tokens_up_to_the_bound)
{
    struct sample s;

    sample_init(&s, 0, 0);
    for (int64_t tokens = 0; tokens <= MOST; tokens++) {
        s.step.tokens = tokens;
        ACCEPTED(&s.said, check(&s, 0));
        ck_assert_int_eq(s.shape.tokens, tokens);
        ck_assert_int_eq(s.shape.tokens_most, MOST); // what peers bring is not known
        ck_assert_int_eq(s.shape.listed, 0);
        ck_assert_int_eq(s.shape.capture_row, 0);
    }
    s.step.tokens = MOST + 1;
    SAID(&s.said, MOXIE_E_CAPACITY, check(&s, 0), "step.tokens: 6", "holds 5",
         "forward_tokens_max");
    s.step.tokens = INT64_MAX;
    SAID(&s.said, MOXIE_E_CAPACITY, check(&s, 0), "9223372036854775807", "holds 5");
    s.step.tokens = -1;
    SAID(&s.said, MOXIE_E_INVALID, check(&s, 0), "step.tokens: -1");
    sample_fini(&s);
}
END_TEST

START_TEST(local_needs_no_peers)
{
    struct sample s;

    sample_init_local(&s, 0);
    s.step.tokens = 4 * MOST;
    s.step.rank_tokens = s.rank_tokens; // not looked at: no rank waits for another
    s.rank_tokens[0] = -7;
    ACCEPTED(&s.said, check(&s, 1));
    ck_assert_int_eq(s.shape.tokens_most, 4 * MOST);
    ck_assert_int_eq(s.shape.listed, 0);
    s.step.tokens = 4 * MOST + 1;
    SAID(&s.said, MOXIE_E_CAPACITY, check(&s, 1), "step.tokens: 21", "holds 20");
    sample_fini(&s);
}
END_TEST

START_TEST(lists_name_every_rank)
{
    struct sample s;

    sample_init(&s, 1, 0);
    s.step.rank_tokens = s.rank_tokens;
    memcpy(s.rank_tokens, (int64_t[]){0, 2, 4, 1}, sizeof s.rank_tokens);
    s.step.tokens = 2;
    s.step.padding = MOXIE_PADDING_SUM_LEN;
    ACCEPTED(&s.said, check(&s, 0));
    ck_assert_int_eq(s.shape.tokens_most, 4);
    ck_assert_int_eq(s.shape.listed, 1);
    ck_assert_int_eq(s.shape.padding, MOXIE_PADDING_SUM_LEN);
    memset(s.rank_tokens, 0, sizeof s.rank_tokens); // a step of no tokens at all
    s.step.tokens = 0;
    ACCEPTED(&s.said, check(&s, 0));
    ck_assert_int_eq(s.shape.tokens_most, 0);
    sample_fini(&s);
}
END_TEST

START_TEST(wrong_lists_are_refused)
{
    struct sample s;

    sample_init(&s, 1, 0);
    s.step.rank_tokens = s.rank_tokens;
    memcpy(s.rank_tokens, (int64_t[]){0, 3, 4, 1}, sizeof s.rank_tokens);
    s.step.tokens = 2;
    SAID(&s.said, MOXIE_E_INVALID, check(&s, 0), "step.rank_tokens[1]: 3", "is 2");
    s.rank_tokens[1] = 2;
    s.rank_tokens[3] = -1;
    SAID(&s.said, MOXIE_E_INVALID, check(&s, 0), "step.rank_tokens[3]: -1; want 0..5");
    s.rank_tokens[3] = INT64_MIN;
    SAID(&s.said, MOXIE_E_INVALID, check(&s, 0), "step.rank_tokens[3]");
    s.rank_tokens[3] = MOST;
    ACCEPTED(&s.said, check(&s, 0));
    s.rank_tokens[3] = MOST + 1;
    SAID(&s.said, MOXIE_E_CAPACITY, check(&s, 0), "step.rank_tokens[3]: 6", "holds 5",
         "forward_tokens_max");
    s.rank_tokens[3] = INT64_MAX;
    SAID(&s.said, MOXIE_E_CAPACITY, check(&s, 0), "step.rank_tokens[3]: 9223372036854775807");
    s.rank_tokens[0] = -5;
    SAID(&s.said, MOXIE_E_INVALID, check(&s, 0), "step.rank_tokens[0]: -5");
    sample_fini(&s);
}
END_TEST

START_TEST(words_and_slots)
{
    struct sample s;

    sample_init(&s, 0, 0);
    s.step.slot = 1;
    ACCEPTED(&s.said, check(&s, 0));
    s.step.slot = 2;
    SAID(&s.said, MOXIE_E_INVALID, check(&s, 0), "step.slot: 2", "0..1", "forwards_in_flight_max");
    s.step.slot = -1;
    SAID(&s.said, MOXIE_E_INVALID, check(&s, 0), "step.slot: -1", "0..1");
    s.step.slot = 0;
    s.step.capture_row = -1;
    SAID(&s.said, MOXIE_E_INVALID, check(&s, 0), "step.capture_row: -1; want 0..1099511627776");
    s.step.capture_row = INT64_MAX;
    SAID(&s.said, MOXIE_E_INVALID, check(&s, 0), "step.capture_row: 9223372036854775807; want");
    sample_fini(&s);
}
END_TEST

START_TEST(the_valid_count_is_passed_on)
{
    int32_t valid = 3;
    struct sample s;

    sample_init(&s, 0, 0);
    s.step.tokens_valid = &valid;
    ACCEPTED(&s.said, check(&s, 0));
    ck_assert_ptr_eq(s.shape.tokens_valid, &valid);
    s.step.tokens_valid = (const int32_t *)((uintptr_t)&valid + 2);
    SAID(&s.said, MOXIE_E_INVALID, check(&s, 0), "step.tokens_valid", "multiple of 4");
    sample_fini(&s);
}
END_TEST

// ---- Where the capture of a rank lies ----------------------------------------------------------

// Ranks 2 and 3 share DP rank 1, whose slice begins after the ten rows of the first.
START_TEST(ranks_share_a_slice)
{
    static const int64_t rows[RANKS] = {0, 5, SLICE, SLICE + 4};
    struct sample s;

    for (int32_t rank = 0; rank < RANKS; rank++) {
        sample_init(&s, rank, 1);
        memcpy(s.rank_tokens, (int64_t[]){5, 3, 4, 2}, sizeof s.rank_tokens);
        s.step.rank_tokens = s.rank_tokens;
        s.step.tokens = s.rank_tokens[rank];
        ACCEPTED(&s.said, check(&s, 0));
        ck_assert_int_eq(s.shape.capture_row, rows[rank]);
        s.step.capture_row = 1;
        ACCEPTED(&s.said, check(&s, 0));
        ck_assert_int_eq(s.shape.capture_row, rows[rank] + 1);
        s.step.capture_row = 0;
        s.step.rank_tokens = NULL; // the bound of those before it keeps them apart
        ACCEPTED(&s.said, check(&s, 0));
        ck_assert_int_eq(s.shape.capture_row, rank / 2 * SLICE + rank % 2 * MOST);
        sample_fini(&s);
    }
}
END_TEST

START_TEST(a_row_past_the_slice_is_refused)
{
    struct sample s;

    sample_init(&s, 3, 1);
    memcpy(s.rank_tokens, (int64_t[]){5, 3, 4, 2}, sizeof s.rank_tokens);
    s.step.rank_tokens = s.rank_tokens;
    s.step.tokens = 2;
    s.step.capture_row = SLICE - 4 - 2;
    ACCEPTED(&s.said, check(&s, 0));
    ck_assert_int_eq(s.shape.capture_row, 2 * SLICE - 2);
    s.step.capture_row++;
    SAID(
        &s.said, MOXIE_E_CAPACITY, check(&s, 0),
        "step.capture_row: 5, to which 4 of this DP rank's earlier ranks are added: capture rows 9 "
        "to 11 overrun the 10 rows",
        "forward_tokens_max", "want step.capture_row at most 4");
    s.step.capture_row = (int64_t)1 << 40;
    SAID(&s.said, MOXIE_E_CAPACITY, check(&s, 0), "the 10 rows");
    s.step.rank_tokens = NULL;
    s.step.capture_row = 0;
    s.step.tokens = MOST;
    ACCEPTED(&s.said, check(&s, 0));
    s.step.capture_row = 1;
    SAID(&s.said, MOXIE_E_CAPACITY, check(&s, 0), "capture rows 6 to 11 overrun the 10 rows",
         "added, the most that they may have",
         "want step.capture_row at most 0, or step.rank_tokens");
    sample_fini(&s);
}
END_TEST

// Nine tokens of a DP rank are at most five of each of its two ranks.
START_TEST(an_odd_bound_has_places_for_all)
{
    struct sample s;

    for (int64_t tokens = 0; tokens <= MOST; tokens++) {
        sample_configure(&s);
        mock_set_i64(&s.mock, "forward_tokens_max", 2 * MOST - 1);
        mock_set_i64(&s.mock, "ep_size", RANKS);
        mock_set_i64(&s.mock, "ep_rank", 3);
        mock_set_str(&s.mock, "dispatcher", "alltoall");
        mock_set_i64(&s.mock, "capture_routed_experts", 1);
        sample_open(&s);
        s.step.tokens = tokens;
        ACCEPTED(&s.said, check(&s, 0));
        ck_assert_int_eq(s.shape.capture_row, SLICE + MOST);
        s.step.capture_row = MOST + 1;
        SAID(&s.said, MOXIE_E_CAPACITY, check(&s, 0), "the 10 rows");
        sample_fini(&s);
    }
}
END_TEST

// Five tokens of a DP rank are two rows of each of its four ranks, where each pads its own share.
START_TEST(padded_ranks_share_a_slice)
{
    struct sample s;

    for (int32_t rank = 0; rank < RANKS; rank++) {
        sample_configure(&s);
        mock_set_i64(&s.mock, "dp_size", 1);
        mock_set_i64(&s.mock, "forward_tokens_max", 5);
        mock_set_i64(&s.mock, "ep_size", RANKS);
        mock_set_i64(&s.mock, "ep_rank", rank);
        mock_set_str(&s.mock, "dispatcher", "alltoall");
        mock_set_i64(&s.mock, "capture_routed_experts", 1);
        sample_open(&s);
        ck_assert_int_eq(s.instance->plan.limits.forward_tokens_max, 2);
        memcpy(s.rank_tokens, (int64_t[]){2, 2, 2, 2}, sizeof s.rank_tokens);
        s.step.rank_tokens = s.rank_tokens;
        s.step.tokens = 2;
        s.step.padding = MOXIE_PADDING_MAX_LEN;
        ACCEPTED(&s.said, check(&s, 0));
        ck_assert_int_eq(s.shape.capture_row, (int64_t)2 * rank);
        s.step.rank_tokens = NULL;
        ACCEPTED(&s.said, check(&s, 0));
        ck_assert_int_eq(s.shape.capture_row, (int64_t)2 * rank);
        sample_fini(&s);
    }
}
END_TEST

// The same eight rows, gathered by the host.
START_TEST(local_captures_padding)
{
    struct sample s;

    sample_configure(&s);
    mock_set_i64(&s.mock, "dp_size", 1);
    mock_set_i64(&s.mock, "forward_tokens_max", 5);
    mock_set_i64(&s.mock, "ep_size", RANKS);
    mock_set_str(&s.mock, "dispatcher", "local");
    mock_set_i64(&s.mock, "capture_routed_experts", 1);
    sample_open(&s);
    s.step.tokens = s.instance->plan.limits.forward_tokens_max;
    ck_assert_int_eq(s.step.tokens, 8);
    ACCEPTED(&s.said, check(&s, 1));
    ck_assert_int_eq(s.shape.capture_row, 0);
    s.step.capture_row = 1;
    SAID(&s.said, MOXIE_E_CAPACITY, check(&s, 1), "capture rows 1 to 9", "the 8 rows");
    sample_fini(&s);
}
END_TEST

START_TEST(local_captures_all_ranks)
{
    struct sample s;

    sample_init_local(&s, 1);
    s.step.tokens = 2 * SLICE;
    ACCEPTED(&s.said, check(&s, 1));
    ck_assert_int_eq(s.shape.capture_row, 0);
    s.step.capture_row = 1;
    SAID(&s.said, MOXIE_E_CAPACITY, check(&s, 1), "capture rows 1 to 21", "the 20 rows");
    s.step.tokens = 3;
    s.step.capture_row = 17;
    ACCEPTED(&s.said, check(&s, 1));
    ck_assert_int_eq(s.shape.capture_row, 17);
    sample_fini(&s);
}
END_TEST

START_TEST(without_the_capture_its_row_is_nothing)
{
    struct sample s;

    sample_init(&s, 3, 0);
    s.step.capture_row = 1000;
    ACCEPTED(&s.said, check(&s, 0));
    ck_assert_int_eq(s.shape.capture_row, 0);
    sample_fini(&s);
}
END_TEST

// ---- Batches -----------------------------------------------------------------------------------

struct tensors {
    moxie_batch batch;
    int64_t x_dims[2], k_dims[2], y_dims[2], map_dims[1];
    uint16_t x[TOKENS * HIDDEN], y[TOKENS * HIDDEN];
    int64_t ids[TOKENS * TOP_K];
    float weights[TOKENS * TOP_K];
    int32_t map[8];
};

static void tensors_init(struct tensors *t)
{
    memset(t, 0, sizeof *t);
    memcpy(t->x_dims, (int64_t[]){TOKENS, HIDDEN}, sizeof t->x_dims);
    memcpy(t->y_dims, t->x_dims, sizeof t->y_dims);
    memcpy(t->k_dims, (int64_t[]){TOKENS, TOP_K}, sizeof t->k_dims);
    t->map_dims[0] = 8;
    t->batch = (moxie_batch){
        .struct_size = sizeof t->batch,
        .id_space = MOXIE_IDS_GLOBAL,
        .x = tensor_make(t->x, 2, t->x_dims, NULL, 1u << MOXIE_FORMAT_BF16),
        .ids = tensor_make(t->ids, 2, t->k_dims, NULL, TENSOR_INT64),
        .weights = tensor_make(t->weights, 2, t->k_dims, NULL, 1u << MOXIE_FORMAT_F32),
        .y = tensor_make(t->y, 2, t->y_dims, NULL, 1u << MOXIE_FORMAT_BF16),
        .expert_map = tensor_make(t->map, 1, t->map_dims, NULL, TENSOR_INT32)};
}

static int32_t check_batch(struct sample *s, int local, struct tensors *t)
{
    return step_check_batch(s->instance, local, TOKENS, &t->batch, &s->said.error);
}

START_TEST(batches_that_fit)
{
    struct sample s;
    struct tensors t;

    sample_init(&s, 0, 0);
    tensors_init(&t);
    ACCEPTED(&s.said, check_batch(&s, 0, &t));
    t.batch.expert_map.data = NULL;
    t.batch.ids.dtype.bits = 32;
    t.batch.weights.dtype = (moxie_dtype){MOXIE_DTYPE_BFLOAT, 16, 1};
    t.batch.id_space = MOXIE_IDS_PHYSICAL;
    t.batch.layer = 2;
    ACCEPTED(&s.said, check_batch(&s, 0, &t));
    sample_fini(&s);
}
END_TEST

START_TEST(a_batch_of_nothing)
{
    struct sample s;
    struct tensors t;

    sample_init(&s, 0, 0);
    tensors_init(&t);
    t.x_dims[0] = t.y_dims[0] = t.k_dims[0] = 0;
    t.batch.x.data = t.batch.y.data = t.batch.ids.data = t.batch.weights.data = NULL;
    ACCEPTED(&s.said, step_check_batch(s.instance, 0, 0, &t.batch, &s.said.error));
    SAID(&s.said, MOXIE_E_INVALID, check_batch(&s, 0, &t), "batch.x", "[0, 64]", "[4, 64]");
    sample_fini(&s);
}
END_TEST

START_TEST(layers_spaces_and_streams)
{
    struct sample s;
    struct tensors t;

    sample_init(&s, 0, 0);
    tensors_init(&t);
    t.batch.layer = 3;
    SAID(&s.said, MOXIE_E_INVALID, check_batch(&s, 0, &t), "batch.layer: 3", "0..2", "num_layers");
    t.batch.layer = -1;
    SAID(&s.said, MOXIE_E_INVALID, check_batch(&s, 0, &t), "batch.layer: -1", "0..2");
    t.batch.layer = 0;
    t.batch.id_space = 0;
    SAID(&s.said, MOXIE_E_INVALID, check_batch(&s, 0, &t), "batch.id_space: 0", "_PHYSICAL");
    t.batch.id_space = MOXIE_IDS_LOCAL; // whose?
    SAID(&s.said, MOXIE_E_INVALID, check_batch(&s, 0, &t), "batch.id_space: 3", "_PHYSICAL");
    ACCEPTED(&s.said, check_batch(&s, 1, &t));
    t.batch.id_space = 4;
    SAID(&s.said, MOXIE_E_INVALID, check_batch(&s, 1, &t), "batch.id_space: 4");
    t.batch.id_space = MOXIE_IDS_GLOBAL;
    t.batch.stream = &t;
    SAID(&s.said, MOXIE_E_INVALID, check_batch(&s, 0, &t), "batch.stream", "NULL on the CPU");
    sample_fini(&s);
}
END_TEST

START_TEST(wrong_tensors_are_named)
{
    static const char *const names[] = {"batch.x", "batch.ids", "batch.weights", "batch.y",
                                        "batch.expert_map"};
    struct sample s;
    struct tensors t;

    sample_init(&s, 0, 0);
    tensors_init(&t);
    for (int32_t i = 0; i < 5; i++) {
        moxie_tensor *tensors[] = {&t.batch.x, &t.batch.ids, &t.batch.weights, &t.batch.y,
                                   &t.batch.expert_map};
        moxie_tensor saved = *tensors[i];

        tensors[i]->ndim++;
        SAID(&s.said, MOXIE_E_INVALID, check_batch(&s, 0, &t), names[i], "dimensions");
        *tensors[i] = saved;
        tensors[i]->dtype = (moxie_dtype){MOXIE_DTYPE_FLOAT, 64, 1};
        SAID(&s.said, MOXIE_E_UNSUPPORTED, check_batch(&s, 0, &t), names[i], "64 bits", "want");
        *tensors[i] = saved;
        tensors[i]->device.type = MOXIE_DEVICE_CUDA;
        SAID(&s.said, MOXIE_E_INVALID, check_batch(&s, 0, &t), names[i], "device type 2");
        *tensors[i] = saved;
        tensors[i]->data = NULL;
        if (i < 4) SAID(&s.said, MOXIE_E_INVALID, check_batch(&s, 0, &t), names[i], "NULL");
        *tensors[i] = saved;
    }
    t.k_dims[1] = TOP_K + 1;
    SAID(&s.said, MOXIE_E_INVALID, check_batch(&s, 0, &t), "batch.ids", "[4, 3]", "[4, 2]");
    t.k_dims[1] = TOP_K;
    t.batch.x.dtype = (moxie_dtype){MOXIE_DTYPE_FLOAT, 16, 1}; // input_format is bf16
    SAID(&s.said, MOXIE_E_UNSUPPORTED, check_batch(&s, 0, &t), "batch.x", "want bfloat16");
    sample_fini(&s);
}
END_TEST

START_TEST(results_have_memory_of_their_own)
{
    int64_t strides[2] = {HIDDEN - 1, 1}, wide[2] = {2 * HIDDEN, 1};
    uint16_t both[TOKENS * 2 * HIDDEN];
    struct sample s;
    struct tensors t;

    sample_init(&s, 0, 0);
    tensors_init(&t);
    t.batch.y.data = t.batch.x.data;
    SAID(&s.said, MOXIE_E_INVALID, check_batch(&s, 0, &t), "batch.y overlaps batch.x");
    t.batch.y.data = t.y;
    t.batch.y.strides = strides;
    SAID(&s.said, MOXIE_E_INVALID, check_batch(&s, 0, &t), "batch.y", "overlap");
    strides[0] = 0;
    SAID(&s.said, MOXIE_E_INVALID, check_batch(&s, 0, &t), "batch.y", "overlap");
    // Two halves of one array.
    t.batch.x.data = both;
    t.batch.y.data = both + HIDDEN;
    t.batch.x.strides = t.batch.y.strides = wide;
    ACCEPTED(&s.said, check_batch(&s, 0, &t));
    sample_fini(&s);
}
END_TEST

// What later rounds read is still there.
START_TEST(results_of_rounds_are_apart)
{
    struct sample s;
    struct tensors t;
    const struct step_shape shape = {.tokens_valid = &(const int32_t){1}};

    sample_init(&s, 0, 0);
    tensors_init(&t);
    ACCEPTED(&s.said, step_check_rounds(&shape, &t.batch, &s.said.error));
    t.batch.y.data = (char *)t.batch.ids.data + 4;
    SAID(&s.said, MOXIE_E_INVALID, step_check_rounds(&shape, &t.batch, &s.said.error),
         "batch.y overlaps batch.ids");
    t.batch.y.data = t.batch.weights.data;
    SAID(&s.said, MOXIE_E_INVALID, step_check_rounds(&shape, &t.batch, &s.said.error),
         "batch.y overlaps batch.weights");
    t.batch.y.data = t.batch.expert_map.data;
    SAID(&s.said, MOXIE_E_INVALID, step_check_rounds(&shape, &t.batch, &s.said.error),
         "batch.y overlaps batch.expert_map");
    t.batch.y.data = (void *)(uintptr_t)shape.tokens_valid;
    SAID(&s.said, MOXIE_E_INVALID, step_check_rounds(&shape, &t.batch, &s.said.error),
         "batch.y overlaps step.tokens_valid");
    sample_fini(&s);
}
END_TEST

START_TEST(no_rows_are_anywhere)
{
    struct sample s;
    struct tensors t;
    struct step_rows sent;

    sample_init(&s, 0, 0);
    tensors_init(&t);
    sent = step_rows_of(&t.batch);
    ACCEPTED(&s.said, step_check_rows(&sent, &t.batch, 1, &s.said.error));
    t.batch.x.data = t.batch.y.data = NULL;
    SAID(&s.said, MOXIE_E_INVALID, step_check_rows(&sent, &t.batch, 1, &s.said.error), "batch.y");
    t.x_dims[0] = t.y_dims[0] = t.k_dims[0] = 0;
    ACCEPTED(&s.said, step_check_rows(&sent, &t.batch, 1, &s.said.error));
    sample_fini(&s);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, tokens_up_to_the_bound);
    tcase_add_test(tests, local_needs_no_peers);
    tcase_add_test(tests, lists_name_every_rank);
    tcase_add_test(tests, wrong_lists_are_refused);
    tcase_add_test(tests, words_and_slots);
    tcase_add_test(tests, the_valid_count_is_passed_on);
    tcase_add_test(tests, ranks_share_a_slice);
    tcase_add_test(tests, a_row_past_the_slice_is_refused);
    tcase_add_test(tests, an_odd_bound_has_places_for_all);
    tcase_add_test(tests, padded_ranks_share_a_slice);
    tcase_add_test(tests, local_captures_padding);
    tcase_add_test(tests, local_captures_all_ranks);
    tcase_add_test(tests, without_the_capture_its_row_is_nothing);
    tcase_add_test(tests, batches_that_fit);
    tcase_add_test(tests, a_batch_of_nothing);
    tcase_add_test(tests, layers_spaces_and_streams);
    tcase_add_test(tests, wrong_tensors_are_named);
    tcase_add_test(tests, results_have_memory_of_their_own);
    tcase_add_test(tests, results_of_rounds_are_apart);
    tcase_add_test(tests, no_rows_are_anywhere);
}

SUITE_MAIN("step", 20, add)
