// What `moxie bench` and its rank processes must agree on: shapes, routings, and the weights of
// random numbers.

#ifndef MOXIE_HOSTS_CLI_BENCH_H
#define MOXIE_HOSTS_CLI_BENCH_H

#include "hosts/cli/weights.h"

#define BENCH_CELLS_MAX       64
#define BENCH_REPETITIONS_MAX 1000 // --help of moxie bench says so
#define BENCH_REPETITIONS_MIN 3
#define BENCH_FORWARDS        8 // in one graph
#define BENCH_REPLAYS         30

// Of one MoE layer.
struct bench_shape {
    int64_t hidden, intermediate, experts, top_k;
};

// "q30b" or "2048,768,128,8". NULL, or which shape is wanted instead.
const char *bench_shape_parse(struct bench_shape *shape, const char *text);

// What is timed: a layer, or of a round without experts dispatch, combine or both.
enum bench_op { BENCH_LAYER, BENCH_DISPATCH, BENCH_COMBINE, BENCH_BOTH };

// -1 when the word is none.
int bench_op_parse(const char *word);
const char *bench_op_word(int op);

// Which routing: repetition `repetition` of cell `cell`, the tokens of `rank`. With a skew, rank 0
// of `ranks` gets about so many times the (token, expert) pairs of the mean.
struct draw {
    int cell, repetition, rank, ranks;
    double skew; // 0: uniform
};

// What a rank process is asked for.
struct bench_job {
    struct bench_shape shape;
    int32_t format, row_format; // MOXIE_FORMAT_* of the weights; of x and y
    int64_t tokens_max;
    double seconds; // for each cell
    int op;         // enum bench_op
    int replays;    // of a graph, at least
    double skew, delay_us;
    int cells;
    int64_t tokens[BENCH_CELLS_MAX];
};

// The first expert of a rank; `rank` may be `ranks`.
int64_t bench_experts_first(int64_t experts, int ranks, int rank);

// The largest skew that k different experts a token allow.
double bench_skew_max(const struct bench_shape *shape, int ranks);

// From 0 to 1, by the seed alone.
double bench_random(uint64_t seed);

// ids [tokens, k]: k different experts a token, the same in every process.
void bench_draw_ids(const struct bench_shape *shape, const struct draw *draw, int64_t tokens,
                    int32_t *ids);

// Gate and up, and down, of `experts` experts.
void bench_weights_shapes(const struct bench_shape *shape, int32_t format, int64_t experts,
                          struct weights_shape *w1, struct weights_shape *w2);

// Bytes of the weights of `experts` experts; 0 past 2^62, or where the format cannot cut the shape.
uint64_t bench_layer_bytes(const struct bench_shape *shape, int32_t format, int64_t experts);

// Random numbers of moderate size; no NaN in any format.
int bench_fill_weights(struct weights *weights, uint64_t seed, struct fault *fault);
// Numbers of a format without scales.
int bench_fill_rows(struct memory *rows, struct device *device, int32_t format, uint64_t seed,
                    struct fault *fault);

#endif
