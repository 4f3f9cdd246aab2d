#include "host_tests/gpu/ll_scene.h"

#include "host_tests/suite.h"
#include "kernels/cpu/numbers.h"
#include "kernels/cuda/cuda.h"

#include <stdlib.h>
#include <string.h>

static uint32_t mix(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t hash = a * 0x9e3779b1u + b * 0x85ebca77u + c * 0xc2b2ae3du;

    hash = (hash ^ hash >> 15) * 0x2c1b3c6du;
    return hash ^ hash >> 13;
}

int32_t scene_index(int32_t rank, int32_t own)
{
    return rank < own ? rank : rank - 1;
}

static int is_fp8(const struct shape *shape)
{
    return shape->wire_format == FORMAT_FP8_BLOCK128;
}

int32_t scene_x_format(const struct shape *shape)
{
    return is_fp8(shape) ? FORMAT_BF16 : shape->wire_format;
}

uint64_t *scene_line(struct scene *scene, int32_t owner, int32_t word, int32_t source)
{
    return &scene->windows[owner].lines[1 + word * scene->shape.ranks + source].value;
}

struct word *scene_row_words(struct scene *scene, int32_t owner, int32_t source, int32_t row)
{
    const struct shape *s = &scene->shape;

    return scene->windows[owner].rows[scene_index(source, owner)] + 1 +
           row * ll_row_words(s->hidden, s->wire_format);
}

// ---- words -------------------------------------------------------------------------------------

static uint64_t two_floats(const float *two, int32_t count)
{
    uint64_t value = 0;

    memcpy(&value, two, (size_t)(count < 2 ? count : 2) * sizeof *two);
    return value;
}

void scene_put_numbers(const unsigned char *numbers, int32_t hidden, int32_t of_eight, uint64_t tag,
                       const uint64_t *rest, struct word *to)
{
    const int32_t end = (int32_t)ll_pieces(hidden) * LL_PIECE_COLUMNS;

    for (int32_t column = 0; column < end; column += 8) {
        const int32_t piece = column / LL_PIECE_COLUMNS, lane = column % LL_PIECE_COLUMNS / 8;

        for (int32_t i = 0; i < of_eight; i++) {
            struct word *word = &to[(piece * of_eight + i) * 32 + lane];

            if (column >= hidden && rest == NULL) continue;
            *word = (struct word){column >= hidden ? *rest : 0, tag};
            if (column < hidden) memcpy(&word->value, numbers + column * of_eight + i * 8, 8);
        }
    }
}

void scene_put_row(const struct shape *s, const struct row *row, uint64_t tag, uint64_t rest,
                   struct word *to)
{
    const int32_t groups = (s->hidden + 127) / 128;

    for (int32_t t = 0; t < TOP_K; t++) {
        uint64_t weight = two_floats(&row->weights[t], 1);

        to[t] = (struct word){(uint32_t)row->ids[t] | weight << 32, tag};
    }
    scene_put_numbers(row->numbers, s->hidden, is_fp8(s) ? 1 : 2, tag, &rest,
                      to + LL_ROUTING_WORDS);
    to += LL_ROUTING_WORDS + ll_number_words(s->hidden, s->wire_format);
    for (int32_t group = 0; is_fp8(s) && group < groups; group += 2) {
        uint64_t scales = two_floats(&row->scales[group], groups - group);

        if (group + 1 == groups) scales |= rest << 32;
        to[group / 2] = (struct word){scales, tag};
    }
}

struct word scene_count_word(int32_t rows, int32_t sent, int32_t round, uint64_t tag)
{
    return (struct word){(uint32_t)rows | (uint64_t)sent << 16 | (uint64_t)round << 32, tag};
}

struct row scene_row_of(int32_t source, int32_t index)
{
    const uint32_t seed = (uint32_t)(source * 100 + index);
    struct row row;

    for (uint32_t i = 0; i < ROW_BYTES; i++)
        row.numbers[i] = (unsigned char)mix(seed, i, 1);
    for (uint32_t i = 0; i < SCALES; i++)
        row.scales[i] = (float)mix(seed, i, 2);
    for (uint32_t t = 0; t < TOP_K; t++) {
        row.weights[t] = (float)mix(seed, t, 3);
        row.ids[t] = (int32_t)(mix(seed, t, 4) % 1000);
    }
    return row;
}

// ---- the scene ---------------------------------------------------------------------------------

void scene_fill_numbers(int32_t format, unsigned char (*rows)[ROW_BYTES], uint32_t seed)
{
    static const float values[] = {32768.0f, -32768.0f, 0x1p-10f, 1.5f, -3.0f, 0x1p-9f, 100.0f, 0};

    for (uint32_t i = 0; i < ROWS * HIDDEN; i++)
        numbers_encode(format, &values[mix(seed, i, 5) % 8], 1, rows[i / HIDDEN] + i % HIDDEN * 2);
}

static void fill_memory(struct scene *scene)
{
    const uint32_t ids = (uint32_t)(scene->shape.ranks * EXPERTS);
    struct rank_memory *m = &scene->memory;

    memset(m, POISON, sizeof *m);
    m->state =
        (struct flag_state){.generation = GENERATION, .active = (1u << scene->shape.ranks) - 1};
    m->state.returned[SLOT] = EPOCH - 1;
    m->state.rows_sent[SLOT] = 1000;
    m->state.rows_received[SLOT] = 2000;
    m->tokens_valid = TOKEN_FIRST + scene->tokens - 1;
    scene_fill_numbers(scene_x_format(&scene->shape), m->x, 6);
    scene_fill_numbers(scene_x_format(&scene->shape), m->y, 7);
    for (int32_t i = 0; i < RANKS - 1; i++)
        scene_fill_numbers(scene_x_format(&scene->shape), m->results[i], 8 + (uint32_t)i);
    for (int32_t i = 0; i < ROWS * TOP_K; i++) {
        m->ids[i / TOP_K][i % TOP_K] = (int32_t)(mix(1, (uint32_t)i, 9) % (ids + 2)) - 1;
        m->weights[i / TOP_K][i % TOP_K] = (float)mix(1, (uint32_t)i, 10);
    }
}

struct scene *scene_open(const struct shape *shape, int32_t sms)
{
    struct scene *scene = calloc(1, sizeof *scene);
    void *memory = NULL;

    ck_assert_ptr_nonnull(scene);
    scene->shape = *shape;
    scene->sms = sms;
    scene->tokens = shape->rows_most > 2 ? shape->rows_most - 1 : shape->rows_most;
    scene->timeout_ns = TIMEOUT_NS;
    fill_memory(scene);
    memset(scene->windows, POISON, sizeof scene->windows);
    for (int32_t r = 0; r < shape->ranks; r++) {
        for (int32_t source = 0; source < shape->ranks * WORD_COUNT; source++)
            *scene_line(scene, r, 0, source) = 0;
        must(cudaMalloc(&memory, sizeof *scene->windows));
        scene->device_windows[r] = memory;
    }
    must(cudaMalloc(&memory, sizeof *scene->device_memory));
    scene->device_memory = memory;
    must(cudaMallocHost(&memory, sizeof *scene->report));
    scene->report = memset(memory, 0, sizeof *scene->report);
    must(cudaStreamCreateWithFlags(&scene->stream, cudaStreamNonBlocking));
    return scene;
}

void scene_close(struct scene *scene)
{
    for (int32_t r = 0; r < scene->shape.ranks; r++)
        must(cudaFree(scene->device_windows[r]));
    must(cudaFree(scene->device_memory));
    must(cudaFreeHost(scene->report));
    must(cudaStreamDestroy(scene->stream));
    free(scene);
}

void scene_upload(const struct scene *scene)
{
    must(cudaMemcpy(scene->device_memory, &scene->memory, sizeof scene->memory,
                    cudaMemcpyHostToDevice));
    for (int32_t r = 0; r < scene->shape.ranks; r++)
        must(cudaMemcpy(scene->device_windows[r], &scene->windows[r], sizeof *scene->windows,
                        cudaMemcpyHostToDevice));
}

uint32_t scene_finish(struct scene *scene)
{
    must(cudaStreamSynchronize(scene->stream));
    must(cudaMemcpy(&scene->got, scene->device_memory, sizeof scene->got, cudaMemcpyDeviceToHost));
    return scene->report->verdict.kind;
}

// ---- the launches ------------------------------------------------------------------------------

struct dispatch_args scene_dispatch_args(const struct scene *scene, struct rank_memory *m,
                                         const struct push_slab *to, const int64_t *expert_first)
{
    return (struct dispatch_args){.x = m->x,
                                  .ids = m->ids,
                                  .weights = m->weights,
                                  .tokens_valid = &m->tokens_valid,
                                  .token_first = TOKEN_FIRST,
                                  .to = to,
                                  .expert_first = expert_first,
                                  .failed = &m->state.failed,
                                  .rows_sent = &m->state.rows_sent[SLOT],
                                  .rows_told = &scene->report->rows_sent[SLOT],
                                  .send_slot = m->send_slot,
                                  .x_stride_bytes = ROW_BYTES,
                                  .id_stride_bytes = sizeof *m->ids,
                                  .weight_stride_bytes = sizeof *m->weights,
                                  .row_stride_bytes = ROW_BYTES,
                                  .scale_stride_bytes = sizeof **m->slab_scales,
                                  .x_format = scene_x_format(&scene->shape),
                                  .wire_format = scene->shape.wire_format,
                                  .id_bytes = 4,
                                  .weight_format = FORMAT_F32,
                                  .tokens = scene->tokens,
                                  .hidden = scene->shape.hidden,
                                  .top_k = TOP_K,
                                  .rows_cap = scene->shape.rows_most,
                                  .ranks = scene->shape.ranks,
                                  .rank = scene->shape.own,
                                  .everywhere = scene->everywhere,
                                  .pad_rows = scene->pad_rows,
                                  .round = ROUND,
                                  .sms = scene->sms};
}

static struct await_args await_of(const struct scene *scene, void *const *windows, int32_t word)
{
    const struct shape *s = &scene->shape;
    struct rank_memory *m = scene->device_memory;

    return (struct await_args){.state = &m->state,
                               .peers = windows,
                               .window = windows[s->own],
                               .beats = windows[s->own],
                               .peer_beats = windows,
                               .counts = word == WORD_DISPATCH ? m->counts : NULL,
                               .ids = word == WORD_DISPATCH && s->by_rank ? m->slab_ids : NULL,
                               .report = scene->report,
                               .timeout_ns = scene->timeout_ns,
                               .slot = SLOT,
                               .word = word,
                               .ranks = s->ranks,
                               .rank = s->own,
                               .tokens = scene->tokens,
                               .rows_most = s->rows_most,
                               .round = ROUND,
                               .top_k = TOP_K};
}

static int64_t ids_slab_bytes(const struct shape *s)
{
    return (s->by_rank ? s->rows_most : ROWS + 1) * TOP_K * 4;
}

int32_t *scene_own_ids(const struct shape *s, struct rank_memory *m)
{
    return s->by_rank ? m->slab_ids + s->own * s->rows_most * TOP_K : m->own_ids[0];
}

void scene_launch_dispatch(struct scene *scene, int32_t sends, int32_t waits)
{
    const struct shape *s = &scene->shape;
    struct rank_memory *m = scene->device_memory;
    struct push_slab to[RANKS] = {{0}};
    int64_t expert_first[RANKS + 1];
    void *windows[RANKS];
    struct dispatch_ll_args args;

    for (int32_t r = 0; r <= s->ranks; r++)
        expert_first[r] = r * EXPERTS;
    for (int32_t r = 0; r < s->ranks; r++) {
        windows[r] = scene->device_windows[r];
        if (r != s->own) to[r].rows = scene->device_windows[r]->rows[scene_index(s->own, r)];
    }
    to[s->own] = (struct push_slab){.ids = scene_own_ids(s, m), .weights = m->own_weights[0]};
    args = (struct dispatch_ll_args){.dispatch = scene_dispatch_args(scene, m, to, expert_first),
                                     .await = await_of(scene, windows, WORD_DISPATCH),
                                     .words = scene->device_windows[s->own]->rows,
                                     .in = {.rows = m->slab_rows[0][0],
                                            .scales = (unsigned char *)m->slab_scales,
                                            .ids = (unsigned char *)m->slab_ids,
                                            .weights = (unsigned char *)m->slab_weights,
                                            .rows_slab_bytes = sizeof *m->slab_rows,
                                            .scales_slab_bytes = sizeof *m->slab_scales,
                                            .ids_slab_bytes = ids_slab_bytes(s),
                                            .weights_slab_bytes = sizeof *m->slab_weights,
                                            .ids_by_rank = s->by_rank},
                                     .words_stride_bytes = sizeof *scene->windows[0].rows,
                                     .sends = sends,
                                     .waits = waits};
    ck_assert_int_eq(kernels_cuda.dispatch_ll(&args, scene->stream), 0);
}

uint32_t scene_dispatch(struct scene *scene, int32_t sends, int32_t waits)
{
    scene->memory.state.epochs[SLOT] = EPOCH - (sends != 0);
    scene_upload(scene);
    scene_launch_dispatch(scene, sends, waits);
    return scene_finish(scene);
}

struct sum_args scene_sum_args(const struct scene *scene, struct rank_memory *m)
{
    return (struct sum_args){.y = m->y,
                             .y_stride_bytes = ROW_BYTES,
                             .part_stride_bytes = ROW_BYTES,
                             .send_slot = m->send_slot,
                             .failed = &m->state.failed,
                             .active_now = &m->state.active,
                             .format = scene_x_format(&scene->shape),
                             .tokens = scene->tokens,
                             .hidden = scene->shape.hidden,
                             .ranks = scene->shape.ranks,
                             .rank = scene->shape.own,
                             .rows_cap = scene->shape.rows_most,
                             .sms = scene->sms};
}

void scene_launch_sum(struct scene *scene, int32_t sends, int32_t waits)
{
    const struct shape *s = &scene->shape;
    struct rank_memory *m = scene->device_memory;
    struct ll_results peers[RANKS] = {{0}};
    void *windows[RANKS];
    struct sum_ll_args args;

    for (int32_t r = 0; r < s->ranks; r++) {
        const int32_t index = scene_index(r, s->own);

        windows[r] = scene->device_windows[r];
        if (r == s->own) continue;
        peers[r].rows = scene->echoes ? m->slab_rows[index][0] : m->results[index][0];
        peers[r].words = scene->device_windows[r]->results[scene_index(s->own, r)];
    }
    args = (struct sum_ll_args){.sum = scene_sum_args(scene, m),
                                .await = await_of(scene, windows, WORD_COMBINE),
                                .peers = peers,
                                .counts = m->counts,
                                .words = scene->device_windows[s->own]->results,
                                .words_stride_bytes = sizeof *scene->windows[0].results,
                                .rows_stride_bytes = ROW_BYTES,
                                .sends = sends,
                                .waits = waits};
    ck_assert_int_eq(kernels_cuda.sum_ll(&args, scene->stream), 0);
}

uint32_t scene_sum(struct scene *scene, int32_t sends, int32_t waits)
{
    scene->memory.state.epochs[SLOT] = EPOCH;
    scene_upload(scene);
    scene_launch_sum(scene, sends, waits);
    return scene_finish(scene);
}

// ---- what is expected --------------------------------------------------------------------------

static void expect_bytes(const char *what, int32_t which, const void *got, const void *want,
                         size_t bytes)
{
    const unsigned char *a = got, *b = want;

    for (size_t i = 0; i < bytes; i++)
        assert_many(a[i] == b[i], "%s %d: byte %zu is %#x, not %#x", what, which, i, a[i], b[i]);
}

#define EXPECT_PART(scene, part)                                                                   \
    expect_bytes(#part, 0, &(scene)->got.part, &(scene)->memory.part, sizeof(scene)->memory.part)

void scene_expect_memory(const struct scene *scene)
{
    EXPECT_PART(scene, state);
    EXPECT_PART(scene, counts);
    EXPECT_PART(scene, send_slot);
    EXPECT_PART(scene, own_ids);
    EXPECT_PART(scene, own_weights);
    EXPECT_PART(scene, slab_ids);
    EXPECT_PART(scene, slab_weights);
    EXPECT_PART(scene, slab_rows);
    EXPECT_PART(scene, slab_scales);
    EXPECT_PART(scene, y);
    EXPECT_PART(scene, x);
}

void scene_expect_windows(struct scene *scene)
{
    for (int32_t r = 0; r < scene->shape.ranks; r++) {
        const int32_t beat = 1 + WORD_BEAT * scene->shape.ranks + scene->shape.own;

        must(cudaMemcpy(&scene->seen, scene->device_windows[r], sizeof scene->seen,
                        cudaMemcpyDeviceToHost));
        scene->seen.lines[beat].value = scene->windows[r].lines[beat].value;
        expect_bytes("window", r, &scene->seen, &scene->windows[r], sizeof scene->seen);
    }
}

int scene_is_peer(const struct scene *scene, int32_t rank)
{
    return rank != scene->shape.own && (scene->memory.state.active >> rank & 1) != 0;
}

// ---- rows of peers -----------------------------------------------------------------------------

struct sent {
    int32_t rows, sent;
};

// All rows, some of them only reported, some only sent, or none.
static struct sent sent_by(const struct scene *scene, int32_t rank, int32_t variant)
{
    const int32_t most = scene->shape.rows_most;
    const struct sent all[] = {{most, most}, {most, most - 1}, {most / 2, most}, {0, 0}};

    return all[(rank + variant) % 4];
}

void scene_peers_send(struct scene *scene, int32_t variant)
{
    const struct shape *s = &scene->shape;

    for (int32_t r = 0; r < s->ranks; r++) {
        const struct sent sent = sent_by(scene, r, variant);

        if (r == s->own) continue;
        scene->windows[s->own].rows[scene_index(r, s->own)][0] =
            scene_count_word(sent.rows, sent.sent, ROUND, TAG);
        for (int32_t i = 0; i < s->rows_most; i++) {
            const struct row row = scene_row_of(r, i);

            scene_put_row(s, &row, i < sent.sent ? TAG : STAMP(GENERATION, EPOCH - 1), UINT64_MAX,
                          scene_row_words(scene, s->own, r, i));
        }
        *scene_line(scene, s->own, WORD_DISPATCH, r) = TAG | FLAG_LL;
    }
}

static int32_t *ids_of(struct scene *scene, int32_t rank)
{
    const struct shape *s = &scene->shape;

    if (s->by_rank) return scene->memory.slab_ids + rank * s->rows_most * TOP_K;
    return scene->memory.slab_ids + scene_index(rank, s->own) * (ROWS + 1) * TOP_K;
}

// Rows that are counted, and one behind all where ids of all ranks are looked at.
static void want_rows(struct scene *scene, int32_t rank, struct sent sent)
{
    const struct shape *s = &scene->shape;
    const size_t row_bytes = (size_t)s->hidden * (is_fp8(s) ? 1 : 2);
    const size_t groups = is_fp8(s) ? ((size_t)s->hidden + 127) / 128 : 0;
    const int32_t index = scene_index(rank, s->own);
    struct rank_memory *m = &scene->memory;

    for (int32_t i = 0; i < s->rows_most; i++) {
        const struct row row = scene_row_of(rank, i);
        const int is_there = i < sent.rows && i < sent.sent;

        if (is_there) {
            memcpy(m->slab_rows[index][i], row.numbers, row_bytes);
            memcpy(m->slab_scales[index][i], row.scales, groups * sizeof(float));
        }
        for (int32_t t = 0; t < TOP_K; t++) {
            if (i < sent.rows || s->by_rank)
                ids_of(scene, rank)[i * TOP_K + t] = is_there ? row.ids[t] : -1;
            if (i < sent.rows)
                m->slab_weights[index][i][t] = is_there ? row.weights[t] : 0.0f;
            else // nobody's
                m->slab_weights[index][i][t] = scene->got.slab_weights[index][i][t];
        }
    }
}

void scene_want_received(struct scene *scene, int32_t variant)
{
    const struct shape *s = &scene->shape;
    struct rank_memory *m = &scene->memory;

    for (int32_t r = 0; r < s->ranks; r++) {
        const struct sent sent =
            scene_is_peer(scene, r) ? sent_by(scene, r, variant) : (struct sent){0, 0};

        m->counts[r] = r == s->own ? scene->tokens : sent.rows;
        m->state.rows_received[SLOT] += (uint64_t)sent.rows;
        if (scene_is_peer(scene, r)) want_rows(scene, r, sent);
        for (int32_t i = m->counts[r] * TOP_K; s->by_rank && i < s->rows_most * TOP_K; i++)
            ids_of(scene, r)[i] = -1;
    }
}
