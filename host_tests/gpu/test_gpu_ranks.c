// Several ranks, each with a GPU, over windows that all map or, built with GPU_TRANSPORT, over
// NCCL: both push dispatchers, any number of tokens, rounds, fp8 on the way, what is counted.

#include "host_tests/crew.h"
#include "host_tests/gpu/gpu_crew.h"
#include "host_tests/suite.h"
#include "plugin/tensor.h"
#include "plugin/transport_meeting.h"

#include <stdlib.h>
#include <string.h>

#ifndef REPEATS
#define REPEATS 100 // of a forward that must give the same bits
#endif

#ifndef RANKS_LEAST
#define RANKS_LEAST 1 // of golden_layers
#endif

static const char *const dispatchers[] = {"alltoall", "allgather"};

// ---- layers ------------------------------------------------------------------------------------

START_TEST(golden_layers)
{
    static const int32_t ranks[] = {1, 2, 3, 4, 8};

    for (int32_t d = 0; d < 2; d++) {
        for (size_t i = 0; i < sizeof ranks / sizeof ranks[0]; i++) {
            struct gpu_crew crew = {.layer_name = gpu_layers[_i],
                                    .ranks = ranks[i],
                                    .dispatcher = dispatchers[d],
                                    .scenario = gpu_member_forward};

            if (ranks[i] < RANKS_LEAST || ranks[i] > gpu_crew_ranks(ranks[i])) continue;
            gpu_crew_run(&crew);
            gpu_crew_expect_golden(&crew, 5e-3);
            gpu_crew_fini(&crew);
        }
    }
}
END_TEST

static void fp8_rows(struct gpu_member *member)
{
    mock_set_str(&member->rank.mock, "dispatch_format", "fp8_block128");
}

// fp8 weights with rows of 16 bits and of fp8: quantised before or on the way, the same bits.
START_TEST(fp8_on_the_way)
{
    struct gpu_crew crew = {.layer_name = gpu_layers[_i],
                            .ranks = gpu_crew_ranks(3),
                            .dispatcher = "alltoall",
                            .fp8 = 1,
                            .scenario = gpu_member_forward};
    struct gpu_crew quantised = crew;

    quantised.configure = fp8_rows;
    gpu_crew_run(&crew);
    gpu_crew_run(&quantised);
    gpu_crew_expect_golden(&crew, 8e-2);
    ck_assert_mem_eq(crew.y, quantised.y,
                     (size_t)(crew.layer.tokens * crew.layer.hidden) * sizeof(float));
    gpu_crew_fini(&crew);
    gpu_crew_fini(&quantised);
}
END_TEST

// One GPU with all experts: what several ranks are compared with.
static float *one_rank_of(const char *layer_name, int32_t mxfp4)
{
    struct gpu_crew crew = {.layer_name = layer_name,
                            .ranks = 1,
                            .dispatcher = "local",
                            .mxfp4 = mxfp4,
                            .scenario = gpu_member_forward};
    float *y;

    gpu_crew_run(&crew);
    y = crew.y;
    crew.y = NULL;
    gpu_crew_fini(&crew);
    return y;
}

static float *one_rank(const char *layer_name)
{
    return one_rank_of(layer_name, 0);
}

// One token of few takes one launch, and of few tokens for each expert x is multiplied in pieces,
// so that one GPU and several round otherwise.
START_TEST(mxfp4_over_ranks)
{
    struct gpu_crew crew = {.layer_name = _i < 2 ? "qwen3_moe_a" : "qwen3_moe_t1",
                            .ranks = gpu_crew_ranks(3),
                            .dispatcher = dispatchers[_i % 2],
                            .mxfp4 = 1,
                            .scenario = gpu_member_forward};
    float *one = one_rank_of(crew.layer_name, 1);

    gpu_crew_run(&crew);
    gpu_crew_expect_golden(&crew, 0.25); // of weights that were not rounded
    ck_assert_double_le(crew_difference(crew.y, one, crew.layer.tokens * crew.layer.hidden), 5e-3);
    free(one);
    gpu_crew_fini(&crew);
}
END_TEST

// The scenario compares with that, which is the crew's arg.
static void run_beside_one(struct gpu_crew *crew)
{
    float *one = one_rank(crew->layer_name);

    crew->arg = one;
    gpu_crew_run(crew);
    free(one);
    gpu_crew_fini(crew);
}

static void repeat_scenario(struct gpu_member *member)
{
    size_t bytes = (size_t)(member->tokens * member->crew->layer.hidden) * sizeof(float);
    float *first = malloc(bytes + 1);

    ck_assert_ptr_nonnull(first);
    gpu_member_forward(member);
    memcpy(first, member->y, bytes);
    for (int32_t i = 0; i < REPEATS; i++) {
        gpu_member_forward(member);
        ck_assert_mem_eq(first, member->y, bytes);
    }
    free(first);
}

START_TEST(the_same_bits_every_time)
{
    struct gpu_crew crew = {.layer_name = "qwen3_moe_a",
                            .ranks = gpu_crew_ranks(3),
                            .dispatcher = dispatchers[_i],
                            .scenario = repeat_scenario};
    float *one = one_rank(crew.layer_name);

    gpu_crew_run(&crew);
    ck_assert_double_le(crew_difference(crew.y, one, crew.layer.tokens * crew.layer.hidden), 1e-5);
    free(one);
    gpu_crew_fini(&crew);
}
END_TEST

// ---- tokens ------------------------------------------------------------------------------------

// In step i rank i % ranks has all tokens, and the others have none.
static void idle_scenario(struct gpu_member *member)
{
    const struct gpu_crew *crew = member->crew;

    for (int32_t i = 0; i < 2 * crew->ranks; i++) {
        for (int32_t rank = 0; rank < crew->ranks; rank++)
            member->rank_tokens[rank] = rank == i % crew->ranks ? crew->layer.tokens : 0;
        gpu_member_meet(member);
        if (member->index == i % crew->ranks)
            memset(crew->y, 0xff, (size_t)(crew->layer.tokens * crew->layer.hidden) * 4);
        gpu_member_take(member, 0, member->rank_tokens[member->index]);
        // Where nothing lies, it may lie anywhere.
        member->batch.batch.x.byte_offset = member->index == i % crew->ranks ? 0 : 2;
        gpu_member_forward(member);
        if (member->index == i % crew->ranks)
            ck_assert_double_le(golden_error(crew->y, &crew->layer.want), 5e-3);
        gpu_member_meet(member);
    }
}

START_TEST(ranks_without_tokens)
{
    struct gpu_crew crew = {.layer_name = "qwen3_moe_a",
                            .ranks = gpu_crew_ranks(3),
                            .dispatcher = dispatchers[_i],
                            .configure = gpu_member_all_tokens,
                            .scenario = idle_scenario};

    gpu_crew_run(&crew);
    gpu_crew_fini(&crew);
}
END_TEST

// The same tokens as words (kernels/ll.h), and, when nobody says that they are few, as slabs; more
// than one launch for the layer takes, which sums in another order.
static void two_ways_scenario(struct gpu_member *member)
{
    const struct gpu_crew *crew = member->crew;
    const struct plan *plan = &member->rank.instance->plan;
    const int64_t few = ll_rows(crew->ranks, plan->limits.hidden);
    size_t bytes = (size_t)(few * crew->layer.hidden) * sizeof(float);
    float *as_words = malloc(bytes + 1);

    ck_assert_ptr_nonnull(as_words);
    ck_assert_int_eq(plan->window.ll_rows, strcmp(GPU_TRANSPORT, "nccl") == 0 ? 0 : few);
    ck_assert_int_gt(few * crew->ranks, LAYER_TOKENS);
    ck_assert_int_gt(plan->limits.tokens_max, few);
    for (int32_t rank = 0; rank < crew->ranks; rank++)
        member->rank_tokens[rank] = few - rank;
    gpu_member_take(member, member->index * few, member->rank_tokens[member->index]);
    bytes = (size_t)(member->tokens * crew->layer.hidden) * sizeof(float);
    for (int32_t i = 0; i < 3; i++) {
        member->step.rank_tokens = member->rank_tokens;
        gpu_member_forward(member);
        memcpy(as_words, member->y, bytes);
        member->step.rank_tokens = NULL;
        gpu_member_forward(member);
        ck_assert_mem_eq(as_words, member->y, bytes);
    }
    free(as_words);
}

START_TEST(few_rows_have_the_bits_of_many)
{
    struct gpu_crew crew = {.layer_name = _i < 2 ? "qwen3_moe_a" : gpu_layers[0],
                            .ranks = gpu_crew_ranks(2),
                            .dispatcher = dispatchers[_i % 2],
                            .fp8 = _i >= 2,
                            .configure = _i < 2 ? gpu_member_all_tokens : fp8_rows,
                            .scenario = two_ways_scenario};

    gpu_crew_run(&crew);
    gpu_crew_fini(&crew);
}
END_TEST

static void few_rows_a_round(struct gpu_member *member)
{
    mock_set_i64(&member->rank.mock, "max_dispatch_tokens_per_rank", 3);
    mock_set_i64(&member->rank.mock, "dispatch_rounds_max", 64);
}

START_TEST(rounds)
{
    struct gpu_crew crew = {.layer_name = "mixtral_a",
                            .ranks = gpu_crew_ranks(3),
                            .dispatcher = "alltoall",
                            .configure = few_rows_a_round,
                            .scenario = gpu_member_forward};

    gpu_crew_run(&crew);
    gpu_crew_expect_golden(&crew, 5e-3);
    gpu_crew_fini(&crew);
}
END_TEST

// Rank 0 alone has tokens, of more than a round: the others say in each that they bring none.
static void lone_scenario(struct gpu_member *member)
{
    const struct gpu_crew *crew = member->crew;

    ck_assert_int_gt(crew->parts[0], member->rank.instance->plan.limits.tokens_max);
    for (int32_t rank = 0; rank < crew->ranks; rank++)
        member->rank_tokens[rank] = rank == 0 ? crew->parts[0] : 0;
    gpu_member_take(member, 0, member->rank_tokens[member->index]);
    gpu_member_forward(member);
    ck_assert_double_le(crew_difference(member->y, crew->arg, member->tokens * crew->layer.hidden),
                        5e-3);
}

START_TEST(rounds_of_one_rank)
{
    struct gpu_crew crew = {.layer_name = "mixtral_a",
                            .ranks = gpu_crew_ranks(3),
                            .dispatcher = "alltoall",
                            .configure = few_rows_a_round,
                            .scenario = lone_scenario};

    run_beside_one(&crew);
}
END_TEST

// Steps in one dispatcher in which every rank has 0, 1, cap - 1 or cap tokens, all of them alike
// and in turn, and refusals of one more between them.
#define EDGE_CAP 3

static void edge_cap(struct gpu_member *member)
{
    mock_set_i64(&member->rank.mock, "forward_tokens_max", EDGE_CAP);
}

static void edge_scenario(struct gpu_member *member)
{
    static const int64_t counts[] = {0, 1, EDGE_CAP - 1, EDGE_CAP};
    const struct gpu_crew *crew = member->crew;
    const float *want = (const float *)crew->arg + member->index * EDGE_CAP * crew->layer.hidden;

    for (int32_t mix = 0; mix < 4 * 4 * 4; mix++) {
        for (int32_t rank = 0; rank < crew->ranks; rank++)
            member->rank_tokens[rank] = counts[mix >> 2 * rank & 3];
        gpu_member_take(member, member->index * EDGE_CAP, member->rank_tokens[member->index]);
        gpu_member_forward(member);
        // So few tokens go in one launch, which sums in another order.
        ck_assert_double_le(crew_difference(member->y, want, member->tokens * crew->layer.hidden),
                            5e-3);
        member->step.tokens = member->rank_tokens[member->index] = EDGE_CAP + 1;
        ck_assert_int_eq(gpu_member_begin(member), MOXIE_E_CAPACITY);
    }
}

START_TEST(tokens_at_the_edges)
{
    struct gpu_crew crew = {.layer_name = "qwen3_moe_a",
                            .ranks = gpu_crew_ranks(3),
                            .dispatcher = dispatchers[_i],
                            .configure = edge_cap,
                            .scenario = edge_scenario};

    run_beside_one(&crew);
}
END_TEST

// Few ids of all ranks follow each other, where the products may count them.
static void expect_few_ids(const moxie_rows *in, int64_t top_k)
{
    const int32_t *first = in->slabs[0].ids.data;
    int64_t cap = 0;

    for (uint32_t i = 0; i < in->slabs_count; i++)
        if (in->slabs[i].ids.shape[0] > cap) cap = in->slabs[i].ids.shape[0];
    for (uint32_t i = 0; i < in->slabs_count; i++)
        ck_assert_ptr_eq(in->slabs[i].ids.data, first + i * cap * top_k);
}

// A step call by call; of each rank so many rows come.
static void expect_rows(struct gpu_member *member, const int64_t *rows_wanted)
{
    const struct gpu_crew *crew = member->crew;
    moxie_batch *batch = &member->batch.batch;
    moxie_dispatcher *dispatcher = member->rank.dispatcher;
    moxie_error *error = &member->rank.mock.error;
    moxie_call call = {.struct_size = sizeof call, .stream = member->stream};
    const moxie_rows *in = NULL, *out = NULL;
    int32_t rows[MOXIE_RANKS_MAX];

    gpu_member_accept(member, gpu_member_begin(member));
    gpu_member_accept(member, dispatcher_dispatch_send(dispatcher, batch, error));
    gpu_member_accept(member, dispatcher_dispatch_recv(dispatcher, batch, &in, &out, error));
    must(cudaStreamSynchronize(member->stream));
    must(cudaMemcpy(rows, in->counts.data, (size_t)crew->ranks * sizeof *rows,
                    cudaMemcpyDeviceToHost));
    for (int32_t rank = 0; rank < crew->ranks; rank++)
        ck_assert_int_eq(rows[rank], rows_wanted[rank]);
    expect_few_ids(in, batch->ids.shape[1]);
    gpu_member_accept(member, runner_run(member->rank.runner, &call, in, out, error));
    gpu_member_accept(member, dispatcher_combine_send(dispatcher, batch, error));
    gpu_member_accept(member, dispatcher_combine_recv(dispatcher, batch, error));
    gpu_member_fetch(member);
}

// The longest rank's rows are reported by all; those that are nobody's have no expert.
static void padded_scenario(struct gpu_member *member)
{
    int64_t rows[MOXIE_RANKS_MAX];

    for (int32_t rank = 0; rank < member->crew->ranks; rank++)
        rows[rank] = rank == member->index ? member->tokens : member->crew->parts[0];
    member->step.padding = MOXIE_PADDING_MAX_LEN;
    expect_rows(member, rows);
}

START_TEST(padding_to_the_longest)
{
    struct gpu_crew crew = {.layer_name = "mixtral_a",
                            .ranks = 4,
                            .dispatcher = "allgather",
                            .scenario = padded_scenario};

    gpu_crew_run(&crew);
    ck_assert_int_ne(crew.parts[0], crew.parts[3]);
    gpu_crew_expect_golden(&crew, 5e-3);
    gpu_crew_fini(&crew);
}
END_TEST

// So few that one launch does all of the layer, as words or in slabs: every block reads the ids.
static void token_each(struct gpu_member *member)
{
    const struct gpu_crew *crew = member->crew;
    const float *want = (const float *)crew->arg + member->index * crew->layer.hidden;

    for (int32_t rank = 0; rank < crew->ranks; rank++)
        member->rank_tokens[rank] = 1;
    gpu_member_take(member, member->index, 1);
    expect_rows(member, member->rank_tokens);
    ck_assert_double_le(crew_difference(member->y, want, crew->layer.hidden), 5e-3);
}

START_TEST(ids_of_a_token_each_are_where_no_peer_writes)
{
    struct gpu_crew crew = {.layer_name = "qwen3_moe_a",
                            .ranks = gpu_crew_ranks(_i),
                            .dispatcher = "allgather",
                            .scenario = token_each};

    run_beside_one(&crew);
}
END_TEST

// ---- what is counted ---------------------------------------------------------------------------

static void count_scenario(struct gpu_member *member)
{
    const moxie_plan *plan = NULL;
    moxie_stats before, after;
    uint64_t planned = 0;

    gpu_member_accept(member,
                      instance_plan(member->rank.instance, &plan, &member->rank.mock.error));
    for (uint64_t i = 0; i < plan->buffers_count; i++)
        planned += plan->buffers[i].bytes_mapped;
    instance_stats(member->rank.instance, &before);
    ck_assert_uint_eq(before.bytes_allocated, planned);
    ck_assert_uint_eq(before.rows_sent, 0);
    gpu_member_forward(member);
    gpu_member_forward(member);
    instance_stats(member->rank.instance, &after);
    ck_assert_uint_eq(after.bytes_allocated, planned);
    // allgather: every row to all peers, and theirs come here.
    ck_assert_uint_eq(after.rows_sent, 2 * (uint64_t)((member->crew->ranks - 1) * member->tokens));
    ck_assert_uint_eq(after.rows_received,
                      2 * (uint64_t)(member->crew->layer.tokens - member->tokens));
    // Since open, whoever has moved them.
    before = after;
    dispatcher_destroy(member->rank.dispatcher);
    member->rank.dispatcher = NULL;
    instance_stats(member->rank.instance, &after);
    ck_assert_uint_eq(after.rows_sent, before.rows_sent);
    ck_assert_uint_eq(after.rows_received, before.rows_received);
}

START_TEST(rows_and_bytes_are_counted)
{
    struct gpu_crew crew = {.layer_name = "mixtral_a",
                            .ranks = gpu_crew_ranks(3),
                            .dispatcher = "allgather",
                            .scenario = count_scenario};

    gpu_crew_run(&crew);
    gpu_crew_fini(&crew);
}
END_TEST

static void count_load(struct gpu_member *member)
{
    mock_set_i64(&member->rank.mock, "count_expert_load", 1);
}

static void load_scenario(struct gpu_member *member)
{
    const struct layer *layer = &member->crew->layer;
    const struct limits *limits = &member->rank.instance->plan.limits;
    const int32_t *ids = (const int32_t *)(const void *)layer->ids.data;
    moxie_captured captured = {.struct_size = sizeof captured};
    int64_t load[64] = {0}, want[64] = {0};

    gpu_member_forward(member);
    gpu_member_forward(member);
    gpu_member_accept(
        member, instance_captured(member->rank.instance, &captured, &member->rank.mock.error));
    ck_assert_int_eq(captured.load.device.type, MOXIE_DEVICE_CUDA);
    ck_assert_int_le(limits->experts_local, 64);
    must(cudaMemcpy(load, captured.load.data, (size_t)limits->experts_local * sizeof *load,
                    cudaMemcpyDeviceToHost));
    for (int64_t i = 0; i < layer->tokens * layer->top_k; i++)
        if (ids[i] >= limits->experts_first &&
            ids[i] - limits->experts_first < limits->experts_local)
            want[ids[i] - limits->experts_first] += 2;
    ck_assert_mem_eq(load, want, sizeof load);
}

START_TEST(expert_load_is_counted)
{
    struct gpu_crew crew = {.layer_name = "qwen3_moe_a",
                            .ranks = gpu_crew_ranks(3),
                            .dispatcher = "alltoall",
                            .configure = count_load,
                            .scenario = load_scenario};

    gpu_crew_run(&crew);
    gpu_crew_fini(&crew);
}
END_TEST

// ---- hosts apart -------------------------------------------------------------------------------

static int32_t (*gather)(void *ctx, const void *send, void *recv, uint64_t bytes);

// Rank 1 says that it is on another host.
static int32_t gather_from_afar(void *ctx, const void *send, void *recv, uint64_t bytes)
{
    struct meeting_message message;

    if (bytes != sizeof message) return gather(ctx, send, recv, bytes);
    memcpy(&message, send, sizeof message);
    if (message.rank == 1) message.identity.boot_id[0] ^= 1;
    return gather(ctx, &message, recv, bytes);
}

static void go_afar(struct gpu_member *member)
{
    gather = member->rank.mock.host.all_gather;
    member->rank.mock.host.all_gather = gather_from_afar;
}

static void expect_advice(struct gpu_member *member, int32_t answer)
{
    ck_assert_int_eq(answer, MOXIE_E_UNAVAILABLE);
    ck_assert_int_eq(member->rank.mock.error.rank, 1);
    ck_assert_ptr_nonnull(strstr(member->rank.mock.text, "rank 1 is on another host than rank 0"));
    ck_assert_ptr_nonnull(strstr(member->rank.mock.text, "or set transport to nccl"));
}

// Windows cannot be mapped there, and the answer says what can be done; NCCL does not mind.
START_TEST(ranks_of_another_host)
{
    struct gpu_crew crew = {.layer_name = "mixtral_a",
                            .ranks = gpu_crew_ranks(3),
                            .dispatcher = "alltoall",
                            .configure = go_afar,
                            .scenario = gpu_member_forward};

    if (strcmp(GPU_TRANSPORT, "nccl") != 0) crew.created = expect_advice;
    gpu_crew_run(&crew);
    if (crew.created == NULL) gpu_crew_expect_golden(&crew, 5e-3);
    gpu_crew_fini(&crew);
}
END_TEST

static void tests(TCase *cases)
{
    tcase_add_loop_test(cases, golden_layers, 0, GPU_LAYERS);
    tcase_add_loop_test(cases, fp8_on_the_way, 0, GPU_LAYERS_FP8);
    tcase_add_loop_test(cases, mxfp4_over_ranks, 0, 4);
    tcase_add_loop_test(cases, the_same_bits_every_time, 0, 2);
    tcase_add_loop_test(cases, ranks_without_tokens, 0, 2);
    tcase_add_loop_test(cases, tokens_at_the_edges, 0, 2);
    // Two or three have parts of one length.
    if (gpu_devices() >= 4) tcase_add_test(cases, padding_to_the_longest);
    tcase_add_loop_test(cases, ids_of_a_token_each_are_where_no_peer_writes, LL_RANKS_MAX,
                        LL_RANKS_MAX + 2);
    tcase_add_loop_test(cases, few_rows_have_the_bits_of_many, 0, 4);
    tcase_add_test(cases, rounds);
    tcase_add_test(cases, rounds_of_one_rank);
    tcase_add_test(cases, rows_and_bytes_are_counted);
    tcase_add_test(cases, expert_load_is_counted);
    tcase_add_test(cases, ranks_of_another_host);
}

int main(void)
{
    return gpu_suite("gpu_ranks", 2, tests);
}
