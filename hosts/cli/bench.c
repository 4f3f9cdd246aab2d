// Shapes, routings and random weights of the bench.

#include "hosts/cli/bench.h"

#include <stdlib.h>
#include <string.h>

#define STAGING_BYTES ((uint64_t)8 << 20) // a multiple of what is drawn at once

struct named_shape {
    const char *name;
    struct bench_shape shape;
};

static const struct named_shape named_shapes[] = {
    {"q30b", {2048, 768, 128, 8}},       {"q235b", {4096, 1536, 128, 8}},
    {"dsv3ep8", {7168, 2048, 32, 1}}, // one rank's share of DeepSeek-V3 over 8
    {"mixtral", {4096, 14336, 8, 2}},    {"dsv3", {7168, 2048, 256, 8}},
    {"h4096e256", {4096, 2048, 256, 6}},
};

static const char *const op_words[] = {"layer", "dispatch", "combine", "both"};

int bench_op_parse(const char *word)
{
    for (int op = BENCH_LAYER; op <= BENCH_BOTH; op++)
        if (word != NULL && strcmp(word, op_words[op]) == 0) return op;
    return -1;
}

const char *bench_op_word(int op)
{
    return op_words[op];
}

_Static_assert(MOXIE_TOP_K_MAX == 32, "a text below names it");

const char *bench_shape_parse(struct bench_shape *shape, const char *text)
{
    int64_t *const sizes[4] = {&shape->hidden, &shape->intermediate, &shape->experts,
                               &shape->top_k};

    for (size_t i = 0; i < sizeof named_shapes / sizeof named_shapes[0]; i++)
        if (strcmp(named_shapes[i].name, text) == 0) {
            *shape = named_shapes[i].shape;
            return NULL;
        }
    for (int i = 0; i < 4; i++) {
        char *end = NULL;

        *sizes[i] = strtoll(text, &end, 10); // past 64 bits it is the largest
        if (end == text || *end != (i < 3 ? ',' : '\0'))
            return "HIDDEN,INTERMEDIATE,EXPERTS,TOP_K, or q30b, q235b, dsv3ep8, mixtral, dsv3, "
                   "h4096e256";
        text = end + 1;
    }
    for (int i = 0; i < 4; i++)
        if (*sizes[i] < 1 || *sizes[i] > (int64_t)1 << 40)
            return "HIDDEN,INTERMEDIATE,EXPERTS,TOP_K, each from 1 to 1099511627776";
    if (shape->experts > INT32_MAX) return "EXPERTS at most 2147483647";
    if (shape->top_k > MOXIE_TOP_K_MAX) return "TOP_K at most 32";
    if (shape->top_k > shape->experts)
        return "TOP_K at most EXPERTS: a token has different experts";
    return NULL;
}

// Steele, Lea and Flood's splitmix64: any seed will do.
static uint64_t next_random(uint64_t *state)
{
    uint64_t mixed = *state += 0x9e3779b97f4a7c15u;

    mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9u;
    mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebu;
    return mixed ^ mixed >> 31;
}

static int contains(const int32_t *ids, int64_t count, int32_t id)
{
    for (int64_t i = 0; i < count; i++)
        if (ids[i] == id) return 1;
    return 0;
}

double bench_random(uint64_t seed)
{
    return (double)(next_random(&seed) >> 11) / 9007199254740992.0; // 2^53
}

// `count` of the `of` experts from `first` on, different ones (Floyd): the i-th draw is from one
// more than the last could be.
static void draw_experts(uint64_t *state, int64_t first, int64_t of, int64_t count, int32_t *ids)
{
    for (int64_t i = 0; i < count; i++) {
        int64_t last = of - count + i;
        int32_t id = (int32_t)(first + (int64_t)(next_random(state) % (uint64_t)(last + 1)));

        ids[i] = contains(ids, i, id) ? (int32_t)(first + last) : id;
    }
}

int64_t bench_experts_first(int64_t experts, int ranks, int rank)
{
    int64_t rest = experts % ranks;

    return rank * (experts / ranks) + (rank < rest ? rank : rest);
}

// Pairs of a token at rank 0, of k: as many as it has experts for.
static double pairs_wanted(const struct bench_shape *shape, int ranks, double skew)
{
    return skew * (double)shape->top_k / ranks;
}

double bench_skew_max(const struct bench_shape *shape, int ranks)
{
    int64_t own = bench_experts_first(shape->experts, ranks, 1);
    int64_t most = own < shape->top_k ? own : shape->top_k;

    return (double)(most * ranks) / (double)shape->top_k;
}

// How many of a token's experts rank 0 has: the whole part of what is wanted, and at times one
// more.
static int64_t draw_pairs(const struct bench_shape *shape, const struct draw *draw, uint64_t *state)
{
    int64_t own = bench_experts_first(shape->experts, draw->ranks, 1);
    double wanted = pairs_wanted(shape, draw->ranks, draw->skew);
    int64_t pairs = (int64_t)wanted;
    int64_t least = shape->top_k - (shape->experts - own);
    int64_t most = own < shape->top_k ? own : shape->top_k;

    pairs += bench_random(next_random(state)) < wanted - (double)pairs;
    if (pairs < least) pairs = least;
    return pairs < most ? pairs : most;
}

void bench_draw_ids(const struct bench_shape *shape, const struct draw *draw, int64_t tokens,
                    int32_t *ids)
{
    uint64_t state =
        (uint64_t)draw->cell << 40 ^ (uint64_t)draw->repetition << 20 ^ (uint64_t)draw->rank;
    int64_t own = draw->skew > 0 ? bench_experts_first(shape->experts, draw->ranks, 1) : 0;

    for (int64_t token = 0; token < tokens; token++, ids += shape->top_k) {
        int64_t pairs = draw->skew > 0 ? draw_pairs(shape, draw, &state) : 0;

        draw_experts(&state, 0, own, pairs, ids);
        draw_experts(&state, own, shape->experts - own, shape->top_k - pairs, ids + pairs);
    }
}

void bench_weights_shapes(const struct bench_shape *shape, int32_t format, int64_t experts,
                          struct weights_shape *w1, struct weights_shape *w2)
{
    const struct weights_shape like = {
        .format = format, .order = MOXIE_ORDER_GATE_UP, .experts = experts};

    weights_shapes(shape->hidden, shape->intermediate, &like, w1, w2);
}

uint64_t bench_layer_bytes(const struct bench_shape *shape, int32_t format, int64_t experts)
{
    struct weights_shape w1;
    struct weights_shape w2;

    bench_weights_shapes(shape, format, experts, &w1, &w2);
    return weights_bytes_of_two(&w1, &w2);
}

// Eight bytes of numbers at a time: random where `random` has ones, then `fixed`.
struct bits {
    uint64_t random, fixed;
};

// Magnitudes around 2^-5, so that a layer's output stays near its input.
static const struct bits f32_bits = {0x807fffff807fffff, 0x3d0000003d000000};
static const struct bits positive_f32_bits = {0x007fffff007fffff, 0x3d0000003d000000};
// 1/2 to 2, and so that fp8 codes with their scales are as large as the other formats' numbers: an
// output in f16 would be lost among its smallest numbers otherwise.
static const struct bits scales_of_fp8_bits = {0x00ffffff00ffffff, 0x3f0000003f000000};
static const struct bits bf16_bits = {0x80ff80ff80ff80ff, 0x3d003d003d003d00};
static const struct bits f16_bits = {0x83ff83ff83ff83ff, 0x2800280028002800};
static const struct bits e4m3_bits = {0x9f9f9f9f9f9f9f9f, 0x1010101010101010};
static const struct bits positive_e4m3_bits = {0x0f0f0f0f0f0f0f0f, 0x2020202020202020};
static const struct bits nibble_bits = {0xffffffffffffffff, 0};
static const struct bits e8m0_bits = {0x0303030303030303, 0x7878787878787878};

static void fill(uint8_t *out, uint64_t bytes, const struct bits *bits, uint64_t *state)
{
    for (uint64_t i = 0; i < bytes; i += sizeof(uint64_t)) {
        uint64_t word = (next_random(state) & bits->random) | bits->fixed;
        uint64_t left = bytes - i;

        memcpy(out + i, &word, left < sizeof word ? left : sizeof word);
    }
}

// The same numbers wherever the memory is.
static int fill_memory(const struct memory *memory, struct device *device, const struct bits *bits,
                       uint64_t seed, struct fault *fault)
{
    uint8_t *staging = NULL;
    int st = EXIT_OK;

    if (memory->at == NULL) return EXIT_OK;
    if (device->table->direct) {
        fill(memory->at, memory->bytes, bits, &seed);
        return EXIT_OK;
    }
    staging = malloc(STAGING_BYTES);
    if (staging == NULL) return fault_set(fault, EXIT_TROUBLE, "out of memory");
    for (uint64_t done = 0; done < memory->bytes; done += STAGING_BYTES) {
        uint64_t left = memory->bytes - done;
        uint64_t part = left < STAGING_BYTES ? left : STAGING_BYTES;

        fill(staging, part, bits, &seed);
        TRY(device->table->copy_in(device, memory->at + done, staging, part, fault));
    }
out:
    free(staging);
    return st;
}

static const struct bits *value_bits(int32_t format)
{
    switch (format) {
    case MOXIE_FORMAT_F32:
        return &f32_bits;
    case MOXIE_FORMAT_BF16:
        return &bf16_bits;
    case MOXIE_FORMAT_F16:
        return &f16_bits;
    case MOXIE_FORMAT_FP8_TENSOR:
    case MOXIE_FORMAT_FP8_CHANNEL:
    case MOXIE_FORMAT_FP8_BLOCK128:
        return &e4m3_bits;
    default:
        return &nibble_bits;
    }
}

static const struct bits *scale_bits(int32_t format)
{
    if (format == MOXIE_FORMAT_MXFP4) return &e8m0_bits;
    if (format_is_fp8(format)) return &scales_of_fp8_bits;
    return format == MOXIE_FORMAT_NVFP4 ? &positive_e4m3_bits : &positive_f32_bits;
}

int bench_fill_weights(struct weights *weights, uint64_t seed, struct fault *fault)
{
    struct device *device = weights->device;
    int32_t format = weights->shape.format;
    int st = EXIT_OK;

    TRY(fill_memory(&weights->values, device, value_bits(format), seed, fault));
    TRY(fill_memory(&weights->scales, device, scale_bits(format), seed + 1, fault));
    TRY(fill_memory(&weights->globals, device, &positive_f32_bits, seed + 2, fault));
out:
    return st;
}

int bench_fill_rows(struct memory *rows, struct device *device, int32_t format, uint64_t seed,
                    struct fault *fault)
{
    return fill_memory(rows, device, value_bits(format), seed, fault);
}
