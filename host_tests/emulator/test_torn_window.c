// A window that somebody writes over while the ranks run layers: a peer may write anything there,
// at any time. The numbers may be any, and calls may fail, but each ends in its time and leaves
// alone what is not the ranks', who can go on once nobody does that.

#include "host_tests/gpu/gpu_crew.h"
#include "host_tests/suite.h"
#include "kernels/flags.h"
#include "plugin/instance.h"
#include "plugin/tensor.h"
#include "plugin/transport.h"

#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#define RANKS      3
#define TIMEOUT_MS 200
#define ROUNDS     3
#define TRIES      50 // of what has to work: a machine that does other things may miss the time

struct torn {
    const struct window_layout *layout;
    unsigned char *base; // of rank 0's window
    int64_t few;         // tokens of each rank; 0: its part of the layer's
    int64_t tokens_max;  // 0: as many as there are; else nobody says how many
    int32_t left_out;    // 1: the last rank
    uint64_t seed;
    atomic_int stop;
    atomic_int missed; // 1: a rank's step failed
};

static uint64_t draw(struct torn *torn)
{
    torn->seed ^= torn->seed << 13;
    torn->seed ^= torn->seed >> 7;
    torn->seed ^= torn->seed << 17;
    return torn->seed;
}

// Anything that is not all as it should be.
static uint32_t draw_word(struct torn *torn)
{
    const uint32_t odd[] = {UINT32_MAX, INT_MAX, 0x80000000u, 0, 1, 2, 7, 0x7fc00000u};
    const uint64_t drawn = draw(torn);

    return drawn & 1 ? odd[drawn >> 1 & 7] : (uint32_t)(drawn >> 32);
}

static void spoil_section(struct torn *torn, int64_t first, int64_t end, int32_t words)
{
    for (int32_t i = 0; i < words; i++) {
        const int64_t at = first + (int64_t)(draw(torn) >> 8) % ((end - first) / 4) * 4;

        __atomic_store_n((uint32_t *)(void *)(torn->base + at), draw_word(torn), __ATOMIC_RELAXED);
    }
}

// Mostly what rows are made of; flags, counts and the state seldom, or nothing else would come far.
static void *spoil(void *arg)
{
    struct torn *torn = arg;
    const struct window_layout *w = torn->layout;
    struct flag_state *state = (struct flag_state *)(void *)(torn->base + w->state);

    while (!atomic_load(&torn->stop)) {
        spoil_section(torn, w->rows, w->scales, 16);
        spoil_section(torn, w->ids, w->results, 256);
        if (w->ll < w->bytes && draw(torn) % 4 == 0) spoil_section(torn, w->ll, w->bytes, 8);
        if (draw(torn) % 64 == 0) spoil_section(torn, w->counts, w->state, 8);
        if (draw(torn) % 256 == 0)
            spoil_section(torn, w->state, w->state + (int64_t)sizeof(struct flag_state), 8);
        if (draw(torn) % 1024 == 0) spoil_section(torn, 0, w->counts, 16);
        if (torn->left_out) // who is left out says that all take part
            __atomic_store_n(&state->active, UINT64_MAX, __ATOMIC_RELAXED);
        (void)usleep(50);
    }
    return NULL;
}

static void begin_again(struct gpu_member *member, int32_t ranks)
{
    uint8_t active[MOXIE_RANKS_MAX] = {0};

    for (int32_t rank = 0; rank < ranks; rank++)
        active[rank] = 1;
    gpu_member_meet(member);
    if (member->index < ranks)
        gpu_member_accept(member, dispatcher_set_active_ranks(member->rank.dispatcher, active,
                                                              &member->rank.mock.error));
    gpu_member_meet(member);
}

// A step call by call. Where the window is follows from where a peer's weights are.
static int32_t find_window(struct gpu_member *member)
{
    struct torn *torn = member->crew->arg;
    moxie_batch *batch = &member->batch.batch;
    moxie_dispatcher *dispatcher = member->rank.dispatcher;
    moxie_error *error = &member->rank.mock.error;
    moxie_call call = {.struct_size = sizeof call, .stream = member->stream};
    const moxie_rows *in = NULL, *out = NULL;
    int32_t st = gpu_member_begin(member);

    TRY(st);
    TRY(dispatcher_dispatch_send(dispatcher, batch, error));
    TRY(dispatcher_dispatch_recv(dispatcher, batch, &in, &out, error));
    if (member->index == 0) {
        torn->layout = &member->rank.instance->plan.window;
        torn->base = tensor_data(&in->slabs[1].weights) - torn->layout->weights;
    }
    TRY(runner_run(member->rank.runner, &call, in, out, error));
    TRY(dispatcher_combine_send(dispatcher, batch, error));
    TRY(dispatcher_combine_recv(dispatcher, batch, error));
out:
    return st;
}

static int32_t run_layer(struct gpu_member *member)
{
    int32_t st = gpu_member_begin(member);

    return st == MOXIE_OK ? gpu_member_run(member) : st;
}

// A step ends in its time, whatever it answers.
static int32_t run_step(struct gpu_member *member, int32_t (*step)(struct gpu_member *))
{
    const int64_t began_ns = clock_ns();
    int32_t answer = step(member);

    must(cudaStreamSynchronize(member->stream));
    if (answer == MOXIE_OK) answer = gpu_member_poll(member);
    ck_assert_double_lt(gpu_seconds_since(began_ns), 60.0);
    return answer;
}

// A step that nobody disturbs.
static void run_in_peace(struct gpu_member *member, int32_t ranks,
                         int32_t (*step)(struct gpu_member *))
{
    struct torn *torn = member->crew->arg;
    int missed = 1;

    for (int32_t i = 0; i < TRIES && missed; i++) {
        if (member->index < ranks && run_step(member, step) != MOXIE_OK)
            atomic_store(&torn->missed, 1);
        gpu_member_meet(member);
        missed = atomic_load(&torn->missed);
        begin_again(member, ranks);
        atomic_store(&torn->missed, 0);
        gpu_member_meet(member);
    }
    ck_assert_msg(!missed, "rank %d: %s", member->index, member->rank.mock.text);
}

static void torn_scenario(struct gpu_member *member)
{
    struct torn *torn = member->crew->arg;
    const int32_t ranks = RANKS - torn->left_out;
    pthread_t thread;

    if (torn->few > 0) {
        for (int32_t rank = 0; rank < RANKS; rank++)
            member->rank_tokens[rank] = torn->few;
        gpu_member_take(member, member->index * torn->few, torn->few);
    }
    if (torn->tokens_max > 0) member->step.rank_tokens = NULL;
    run_in_peace(member, RANKS, find_window);
    begin_again(member, ranks);
    if (member->index == 0) ck_assert_int_eq(pthread_create(&thread, NULL, spoil, torn), 0);
    for (int32_t i = 0; i < ROUNDS; i++) {
        if (member->index < ranks) (void)run_step(member, run_layer);
        begin_again(member, ranks);
    }
    if (member->index == 0) {
        atomic_store(&torn->stop, 1);
        ck_assert_int_eq(pthread_join(thread, NULL), 0);
    }
    begin_again(member, ranks);
    run_in_peace(member, ranks, run_layer);
    gpu_member_fetch(member);
}

static void configure(struct gpu_member *member)
{
    const struct torn *torn = member->crew->arg;

    mock_set_i64(&member->rank.mock, "timeout_ms", TIMEOUT_MS);
    if (torn->few > 0) gpu_member_all_tokens(member);
    if (torn->tokens_max > 0)
        mock_set_i64(&member->rank.mock, "forward_tokens_max", torn->tokens_max);
    if (member->crew->fp8) mock_set_str(&member->rank.mock, "dispatch_format", "fp8_block128");
}

// Rows as words, and in slabs; ids of all ranks where no peer writes, and in the window.
static const struct {
    const char *dispatcher;
    int64_t few, tokens_max;
    int32_t left_out, fp8;
} crews[] = {
    {"alltoall", 1, 0, 0, 0}, {"alltoall", 4, 0, 0, 1},   {"allgather", 4, 0, 1, 0},
    {"alltoall", 0, 0, 0, 1}, {"alltoall", 0, 400, 0, 0},
};

START_TEST(a_window_that_is_written_over)
{
    struct torn torn = {.few = crews[_i].few,
                        .tokens_max = crews[_i].tokens_max,
                        .left_out = crews[_i].left_out,
                        .seed = 88172645463325252u};
    struct gpu_crew crew = {.layer_name = "qwen3_moe_a",
                            .ranks = RANKS,
                            .dispatcher = crews[_i].dispatcher,
                            .fp8 = crews[_i].fp8,
                            .configure = configure,
                            .scenario = torn_scenario,
                            .arg = &torn};

    gpu_crew_run(&crew);
    if (!torn.left_out && torn.few == 0) gpu_crew_expect_golden(&crew, 8e-2);
    gpu_crew_fini(&crew);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_loop_test(tests, a_window_that_is_written_over, 0,
                        (int)(sizeof crews / sizeof crews[0]));
}

SUITE_MAIN("torn_window", 240, add)
