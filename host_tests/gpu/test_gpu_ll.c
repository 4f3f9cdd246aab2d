// kernels/cuda/ll.cu alone, over windows that the test writes: which words are taken, and what
// becomes of them; whom a wait names that ends without; and which words ranks are sent.

#include "host_tests/gpu/ll_scene.h"
#include "host_tests/stream.h"
#include "host_tests/suite.h"
#include "kernels/kernels.h"
#include "plugin/transport.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define VICTIM  2
#define LAYERS  3                          // one after the other
#define LONG_NS ((int64_t)TIMEOUT_NS * 10) // of what ends before, by itself

// With pieces and groups that are not whole, and several of each.
static const struct shape shapes[] = {
    {2, 1, FORMAT_BF16, 8, ROWS, 0},  {2, 0, FORMAT_FP8_BLOCK128, 264, 5, 1},
    {4, 1, FORMAT_BF16, 264, 4, 1},   {3, 1, FORMAT_FP8_BLOCK128, HIDDEN, 5, 0},
    {4, 3, FORMAT_F16, HIDDEN, 3, 0}, {4, 2, FORMAT_FP8_BLOCK128, 256, 4, 1},
    {3, 0, FORMAT_BF16, HIDDEN, 5, 1}};
// What fails, does so here.
static const struct shape four = {4, 1, FORMAT_FP8_BLOCK128, 264, 4, 1};
static const struct shape four_f16 = {4, 1, FORMAT_F16, HIDDEN, 4, 0};

static const uint64_t other_tags[] = {STAMP(GENERATION, EPOCH - 1), STAMP(GENERATION, EPOCH + 1),
                                      STAMP(GENERATION - 1, EPOCH), TAG | FLAG_LL};

#define SHAPES     (int)(sizeof shapes / sizeof shapes[0])
#define OTHER_TAGS (int)(sizeof other_tags / sizeof other_tags[0])

static struct word *words_of(struct scene *scene, int32_t rank)
{
    return scene->windows[scene->shape.own].rows[scene_index(rank, scene->shape.own)];
}

// ---- rows of peers -----------------------------------------------------------------------------

START_TEST(rows_of_peers_become_slabs)
{
    const int32_t variant = _i / 2 % SENT_VARIANTS;
    struct scene *scene = scene_open(&shapes[_i / 8], _i % 2);

    scene_peers_send(scene, variant);
    ck_assert_uint_eq(scene_dispatch(scene, 0, 1), VERDICT_NONE);
    scene_want_received(scene, variant);
    scene_expect_memory(scene);
    scene_expect_windows(scene);
    ck_assert_uint_eq(scene->report->rows_received[SLOT], scene->memory.state.rows_received[SLOT]);
    scene_close(scene);
}
END_TEST

// The VICTIM's words, each whole, when this rank waits already.
static void *send_late(void *arg)
{
    const struct timespec pause = {.tv_nsec = TIMEOUT_NS / 8};
    struct scene *scene = arg;
    struct word *to = scene->device_windows[four.own]->rows[scene_index(VICTIM, four.own)];
    const size_t words = sizeof *scene->windows[0].rows / sizeof *to;

    (void)nanosleep(&pause, NULL);
    for (size_t i = 0; i < words; i++)
        must(cudaMemcpy(to + i, words_of(scene, VICTIM) + i, sizeof *to, cudaMemcpyHostToDevice));
    return NULL;
}

// A count of the epoch before lies there, and a flag is no promise that words have come.
START_TEST(words_are_waited_for)
{
    struct scene *scene = scene_open(&four, _i);
    struct ll_window *sent = malloc(sizeof *sent);
    pthread_t thread;

    ck_assert_ptr_nonnull(sent);
    scene->timeout_ns = LONG_NS;
    scene->memory.state.epochs[SLOT] = EPOCH;
    scene_peers_send(scene, 2);
    *sent = scene->windows[four.own];
    memset(words_of(scene, VICTIM), 0, sizeof *sent->rows);
    words_of(scene, VICTIM)[0] = scene_count_word(1, 1, ROUND, other_tags[0]);
    scene_upload(scene);
    scene->windows[four.own] = *sent;
    ck_assert_int_eq(pthread_create(&thread, NULL, send_late, scene), 0);
    scene_launch_dispatch(scene, 0, 1);
    ck_assert_uint_eq(scene_finish(scene), VERDICT_NONE);
    ck_assert_int_eq(pthread_join(thread, NULL), 0);
    scene_want_received(scene, 2);
    scene_expect_memory(scene);
    scene_expect_windows(scene);
    free(sent);
    scene_close(scene);
}
END_TEST

// ---- rows for peers ----------------------------------------------------------------------------

// What the CPU's dispatch makes of the tokens.
struct slabs {
    struct row rows[RANKS][ROWS];
    int32_t ids[RANKS][ROWS][TOP_K];
    float weights[RANKS][ROWS][TOP_K];
    struct round_count counts[RANKS];
};

static void dispatch_on_cpu(struct scene *scene, struct slabs *slabs)
{
    const struct shape *s = &scene->shape;
    int64_t expert_first[RANKS + 1] = {0};
    struct push_slab to[RANKS] = {{0}};
    struct dispatch_args args = scene_dispatch_args(scene, &scene->memory, to, expert_first);
    struct cpu_stream stream;

    for (int32_t r = 0; r <= s->ranks; r++)
        expert_first[r] = r * EXPERTS;
    for (int32_t r = 0; r < s->ranks; r++)
        if (scene_is_peer(scene, r))
            to[r] = (struct push_slab){.rows = slabs->rows[r][0].numbers,
                                       .scales = slabs->rows[r][0].scales,
                                       .ids = slabs->ids[r][0],
                                       .weights = slabs->weights[r][0],
                                       .count = &slabs->counts[r]};
    to[s->own] = (struct push_slab){.ids = scene_own_ids(s, &scene->memory),
                                    .weights = scene->memory.own_weights[0]};
    args.row_stride_bytes = args.scale_stride_bytes = sizeof(struct row);
    args.rows_told = NULL;
    stream_init(&stream, 1, CPU_SCALAR);
    ck_assert_int_eq(kernels_cpu.dispatch(&args, &stream), 0);
    stream_fini(&stream);
}

static void want_sent(struct scene *scene)
{
    const struct shape *s = &scene->shape;
    struct slabs *slabs = calloc(1, sizeof *slabs);
    struct rank_memory *m = &scene->memory;

    ck_assert_ptr_nonnull(slabs);
    dispatch_on_cpu(scene, slabs);
    m->state.epochs[SLOT] = EPOCH;
    for (int32_t r = 0; r < s->ranks; r++) {
        int32_t sent = 0;

        for (int32_t token = 0; token < scene->tokens; token++) {
            int32_t *slot = &m->send_slot[token * s->ranks + r];

            sent += *slot >= 0;
            if (r == s->own) *slot = scene->got.send_slot[token * s->ranks + r]; // nobody's
        }
        if (!scene_is_peer(scene, r)) continue;
        for (int32_t i = 0; i < sent; i++) {
            memcpy(slabs->rows[r][i].ids, slabs->ids[r][i], sizeof slabs->ids[r][i]);
            memcpy(slabs->rows[r][i].weights, slabs->weights[r][i], sizeof slabs->weights[r][i]);
            scene_put_row(s, &slabs->rows[r][i], TAG, 0, scene_row_words(scene, r, s->own, i));
        }
        scene->windows[r].rows[scene_index(s->own, r)][0] =
            scene_count_word(slabs->counts[r].rows, sent, ROUND, TAG);
        *scene_line(scene, r, WORD_DISPATCH, s->own) = TAG | FLAG_LL;
    }
    free(slabs);
}

START_TEST(rows_go_to_peers)
{
    struct scene *scene = scene_open(&shapes[_i / 4], _i % 2);

    scene->everywhere = _i / 2 % 2;
    if (scene->everywhere) scene->pad_rows = scene->shape.rows_most;
    ck_assert_uint_eq(scene_dispatch(scene, 1, 0), VERDICT_NONE);
    want_sent(scene);
    scene_expect_memory(scene);
    scene_expect_windows(scene);
    ck_assert_uint_eq(scene->report->rows_sent[SLOT], scene->memory.state.rows_sent[SLOT]);
    scene_close(scene);
}
END_TEST

// Who is left out gets nothing, and whatever it has written is not looked at.
START_TEST(who_is_left_out_has_no_part)
{
    const int writes = _i / 2;
    struct scene *scene = scene_open(&four, _i % 2);

    scene->memory.state.active &= ~((uint64_t)1 << VICTIM);
    scene_peers_send(scene, 0);
    if (!writes) {
        memset(scene->windows[four.own].rows[scene_index(VICTIM, four.own)], 0,
               sizeof *scene->windows[0].rows);
        *scene_line(scene, four.own, WORD_DISPATCH, VICTIM) = 0;
    }
    ck_assert_uint_eq(scene_dispatch(scene, 1, 1), VERDICT_NONE);
    want_sent(scene);
    scene_want_received(scene, 0);
    scene_expect_memory(scene);
    scene_expect_windows(scene);
    scene_close(scene);
}
END_TEST

// ---- results -----------------------------------------------------------------------------------

struct results {
    unsigned char rows[RANKS][ROWS][ROW_BYTES];
};

static int64_t result_words(const struct scene *scene)
{
    return ll_number_words(scene->shape.hidden, scene_x_format(&scene->shape));
}

// Each peer has had some tokens, in their order, and sends all its rows; one has one that is none.
static void peers_return(struct scene *scene, struct results *results)
{
    const struct shape *s = &scene->shape;
    struct rank_memory *m = &scene->memory;

    for (int32_t r = 0; r < s->ranks; r++) {
        int32_t slots = 0;

        m->counts[r] = r == s->own ? scene->tokens : (r * 3 + 2) % (s->rows_most + 1);
        if (r == s->own) continue;
        for (int32_t token = 0; token < scene->tokens; token++)
            m->send_slot[token * s->ranks + r] = (token + r) % 3 == 0 ? -1 : slots++;
        if ((r + 1) % s->ranks == s->own) m->send_slot[r] = s->rows_most;
        scene_fill_numbers(scene_x_format(s), results->rows[r], 20 + (uint32_t)r);
        for (int32_t i = 0; i < s->rows_most; i++)
            scene_put_numbers(results->rows[r][i], s->hidden, 2, TAG, NULL,
                              scene->windows[s->own].results[scene_index(r, s->own)] +
                                  i * result_words(scene));
        *scene_line(scene, s->own, WORD_COMBINE, r) = TAG | FLAG_LL;
    }
}

static void want_returned(struct scene *scene)
{
    const struct shape *s = &scene->shape;

    scene->memory.state.returned[SLOT] = EPOCH;
    for (int32_t r = 0; r < s->ranks; r++) {
        if (!scene_is_peer(scene, r)) continue;
        for (int32_t i = 0; i < scene->memory.counts[r]; i++)
            scene_put_numbers(
                scene->memory.results[scene_index(r, s->own)][i], s->hidden, 2, TAG, NULL,
                scene->windows[r].results[scene_index(s->own, r)] + i * result_words(scene));
        *scene_line(scene, r, WORD_COMBINE, s->own) = TAG | FLAG_LL;
    }
}

static void want_summed(struct scene *scene, const struct results *results)
{
    struct sum_args args = scene_sum_args(scene, &scene->memory);
    const void *parts[RANKS];
    struct cpu_stream stream;

    for (int32_t r = 0; r < scene->shape.ranks; r++)
        parts[r] = results->rows[r];
    args.parts = parts;
    stream_init(&stream, 1, CPU_SCALAR);
    ck_assert_int_eq(kernels_cpu.sum(&args, &stream), 0);
    stream_fini(&stream);
}

static void want_zeros(struct scene *scene)
{
    for (int32_t token = 0; token < scene->tokens; token++)
        memset(scene->memory.y[token], 0, (size_t)scene->shape.hidden * 2);
}

// By halves, or at once; of all ranks, or of all but one.
START_TEST(results_are_summed)
{
    const int sends = _i / 2 % 4 != 1, waits = _i / 2 % 4 != 0, left_out = _i / 2 % 4 == 3;
    struct scene *scene = scene_open(&shapes[_i / 8], _i % 2);
    struct results *results = calloc(1, sizeof *results);

    ck_assert_ptr_nonnull(results);
    if (left_out && scene->shape.ranks == 4)
        scene->memory.state.active &= ~((uint64_t)1 << (3 - scene->shape.own));
    peers_return(scene, results);
    ck_assert_uint_eq(scene_sum(scene, sends, waits), VERDICT_NONE);
    if (sends) want_returned(scene);
    if (waits) want_summed(scene, results);
    scene_expect_memory(scene);
    scene_expect_windows(scene);
    free(results);
    scene_close(scene);
}
END_TEST

// ---- two ranks ---------------------------------------------------------------------------------

// A rank whose experts return what they got.
static void *run_layers(void *arg)
{
    struct scene *scene = arg;

    for (int32_t layer = 0; layer < LAYERS; layer++) {
        scene_launch_dispatch(scene, 1, 1);
        scene_launch_sum(scene, 1, 1);
    }
    return NULL;
}

// Small numbers, so that sums are exact.
static void fill_small(struct scene *scene)
{
    struct rank_memory *m = &scene->memory;

    for (int32_t i = 0; i < ROWS * HIDDEN; i++) {
        const uint16_t small[] = {0x3f80, 0x4000, 0xbf80, 0}; // 1, 2, -1, 0

        memcpy(m->x[i / HIDDEN] + i % HIDDEN * 2, &small[(i + scene->shape.own) % 4], 2);
    }
    memcpy(m->y, m->x, sizeof m->y);
    m->state.epochs[SLOT] = EPOCH - 1;
    scene->echoes = 1;
    scene->timeout_ns = LONG_NS;
}

START_TEST(two_ranks_run_layers)
{
    struct scene *ranks[2];
    pthread_t threads[2];

    for (int32_t r = 0; r < 2; r++) {
        const struct shape shape = {2, r, FORMAT_BF16, 264, 5, r};

        ranks[r] = scene_open(&shape, _i);
        fill_small(ranks[r]);
        for (int32_t w = 0; r == 1 && w < 2; w++) {
            must(cudaFree(ranks[1]->device_windows[w]));
            ranks[1]->device_windows[w] = ranks[0]->device_windows[w];
        }
        scene_upload(ranks[r]);
    }
    for (int32_t r = 0; r < 2; r++)
        ck_assert_int_eq(pthread_create(&threads[r], NULL, run_layers, ranks[r]), 0);
    for (int32_t r = 0; r < 2; r++)
        ck_assert_int_eq(pthread_join(threads[r], NULL), 0);
    for (int32_t r = 0; r < 2; r++) {
        struct scene *scene = ranks[r];

        ck_assert_uint_eq(scene_finish(scene), VERDICT_NONE);
        ck_assert_uint_eq(scene->got.state.epochs[SLOT], EPOCH - 1 + LAYERS);
        ck_assert_uint_eq(scene->got.state.returned[SLOT], EPOCH - 1 + LAYERS);
        for (int32_t i = 0; i < scene->tokens * 264; i++) {
            const int32_t token = i / 264, at = i % 264 * 2;
            const int is_sent = scene->got.send_slot[token * 2 + 1 - r] >= 0;
            uint16_t x, y;

            memcpy(&x, scene->memory.x[token] + at, 2);
            memcpy(&y, scene->got.y[token] + at, 2);
            if (is_sent && x != 0) x = (uint16_t)(x + 0x100); // four times
            assert_many(x == y, "rank %d: y[%d] is %#x, not %#x", r, i, y, x);
        }
    }
    memset(ranks[1]->device_windows, 0, sizeof ranks[1]->device_windows);
    scene_close(ranks[1]);
    scene_close(ranks[0]);
}
END_TEST

// ---- failures ----------------------------------------------------------------------------------

static struct word *result_words_of(struct scene *scene, int32_t rank)
{
    return scene->windows[scene->shape.own].results[scene_index(rank, scene->shape.own)];
}

enum trouble {
    NO_WORDS,
    NO_FLAG,
    ONE_ROW_MORE,
    MOST_ROWS,
    NEXT_ROUND,
    OTHER_WAY,
    OTHER_WAY_AND_NO_WORDS,
    HAS_LEFT,
    HAS_MOVED_ON,
    HAS_ANOTHER_MASK,
    TROUBLES
};

// Of the VICTIM.
static void make_trouble(struct scene *scene, enum trouble trouble)
{
    static const uint64_t masks[TROUBLES] = {
        [HAS_LEFT] = 12, [HAS_MOVED_ON] = 6, [HAS_ANOTHER_MASK] = 31};
    const int32_t own = scene->shape.own, most = scene->shape.rows_most;
    uint64_t *flag = scene_line(scene, own, WORD_DISPATCH, VICTIM);
    struct word *words = words_of(scene, VICTIM);

    if (trouble == NO_WORDS || trouble >= OTHER_WAY)
        memset(words, 0, sizeof *scene->windows[0].rows);
    if (trouble == NO_FLAG || trouble > OTHER_WAY_AND_NO_WORDS) *flag = 0;
    if (trouble == OTHER_WAY_AND_NO_WORDS) // of a rank before it
        memset(words_of(scene, 0), 0, sizeof *scene->windows[0].rows);
    if (trouble == OTHER_WAY || trouble == OTHER_WAY_AND_NO_WORDS) *flag = TAG;
    if (masks[trouble] != 0) {
        *scene_line(scene, own, WORD_ACTIVE, VICTIM) = masks[trouble];
        *scene_line(scene, own, WORD_GENERATION, VICTIM) =
            GENERATION + (trouble != HAS_ANOTHER_MASK);
    }
    switch (trouble) {
    case ONE_ROW_MORE:
        words[0] = scene_count_word(most + 1, most, ROUND, TAG);
        break;
    case MOST_ROWS:
        words[0] = scene_count_word(UINT16_MAX, UINT16_MAX, ROUND, TAG);
        break;
    case NEXT_ROUND:
        words[0] = scene_count_word(most, most, ROUND + 1, TAG);
        break;
    default:
        break;
    }
}

static void expect_verdict(const struct scene *scene, uint32_t kind, uint32_t word)
{
    const struct flag_verdict *v = &scene->report->verdict;

    ck_assert_uint_eq(v->kind, kind);
    ck_assert_int_eq(v->rank, VICTIM);
    ck_assert_uint_eq(v->word, word);
    ck_assert_uint_eq(v->epoch, EPOCH);
    ck_assert_uint_eq(v->generation, GENERATION);
    ck_assert_uint_eq(v->silent, kind == VERDICT_SILENT ? 1u << VICTIM : 0);
    ck_assert_uint_eq(scene->got.state.failed, 1);
}

static void expect_no_rows(const struct scene *scene)
{
    for (int32_t r = 0; r < scene->shape.ranks; r++)
        ck_assert_int_eq(scene->got.counts[r], 0);
    for (int32_t i = 0; i < scene->shape.ranks * scene->shape.rows_most * TOP_K; i++)
        assert_many(scene->got.slab_ids[i] == -1, "id %d is %d", i, scene->got.slab_ids[i]);
    ck_assert_uint_eq(scene->got.state.rows_received[SLOT],
                      scene->memory.state.rows_received[SLOT]);
}

START_TEST(what_fails_has_no_rows_and_is_told)
{
    static const struct {
        uint32_t kind;
        int32_t at_once;
    } wants[TROUBLES] = {{VERDICT_SILENT, 0}, {VERDICT_SILENT, 0},   {VERDICT_ROWS, 1},
                         {VERDICT_ROWS, 1},   {VERDICT_ROUND, 1},    {VERDICT_WAY, 1},
                         {VERDICT_WAY, 1},    {VERDICT_LEFT_OUT, 1}, {VERDICT_MOVED_ON, 1},
                         {VERDICT_MASKS, 1}};
    const enum trouble trouble = (enum trouble)(_i / 2);
    struct scene *scene = scene_open(&four, _i % 2);
    const int64_t began_ns = clock_ns();

    if (wants[trouble].at_once) scene->timeout_ns = LONG_NS;
    scene_peers_send(scene, 2);
    make_trouble(scene, trouble);
    ck_assert_uint_eq(scene_dispatch(scene, 0, 1), wants[trouble].kind);
    ck_assert_int_lt(clock_ns() - began_ns, LONG_NS);
    expect_verdict(scene, wants[trouble].kind, WORD_DISPATCH);
    expect_no_rows(scene);
    if (trouble == ONE_ROW_MORE)
        ck_assert_int_eq(scene->report->verdict.told_rows, four.rows_most + 1);
    if (trouble == NEXT_ROUND) ck_assert_int_eq(scene->report->verdict.told_round, ROUND + 1);
    scene_close(scene);
}
END_TEST

// One word of the VICTIM's last row, or its count, of which nothing is taken.
START_TEST(words_of_other_epochs_are_none)
{
    static const int32_t words[] = {0, LL_ROUTING_WORDS, LL_ROUTING_WORDS + 32,
                                    LL_ROUTING_WORDS + 64 + 1, 2};
    const int32_t index = scene_index(VICTIM, four.own), row = four.rows_most - 1,
                  which = _i / 2 % 5;
    struct scene *scene = scene_open(&four, _i % 2);
    const unsigned char *numbers = scene->got.slab_rows[index][row];
    const void *places[] = {numbers, numbers, numbers + LL_PIECE_COLUMNS,
                            &scene->got.slab_scales[index][row][2]};
    const size_t bytes[] = {264, 8, 8, 4};
    struct word *word;

    scene->timeout_ns = TIMEOUT_NS / 4;
    scene_peers_send(scene, 2);
    word = which == 0 ? words_of(scene, VICTIM) : scene_row_words(scene, four.own, VICTIM, row);
    word[words[which]].tag = other_tags[_i / 10];
    ck_assert_uint_eq(scene_dispatch(scene, 0, 1), VERDICT_SILENT);
    expect_verdict(scene, VERDICT_SILENT, WORD_DISPATCH);
    for (size_t i = 0; which < 4 && i < bytes[which]; i++)
        assert_many(((const unsigned char *)places[which])[i] == POISON, "byte %zu is taken", i);
    if (which == 0 || which == 4) expect_no_rows(scene);
    scene_close(scene);
}
END_TEST

// Peers' words and flags are there all the same.
START_TEST(nothing_is_sent_after_a_failure)
{
    struct scene *scene = scene_open(&four, _i % 2);

    scene->memory.state.failed = 1;
    scene_peers_send(scene, 2);
    ck_assert_uint_eq(scene_dispatch(scene, 1, 1), VERDICT_NONE);
    expect_no_rows(scene);
    scene_expect_windows(scene);
    ck_assert_uint_eq(scene->got.state.epochs[SLOT], EPOCH - 1);
    ck_assert_uint_eq(scene->got.state.rows_sent[SLOT], scene->memory.state.rows_sent[SLOT]);
    for (int32_t i = 0; i < scene->tokens * four.ranks; i++)
        if (i % four.ranks != four.own) ck_assert_int_eq(scene->got.send_slot[i], -1);
    scene_close(scene);
}
END_TEST

enum sum_trouble { NO_RESULTS, NO_RETURN, ONE_TAG, OTHER_RETURN, FAILED_BEFORE, SUM_TROUBLES };

// No row is summed where one word has not come.
START_TEST(what_fails_is_summed_to_zeros)
{
    const enum sum_trouble trouble = (enum sum_trouble)(_i / 2 % SUM_TROUBLES);
    const struct shape *shape = _i / 2 / SUM_TROUBLES == 0 ? &four : &four_f16;
    struct scene *scene = scene_open(shape, _i % 2);
    struct results *results = calloc(1, sizeof *results);
    const int64_t began_ns = clock_ns();
    uint64_t *flag = scene_line(scene, shape->own, WORD_COMBINE, VICTIM);
    int32_t token = scene->tokens - 1, slot = -1;

    ck_assert_ptr_nonnull(results);
    scene->timeout_ns = trouble == OTHER_RETURN ? LONG_NS : TIMEOUT_NS / 4;
    peers_return(scene, results);
    while (slot < 0)
        slot = scene->memory.send_slot[token-- * 4 + VICTIM];
    if (trouble == NO_RESULTS)
        memset(result_words_of(scene, VICTIM), 0, sizeof *scene->windows[0].results);
    if (trouble == NO_RETURN) *flag = 0;
    if (trouble == OTHER_RETURN) *flag = TAG;
    if (trouble == ONE_TAG) // of the last piece, which another block has
        result_words_of(scene, VICTIM)[(slot + 1) * result_words(scene) - 32].tag = other_tags[0];
    scene->memory.state.failed = trouble == FAILED_BEFORE;
    (void)scene_sum(scene, 1, 1);
    ck_assert_int_lt(clock_ns() - began_ns, LONG_NS);
    if (trouble == FAILED_BEFORE) {
        ck_assert_uint_eq(scene->report->verdict.kind, VERDICT_NONE);
        scene_expect_windows(scene);
    } else {
        expect_verdict(scene, trouble == OTHER_RETURN ? VERDICT_WAY : VERDICT_SILENT, WORD_COMBINE);
        scene->memory.state.failed = 1;
        scene->memory.state.returned[SLOT] = EPOCH;
    }
    want_zeros(scene);
    scene_expect_memory(scene);
    free(results);
    scene_close(scene);
}
END_TEST

// The first block sees at once that it waits in vain, and all others have what they sum: whichever
// of them ends last.
START_TEST(sums_of_other_blocks_are_taken_back)
{
    for (int round = 0; round < 16; round++) {
        struct scene *scene = scene_open(&four, _i);
        struct results *results = calloc(1, sizeof *results);

        ck_assert_ptr_nonnull(results);
        scene->timeout_ns = LONG_NS;
        peers_return(scene, results);
        *scene_line(scene, four.own, WORD_COMBINE, VICTIM) = TAG;
        ck_assert_uint_eq(scene_sum(scene, 1, 1), VERDICT_WAY);
        want_zeros(scene);
        scene->memory.state.failed = 1;
        scene->memory.state.returned[SLOT] = EPOCH;
        scene_expect_memory(scene);
        free(results);
        scene_close(scene);
    }
}
END_TEST

static void tests(TCase *cases)
{
    tcase_add_loop_test(cases, rows_of_peers_become_slabs, 0, 8 * SHAPES);
    tcase_add_loop_test(cases, words_are_waited_for, 0, 2);
    tcase_add_loop_test(cases, rows_go_to_peers, 0, 4 * SHAPES);
    tcase_add_loop_test(cases, who_is_left_out_has_no_part, 0, 4);
    tcase_add_loop_test(cases, results_are_summed, 0, 8 * SHAPES);
    tcase_add_loop_test(cases, two_ranks_run_layers, 0, 2);
    tcase_add_loop_test(cases, what_fails_has_no_rows_and_is_told, 0, 2 * TROUBLES);
    tcase_add_loop_test(cases, words_of_other_epochs_are_none, 0, 10 * OTHER_TAGS);
    tcase_add_loop_test(cases, nothing_is_sent_after_a_failure, 0, 2);
    tcase_add_loop_test(cases, what_fails_is_summed_to_zeros, 0, 4 * SUM_TROUBLES);
    tcase_add_loop_test(cases, sums_of_other_blocks_are_taken_back, 0, 2);
}

int main(void)
{
    return gpu_suite("gpu_ll", 1, tests);
}
