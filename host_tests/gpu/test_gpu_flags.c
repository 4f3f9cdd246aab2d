// kernels/cuda/flags.cu alone, over windows that the test writes: what is taken for arrived, whom a
// wait names that ends without, and what ranks are told.

#include "host_tests/gpu/gpu_layer.h"
#include "host_tests/suite.h"
#include "kernels/cuda/cuda.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define RANKS      4
#define OWN        1
#define SLOT       2
#define CAP        9
#define SLAB       40 // ids of a peer's slab: CAP rows of up to four, in whole words of four
#define TOKENS     7
#define GENERATION 3u
#define EPOCH      5u
#define TIMEOUT_NS 400000000
#define LINES      (1 + WORD_COUNT * RANKS)

// A window is its lines, then the counts of three peers.
struct window {
    struct {
        uint64_t value;
        unsigned char rest[FLAG_LINE_BYTES - 8];
    } lines[LINES], counts[RANKS - 1];
};

// Rank OWN of RANKS, all in memory of one device.
struct scene {
    struct window *windows[RANKS]; // device
    struct flag_state *state;
    int32_t *counts;
    int32_t *ids, *peer_ids; // NULL: not wanted
    int32_t top_k;
    struct flag_report *report; // pinned
    cudaStream_t stream;
};

static uint64_t stamp(uint64_t generation, uint64_t epoch)
{
    return generation << FLAG_EPOCH_BITS | epoch;
}

static void *device_zeros(size_t bytes)
{
    void *memory = NULL;

    must(cudaMalloc(&memory, bytes));
    must(cudaMemset(memory, 0, bytes));
    return memory;
}

static uint64_t *line_of(const struct scene *scene, int32_t owner, int32_t word, int32_t source)
{
    return &scene->windows[owner]->lines[1 + word * RANKS + source].value;
}

static void put(uint64_t *at, uint64_t value)
{
    must(cudaMemcpy(at, &value, sizeof value, cudaMemcpyHostToDevice));
}

static uint64_t get(const uint64_t *at)
{
    uint64_t value = 0;

    must(cudaMemcpy(&value, at, sizeof value, cudaMemcpyDeviceToHost));
    return value;
}

static void scene_open(struct scene *scene)
{
    struct flag_state state = {.generation = GENERATION, .active = 15};
    void *report = NULL;

    memset(scene, 0, sizeof *scene);
    for (int32_t r = 0; r < RANKS; r++)
        scene->windows[r] = device_zeros(sizeof **scene->windows);
    state.epochs[SLOT] = EPOCH;
    scene->state = device_zeros(sizeof state);
    must(cudaMemcpy(scene->state, &state, sizeof state, cudaMemcpyHostToDevice));
    scene->counts = gpu_poisoned(RANKS * sizeof *scene->counts);
    must(cudaMallocHost(&report, sizeof *scene->report));
    scene->report = report;
    memset(report, 0, sizeof *scene->report);
    must(cudaStreamCreateWithFlags(&scene->stream, cudaStreamNonBlocking));
    for (int32_t r = 0; r < RANKS; r++)
        put(line_of(scene, OWN, WORD_DISPATCH, r), stamp(GENERATION, EPOCH));
}

static void scene_close(struct scene *scene)
{
    for (int32_t r = 0; r < RANKS; r++)
        must(cudaFree(scene->windows[r]));
    must(cudaFree(scene->state));
    must(cudaFree(scene->counts));
    must(cudaFree(scene->ids));
    must(cudaFree(scene->peer_ids));
    must(cudaFreeHost(scene->report));
    must(cudaStreamDestroy(scene->stream));
}

static uint32_t wait_that(struct scene *scene, int signals)
{
    void *windows[RANKS];
    const struct await_args args = {.state = scene->state,
                                    .peers = signals ? windows : NULL,
                                    .window = scene->windows[OWN],
                                    .beats = scene->windows[OWN],
                                    .peer_beats = windows,
                                    .peer_counts = scene->windows[OWN]->counts,
                                    .counts = scene->counts,
                                    .peer_ids = scene->peer_ids,
                                    .ids = scene->ids,
                                    .peer_ids_slab_bytes = SLAB * 4,
                                    .report = scene->report,
                                    .timeout_ns = TIMEOUT_NS,
                                    .slot = SLOT,
                                    .word = WORD_DISPATCH,
                                    .ranks = RANKS,
                                    .rank = OWN,
                                    .tokens = TOKENS,
                                    .rows_most = CAP,
                                    .top_k = scene->top_k};

    for (int32_t r = 0; r < RANKS; r++)
        windows[r] = scene->windows[r];
    ck_assert_int_eq(kernels_cuda.await(&args, scene->stream), 0);
    must(cudaStreamSynchronize(scene->stream));
    return scene->report->verdict.kind;
}

static uint32_t wait_kernel(struct scene *scene)
{
    return wait_that(scene, 0);
}

static void expect_counts(const struct scene *scene, const int32_t want[RANKS])
{
    int32_t got[RANKS];

    must(cudaMemcpy(got, scene->counts, sizeof got, cudaMemcpyDeviceToHost));
    for (int32_t r = 0; r < RANKS; r++)
        ck_assert_int_eq(got[r], want[r]);
}

static uint32_t failed(const struct scene *scene)
{
    struct flag_state state;

    must(cudaMemcpy(&state, scene->state, sizeof state, cudaMemcpyDeviceToHost));
    return state.failed;
}

// ---- what has arrived --------------------------------------------------------------------------

// Counts of peers 0, 2 and 3 lie at 0, 1 and 2; they are what a peer may have written.
START_TEST(rows_are_counted_when_all_have_come)
{
    struct scene scene;

    scene_open(&scene);
    put(&scene.windows[OWN]->counts[0].value, 4);
    put(&scene.windows[OWN]->counts[1].value, (uint32_t)-3);
    put(&scene.windows[OWN]->counts[2].value, CAP);
    put(line_of(&scene, OWN, WORD_DISPATCH, OWN), 0); // nobody waits for itself
    ck_assert_uint_eq(wait_kernel(&scene), VERDICT_NONE);
    expect_counts(&scene, (const int32_t[]){4, 7, 0, CAP});
    ck_assert_uint_eq(scene.report->rows_received[SLOT], 4 + CAP);
    ck_assert_uint_eq(failed(&scene), 0);
    scene_close(&scene);
}
END_TEST

// Of each peer those of as many rows as it says; the own rank's are left alone. Others have no
// expert, and after a failure none has.
START_TEST(ids_are_taken_with_the_rows)
{
    const int fails = _i % 2, top_k = 3 + _i / 2, slab = CAP * top_k; // by words of one, or four
    struct scene scene;
    int32_t sent[RANKS - 1][SLAB], got[RANKS * SLAB];

    scene_open(&scene);
    scene.top_k = top_k;
    for (int32_t i = 0; i < (RANKS - 1) * SLAB; i++)
        sent[i / SLAB][i % SLAB] = 1000 + i;
    scene.peer_ids = device_zeros(sizeof sent);
    scene.ids = device_zeros(sizeof got);
    must(cudaMemcpy(scene.peer_ids, sent, sizeof sent, cudaMemcpyHostToDevice));
    put(&scene.windows[OWN]->counts[0].value, 4);
    put(&scene.windows[OWN]->counts[1].value, 0);
    put(&scene.windows[OWN]->counts[2].value, fails ? CAP + 1 : CAP);
    ck_assert_uint_eq(wait_kernel(&scene), fails ? VERDICT_ROWS : VERDICT_NONE);
    must(cudaMemcpy(got, scene.ids, sizeof got, cudaMemcpyDeviceToHost));
    for (int32_t rank = 0, peer = 0; rank < RANKS; rank++) {
        const int32_t rows = rank == OWN ? TOKENS : (int32_t[]){4, 0, CAP}[peer];

        for (int32_t i = 0; i < slab; i++)
            ck_assert_int_eq(got[rank * slab + i], fails || i >= rows * top_k ? -1
                                                   : rank == OWN              ? 0
                                                                              : sent[peer][i]);
        peer += rank != OWN;
    }
    scene_close(&scene);
}
END_TEST

// Of those that say so, the first one is told; what a rank that is left out says is not looked at.
START_TEST(more_rows_than_any_rank_has_are_none)
{
    const int left_out = _i == 1;
    struct scene scene;

    scene_open(&scene);
    if (left_out) put(&scene.state->active, 3);
    put(&scene.windows[OWN]->counts[0].value, 4);
    put(&scene.windows[OWN]->counts[1].value, CAP + 1);
    put(&scene.windows[OWN]->counts[2].value, INT32_MAX);
    ck_assert_uint_eq(wait_kernel(&scene), left_out ? VERDICT_NONE : VERDICT_ROWS);
    ck_assert_uint_eq(failed(&scene), !left_out);
    if (left_out) {
        expect_counts(&scene, (const int32_t[]){4, 7, 0, 0});
    } else {
        ck_assert_int_eq(scene.report->verdict.rank, 2);
        ck_assert_int_eq(scene.report->verdict.told_rows, CAP + 1);
        ck_assert_int_eq(scene.report->verdict.rows_most, CAP);
        expect_counts(&scene, (const int32_t[]){0, 0, 0, 0});
        ck_assert_uint_eq(scene.report->rows_received[SLOT], 0);
    }
    scene_close(&scene);
}
END_TEST

// Rows of another round are none of this one's, however few; or else they are those of a peer that
// has gone on, which it has told.
START_TEST(rows_of_another_round_are_none)
{
    const uint64_t second = (uint64_t)1 << 32;
    const int has_gone_on = _i == 1;
    struct scene scene;

    scene_open(&scene);
    if (has_gone_on) {
        put(line_of(&scene, OWN, WORD_ACTIVE, 2), 7);
        put(line_of(&scene, OWN, WORD_GENERATION, 2), GENERATION + 1);
    }
    put(&scene.windows[OWN]->counts[0].value, 4);
    put(&scene.windows[OWN]->counts[1].value, second | 5);
    put(&scene.windows[OWN]->counts[2].value, CAP + 1);
    ck_assert_uint_eq(wait_kernel(&scene), has_gone_on ? VERDICT_MOVED_ON : VERDICT_ROUND);
    ck_assert_uint_eq(failed(&scene), 1);
    ck_assert_int_eq(scene.report->verdict.rank, 2);
    ck_assert_int_eq(scene.report->verdict.told_round, !has_gone_on);
    ck_assert_int_eq(scene.report->verdict.round, 0);
    expect_counts(&scene, (const int32_t[]){0, 0, 0, 0});
    scene_close(&scene);
}
END_TEST

// Who has few rows sends words (ll.h), and this rank would wait for none of its slabs.
START_TEST(flags_of_the_other_way_are_named_at_once)
{
    struct scene scene;

    scene_open(&scene);
    put(line_of(&scene, OWN, WORD_DISPATCH, 0), 0); // not there yet
    put(line_of(&scene, OWN, WORD_DISPATCH, 2), stamp(GENERATION, EPOCH) | FLAG_LL);
    ck_assert_uint_eq(wait_kernel(&scene), VERDICT_WAY);
    ck_assert_int_eq(scene.report->verdict.rank, 2);
    ck_assert_uint_eq(scene.report->verdict.epoch, EPOCH);
    ck_assert_uint_eq(scene.report->verdict.silent, 0);
    ck_assert_uint_eq(failed(&scene), 1);
    expect_counts(&scene, (const int32_t[]){0, 0, 0, 0});
    scene_close(&scene);
}
END_TEST

START_TEST(ranks_left_out_are_not_waited_for)
{
    struct scene scene;

    scene_open(&scene);
    put(&scene.state->active, 7);
    put(line_of(&scene, OWN, WORD_DISPATCH, 3), 0);
    for (int32_t i = 0; i < 3; i++)
        put(&scene.windows[OWN]->counts[i].value, 2);
    ck_assert_uint_eq(wait_kernel(&scene), VERDICT_NONE);
    expect_counts(&scene, (const int32_t[]){2, 7, 2, 0});
    scene_close(&scene);
}
END_TEST

// Another epoch of this generation, before or after, as of a rank that has made other calls; or
// another generation.
START_TEST(flags_of_other_epochs_are_none)
{
    const uint64_t other[] = {stamp(GENERATION, EPOCH - 1), stamp(GENERATION, EPOCH + 1),
                              stamp(GENERATION - 1, EPOCH + 9), stamp(GENERATION + 1, EPOCH)};
    struct scene scene;

    scene_open(&scene);
    put(line_of(&scene, OWN, WORD_DISPATCH, 2), other[_i]);
    ck_assert_uint_eq(wait_kernel(&scene), VERDICT_SILENT);
    ck_assert_int_eq(scene.report->verdict.rank, 2);
    ck_assert_uint_eq(scene.report->verdict.silent, 4);
    ck_assert_uint_eq(scene.report->verdict.word, WORD_DISPATCH);
    ck_assert_uint_eq(scene.report->verdict.epoch, EPOCH);
    ck_assert_uint_eq(scene.report->verdict.generation, GENERATION);
    ck_assert_uint_eq(failed(&scene), 1);
    expect_counts(&scene, (const int32_t[]){0, 0, 0, 0});
    ck_assert_uint_eq(scene.report->rows_received[SLOT], 0);
    scene_close(&scene);
}
END_TEST

// ---- whom a wait names -------------------------------------------------------------------------

struct beater {
    const struct scene *scene;
    uint64_t ranks; // heard all the time
    _Atomic int32_t stop;
};

static void *beat(void *arg)
{
    struct beater *beater = arg;
    const struct timespec pause = {.tv_nsec = TIMEOUT_NS / 40};

    for (uint64_t value = 1; !beater->stop; value++) {
        for (int32_t r = 0; r < RANKS; r++)
            if ((beater->ranks >> r & 1) != 0)
                put(line_of(beater->scene, OWN, WORD_BEAT, r), value);
        (void)nanosleep(&pause, NULL);
    }
    return NULL;
}

// Ranks 0 and 3 owe their flags. Of those that are heard, none is named.
START_TEST(who_waits_itself_is_not_named)
{
    static const struct {
        uint64_t heard;
        uint32_t kind;
        int32_t rank;
    } rows[] = {{0, VERDICT_SILENT, 0},
                {1, VERDICT_SILENT, 3},
                {8, VERDICT_SILENT, 0},
                {9, VERDICT_ALL_WAIT, -1}};
    struct scene scene;
    struct beater beater = {.scene = &scene, .ranks = rows[_i].heard};
    pthread_t thread;

    scene_open(&scene);
    put(line_of(&scene, OWN, WORD_DISPATCH, 0), 0);
    put(line_of(&scene, OWN, WORD_DISPATCH, 3), 0);
    ck_assert_int_eq(pthread_create(&thread, NULL, beat, &beater), 0);
    ck_assert_uint_eq(wait_kernel(&scene), rows[_i].kind);
    beater.stop = 1;
    ck_assert_int_eq(pthread_join(thread, NULL), 0);
    ck_assert_int_eq(scene.report->verdict.rank, rows[_i].rank);
    ck_assert_uint_eq(scene.report->verdict.silent, 9);
    // This rank has told all that it waits: the one that has come may wait for it elsewhere.
    ck_assert_uint_ne(get(line_of(&scene, 0, WORD_BEAT, OWN)), 0);
    ck_assert_uint_ne(get(line_of(&scene, 3, WORD_BEAT, OWN)), 0);
    ck_assert_uint_ne(get(line_of(&scene, 2, WORD_BEAT, OWN)), 0);
    scene_close(&scene);
}
END_TEST

START_TEST(who_has_gone_on_is_named_at_once)
{
    static const struct {
        uint64_t active, told;
        uint32_t generation, kind;
    } rows[] = {{15, 12, GENERATION, VERDICT_LEFT_OUT},
                {15, 6, GENERATION + 1, VERDICT_MOVED_ON},
                {7, 15, GENERATION, VERDICT_MASKS},
                {15, 6, GENERATION, VERDICT_MOVED_ON}, // of which the generation is told next
                {7, 12, GENERATION - 1, VERDICT_LEFT_OUT},
                {7, 15, GENERATION - 1, VERDICT_SILENT}}; // of before this rank's
    const int at_once = rows[_i].kind != VERDICT_SILENT;
    struct scene scene;

    scene_open(&scene);
    put(&scene.state->active, rows[_i].active);
    if (at_once) put(line_of(&scene, OWN, WORD_DISPATCH, 0), 0); // silent, but rank 2 tells why
    put(line_of(&scene, OWN, WORD_DISPATCH, 2), 0);
    put(line_of(&scene, OWN, WORD_ACTIVE, 2), rows[_i].told);
    put(line_of(&scene, OWN, WORD_GENERATION, 2), rows[_i].generation);
    ck_assert_uint_eq(wait_kernel(&scene), rows[_i].kind);
    ck_assert_int_eq(scene.report->verdict.rank, 2);
    ck_assert_uint_eq(scene.report->verdict.told_active, at_once ? rows[_i].told : 0);
    ck_assert_uint_eq(scene.report->verdict.told_generation, at_once ? rows[_i].generation : 0);
    ck_assert_uint_eq(failed(&scene), 1);
    scene_close(&scene);
}
END_TEST

// The first failure stands, and waits after it do nothing.
START_TEST(a_failure_sticks)
{
    struct scene scene;

    scene_open(&scene);
    put(line_of(&scene, OWN, WORD_DISPATCH, 2), 0);
    ck_assert_uint_eq(wait_kernel(&scene), VERDICT_SILENT);
    put(line_of(&scene, OWN, WORD_DISPATCH, 0), 0);
    ck_assert_uint_eq(wait_kernel(&scene), VERDICT_SILENT);
    ck_assert_int_eq(scene.report->verdict.rank, 2);
    put(line_of(&scene, OWN, WORD_DISPATCH, 0), stamp(GENERATION, EPOCH));
    put(line_of(&scene, OWN, WORD_DISPATCH, 2), stamp(GENERATION, EPOCH));
    (void)wait_kernel(&scene);
    expect_counts(&scene, (const int32_t[]){0, 0, 0, 0});
    scene_close(&scene);
}
END_TEST

// ---- what ranks are told -----------------------------------------------------------------------

START_TEST(a_signal_goes_to_every_active_peer)
{
    const int32_t word = _i == 0 ? WORD_DISPATCH : WORD_COMBINE;
    const uint64_t epoch = EPOCH + (_i == 0); // a dispatch begins the next one
    void *peers[RANKS];
    struct scene scene;
    struct signal_args args = {
        .peers = peers, .slot = SLOT, .word = word, .ranks = RANKS, .rank = OWN};
    const uint32_t fails = 1;

    scene_open(&scene);
    args.state = scene.state;
    for (int32_t r = 0; r < RANKS; r++)
        peers[r] = scene.windows[r];
    put(&scene.state->active, 11);
    put(line_of(&scene, OWN, word, OWN), 0);
    ck_assert_int_eq(kernels_cuda.signal(&args, scene.stream), 0);
    must(cudaStreamSynchronize(scene.stream));
    ck_assert_uint_eq(get(&scene.state->epochs[SLOT]), epoch);
    for (int32_t r = 0; r < RANKS; r++)
        ck_assert_uint_eq(get(line_of(&scene, r, word, OWN)),
                          r == OWN || r == 2 ? 0 : stamp(GENERATION, epoch));
    must(cudaMemcpy(&scene.state->failed, &fails, sizeof fails, cudaMemcpyHostToDevice));
    ck_assert_int_eq(kernels_cuda.signal(&args, scene.stream), 0);
    must(cudaStreamSynchronize(scene.stream));
    ck_assert_uint_eq(get(&scene.state->epochs[SLOT]), epoch);
    scene_close(&scene);
}
END_TEST

// The wait is for the epoch that it begins; of a state that has failed it tells nobody, nor takes
// what an earlier epoch's flags tell.
START_TEST(a_wait_signals_first)
{
    const int fails = _i == 1;
    const uint32_t told = 1;
    struct scene scene;

    scene_open(&scene);
    put(&scene.state->active, 11);
    put(&scene.windows[OWN]->counts[0].value, 4);
    if (fails) must(cudaMemcpy(&scene.state->failed, &told, sizeof told, cudaMemcpyHostToDevice));
    for (int32_t r = 0; r < RANKS && !fails; r++)
        put(line_of(&scene, OWN, WORD_DISPATCH, r), stamp(GENERATION, EPOCH + 1));
    ck_assert_uint_eq(wait_that(&scene, 1), VERDICT_NONE);
    ck_assert_uint_eq(get(&scene.state->epochs[SLOT]), fails ? EPOCH : EPOCH + 1);
    for (int32_t r = 0; r < RANKS; r++)
        if (r != OWN)
            ck_assert_uint_eq(get(line_of(&scene, r, WORD_DISPATCH, OWN)),
                              fails || r == 2 ? 0 : stamp(GENERATION, EPOCH + 1));
    expect_counts(&scene, fails ? (const int32_t[]){0, 0, 0, 0} : (const int32_t[]){4, 7, 0, 0});
    ck_assert_uint_eq(scene.report->rows_received[SLOT], fails ? 0 : 4);
    if (!fails) {
        for (int32_t r = 0; r < RANKS; r++)
            put(line_of(&scene, OWN, WORD_DISPATCH, r), stamp(GENERATION, EPOCH + 2));
        ck_assert_uint_eq(wait_that(&scene, 1), VERDICT_NONE);
        ck_assert_uint_eq(scene.report->rows_received[SLOT], 8);
    }
    scene_close(&scene);
}
END_TEST

START_TEST(a_generation_is_told_to_all)
{
    void *peers[RANKS];
    struct scene scene;
    struct regroup_args args = {.peers = peers,
                                .generation = GENERATION + 1,
                                .active = 3,
                                .slot = SLOT,
                                .ranks = RANKS,
                                .rank = OWN};
    struct flag_state state;

    scene_open(&scene);
    put(line_of(&scene, OWN, WORD_DISPATCH, 0), 0);
    (void)wait_kernel(&scene);
    put(&scene.state->epochs[0], 77);         // another slot's
    put(&scene.state->returned[SLOT], EPOCH); // its last layer came as words
    args.state = scene.state;
    for (int32_t r = 0; r < RANKS; r++)
        peers[r] = scene.windows[r];
    ck_assert_int_eq(kernels_cuda.regroup(&args, scene.stream), 0);
    must(cudaStreamSynchronize(scene.stream));
    must(cudaMemcpy(&state, scene.state, sizeof state, cudaMemcpyDeviceToHost));
    ck_assert_uint_eq(state.generation, GENERATION + 1);
    ck_assert_uint_eq(state.active, 3);
    ck_assert_uint_eq(state.epochs[SLOT], 0);
    ck_assert_uint_eq(state.epochs[0], 77);
    ck_assert_uint_eq(state.returned[SLOT], 0);
    ck_assert_uint_eq(state.failed, 0);
    for (int32_t r = 0; r < RANKS; r++) {
        ck_assert_uint_eq(get(line_of(&scene, r, WORD_ACTIVE, OWN)), r == OWN ? 0 : 3);
        ck_assert_uint_eq(get(line_of(&scene, r, WORD_GENERATION, OWN)),
                          r == OWN ? 0 : GENERATION + 1);
    }
    scene_close(&scene);
}
END_TEST

static void tests(TCase *cases)
{
    tcase_add_test(cases, rows_are_counted_when_all_have_come);
    tcase_add_loop_test(cases, ids_are_taken_with_the_rows, 0, 4);
    tcase_add_loop_test(cases, more_rows_than_any_rank_has_are_none, 0, 2);
    tcase_add_loop_test(cases, rows_of_another_round_are_none, 0, 2);
    tcase_add_test(cases, flags_of_the_other_way_are_named_at_once);
    tcase_add_test(cases, ranks_left_out_are_not_waited_for);
    tcase_add_loop_test(cases, flags_of_other_epochs_are_none, 0, 4);
    tcase_add_loop_test(cases, who_waits_itself_is_not_named, 0, 4);
    tcase_add_loop_test(cases, who_has_gone_on_is_named_at_once, 0, 6);
    tcase_add_test(cases, a_failure_sticks);
    tcase_add_loop_test(cases, a_signal_goes_to_every_active_peer, 0, 2);
    tcase_add_loop_test(cases, a_wait_signals_first, 0, 2);
    tcase_add_test(cases, a_generation_is_told_to_all);
}

int main(void)
{
    return gpu_suite("gpu_flags", 1, tests);
}
