// One rank of few rows, for kernels/cuda/ll.cu alone: its windows, slabs and tokens in memory of
// one device, and what peers have written there.

#ifndef MOXIE_HOST_TESTS_GPU_LL_SCENE_H
#define MOXIE_HOST_TESTS_GPU_LL_SCENE_H

#include "host_tests/gpu/gpu_layer.h"
#include "kernels/ll.h"

#define RANKS        LL_RANKS_MAX
#define SLOT         2
#define ROWS         8 // of two ranks, the most
#define HIDDEN       520
#define TOP_K        3
#define EXPERTS      2 // of a rank
#define ROUND        0
#define GENERATION   3u
#define EPOCH        5u
#define ROW_BYTES    1152 // with some behind the row
#define SCALES       8
#define ROW_WORDS    (LL_ROUTING_WORDS + 3 * 64)
#define RESULT_WORDS (3 * 64)
#define TOKEN_FIRST  100
#define TIMEOUT_NS   400000000
#define POISON       0xa5

struct shape {
    int32_t ranks, own, wire_format, hidden, rows_most, by_rank;
};

struct word {
    uint64_t value, tag;
};

struct ll_window {
    struct {
        uint64_t value;
        unsigned char rest[FLAG_LINE_BYTES - 8];
    } lines[1 + WORD_COUNT * RANKS];
    struct word rows[RANKS - 1][1 + ROWS * ROW_WORDS], results[RANKS - 1][ROWS * RESULT_WORDS];
};

// What else a rank has; slabs have a row more than may be written.
struct rank_memory {
    struct flag_state state;
    int32_t counts[RANKS], tokens_valid, send_slot[ROWS * RANKS];
    int32_t ids[ROWS][TOP_K], own_ids[ROWS + 1][TOP_K], slab_ids[RANKS * (ROWS + 1) * TOP_K];
    float weights[ROWS][TOP_K], own_weights[ROWS + 1][TOP_K];
    float slab_weights[RANKS - 1][ROWS + 1][TOP_K];
    _Alignas(16) unsigned char x[ROWS][ROW_BYTES], y[ROWS][ROW_BYTES];
    _Alignas(16) unsigned char results[RANKS - 1][ROWS][ROW_BYTES]; // for peers
    _Alignas(16) unsigned char slab_rows[RANKS - 1][ROWS + 1][ROW_BYTES];
    float slab_scales[RANKS - 1][ROWS + 1][SCALES];
};

// One rank, all in memory of one device: as it is, then as it should be.
struct scene {
    struct shape shape;
    struct rank_memory memory, got;
    struct ll_window windows[RANKS], seen;
    struct rank_memory *device_memory;
    struct ll_window *device_windows[RANKS];
    struct flag_report *report; // pinned
    cudaStream_t stream;
    int64_t timeout_ns;
    int32_t sms, tokens, everywhere, pad_rows, echoes;
};

// What a peer sends of one token.
struct row {
    unsigned char numbers[ROW_BYTES];
    float scales[SCALES], weights[TOP_K];
    int32_t ids[TOP_K];
};

// Of rows and counts that a peer sends in this epoch.
#define STAMP(generation, epoch) ((uint64_t)(generation) << FLAG_EPOCH_BITS | (epoch))
#define TAG                      STAMP(GENERATION, EPOCH)

// What peers have written is in nobody's window yet, and no flag.
struct scene *scene_open(const struct shape *shape, int32_t sms);
void scene_close(struct scene *scene);

// Of the slab of `rank` at `own`.
int32_t scene_index(int32_t rank, int32_t own);
int scene_is_peer(const struct scene *scene, int32_t rank);
int32_t scene_x_format(const struct shape *shape);
uint64_t *scene_line(struct scene *scene, int32_t owner, int32_t word, int32_t source);
struct word *scene_row_words(struct scene *scene, int32_t owner, int32_t source, int32_t row);
// Where the ids of the own tokens are.
int32_t *scene_own_ids(const struct shape *s, struct rank_memory *m);

// Any bytes: none is looked at as a number.
struct row scene_row_of(int32_t source, int32_t index);
// Numbers whose sums hang on their order, in f32, too.
void scene_fill_numbers(int32_t format, unsigned char (*rows)[ROW_BYTES], uint32_t seed);
// As words; `rest` fills lanes behind the row.
void scene_put_row(const struct shape *s, const struct row *row, uint64_t tag, uint64_t rest,
                   struct word *to);
// `rest` NULL: those lanes get no words.
void scene_put_numbers(const unsigned char *numbers, int32_t hidden, int32_t of_eight, uint64_t tag,
                       const uint64_t *rest, struct word *to);
struct word scene_count_word(int32_t rows, int32_t sent, int32_t round, uint64_t tag);

// Of memory of the device, or of the test's own for the CPU's kernels.
struct dispatch_args scene_dispatch_args(const struct scene *scene, struct rank_memory *m,
                                         const struct push_slab *to, const int64_t *expert_first);
struct sum_args scene_sum_args(const struct scene *scene, struct rank_memory *m);
void scene_upload(const struct scene *scene);
void scene_launch_dispatch(struct scene *scene, int32_t sends, int32_t waits);
void scene_launch_sum(struct scene *scene, int32_t sends, int32_t waits);
// What the device has becomes scene->got; the verdict.
uint32_t scene_finish(struct scene *scene);
// All of it, in epoch EPOCH, which a dispatch that sends begins.
uint32_t scene_dispatch(struct scene *scene, int32_t sends, int32_t waits);
uint32_t scene_sum(struct scene *scene, int32_t sends, int32_t waits);

// That the device has what scene->memory has, and what lies around it.
void scene_expect_memory(const struct scene *scene);
// The same of windows, but for who waits, which is told after a while.
void scene_expect_windows(struct scene *scene);
// Rows of all peers for this rank, in one of SENT_VARIANTS. Those that are not sent are of the
// epoch before.
#define SENT_VARIANTS 4
void scene_peers_send(struct scene *scene, int32_t variant);
// What becomes of them, in scene->memory.
void scene_want_received(struct scene *scene, int32_t variant);

#endif
