// dispatch on the CPU: slots in token order first, by one thread, then the rows, each read once and
// written to all its destinations piece by piece. Counts come last.

#include "kernels/dispatch.h"

#include "kernels/cpu/ids.h"
#include "kernels/cpu/numbers.h"
#include "kernels/cpu/rows.h"
#include "kernels/cpu/work.h"

#include <string.h>

#define GRAIN 8

// The physical id at one position, -1 for "no expert".
static int64_t physical_id(const struct dispatch_args *args, int64_t token, int64_t valid,
                           int32_t t)
{
    const unsigned char *ids = (const unsigned char *)args->ids + token * args->id_stride_bytes;

    if (token >= valid) return -1;
    return id_mapped(args->expert_map, args->map_count, id_read(ids, t, args->id_bytes), 0,
                     args->expert_first[args->ranks]);
}

// Tokens of this round that may have an expert.
static int64_t tokens_valid(const struct dispatch_args *args)
{
    int64_t valid = args->tokens;

    if (args->tokens_valid != NULL)
        valid = id_read(args->tokens_valid, 0, sizeof *args->tokens_valid) - args->token_first;
    return valid < 0 ? 0 : min64(valid, args->tokens);
}

static int32_t owner_of(const struct dispatch_args *args, int64_t id)
{
    int32_t low = 0, high = args->ranks - 1;

    while (low < high) {
        int32_t middle = (low + high + 1) / 2;

        if (args->expert_first[middle] <= id)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

// Bit r: rank r gets this token.
static uint64_t destinations(const struct dispatch_args *args, int64_t token, int64_t valid)
{
    uint64_t ranks = 0;

    for (int32_t t = 0; t < args->top_k && !args->everywhere; t++) {
        int64_t id = physical_id(args, token, valid, t);

        if (id >= 0) ranks |= (uint64_t)1 << owner_of(args, id);
    }
    return args->everywhere ? UINT64_MAX : ranks;
}

// Rows of the rank itself stay where they are, under the token's number.
static int is_own(const struct dispatch_args *args, int32_t rank)
{
    return rank == args->rank && args->to[rank].ids != NULL;
}

// Fills send_slot, and `sent` with the rows of each destination, at most `cap`.
static void choose_slots(const struct dispatch_args *args, int64_t valid, int32_t cap,
                         int32_t *sent)
{
    for (int64_t token = 0; token < args->tokens; token++) {
        uint64_t ranks = destinations(args, token, valid);

        for (int32_t rank = 0; rank < args->ranks; rank++) {
            int32_t *slot = &args->send_slot[token * args->ranks + rank];

            *slot = -1;
            if ((ranks >> rank & 1u) == 0 || rank == args->rank || args->to[rank].rows == NULL ||
                sent[rank] >= cap)
                continue;
            *slot = sent[rank]++;
        }
    }
}

static struct row_view token_row(const struct dispatch_args *args, int64_t token)
{
    return (struct row_view){
        .values = (const unsigned char *)args->x + token * args->x_stride_bytes,
        .format = args->x_format,
    };
}

static unsigned char *slot_scales(const struct dispatch_args *args, const struct push_slab *to,
                                  int64_t slot)
{
    if (row_scale_bytes(args->wire_format, args->hidden) == 0) return NULL;
    return (unsigned char *)to->scales + slot * args->scale_stride_bytes;
}

static struct row_out slot_piece(const struct dispatch_args *args, const struct push_slab *to,
                                 int64_t slot, int64_t first)
{
    unsigned char *values = (unsigned char *)to->rows + slot * args->row_stride_bytes;

    return row_piece(args->wire_format, values, slot_scales(args, to, slot), first);
}

// The same columns of a token to all its destinations, encoded once.
static void push_piece(const struct dispatch_args *args, int64_t token, int64_t first, float global)
{
    const int32_t *slots = args->send_slot + token * args->ranks;
    struct row_view row = token_row(args, token);
    int64_t count = min64(args->hidden - first, ROW_PIECE);
    uint8_t values[ROW_PIECE * 4], scales[ROW_PIECE];
    struct row_out piece = {.values = values, .scales = scales};
    float decoded[ROW_PIECE];

    row_decode(&row, first, count, decoded);
    row_encode(args->wire_format, decoded, count, global, &piece);
    for (int32_t rank = 0; rank < args->ranks; rank++) {
        const struct push_slab *to = &args->to[rank];
        struct row_out out;

        if (slots[rank] < 0) continue;
        out = slot_piece(args, to, slots[rank], first);
        memcpy(out.values, values, (size_t)row_bytes(args->wire_format, count));
        if (out.scales != NULL)
            memcpy(out.scales, scales, (size_t)piece_scale_bytes(args->wire_format, count));
    }
}

static void write_routing(const struct dispatch_args *args, int64_t token, int64_t valid,
                          const struct push_slab *to, int64_t row)
{
    const unsigned char *weights =
        (const unsigned char *)args->weights + token * args->weight_stride_bytes;

    for (int32_t t = 0; t < args->top_k; t++) {
        to->ids[row * args->top_k + t] = (int32_t)physical_id(args, token, valid, t);
        to->weights[row * args->top_k + t] = number_load(args->weight_format, weights, t);
    }
}

static void push_routing(const struct dispatch_args *args, int64_t token, int64_t valid)
{
    const int32_t *slots = args->send_slot + token * args->ranks;

    for (int32_t rank = 0; rank < args->ranks; rank++) {
        if (slots[rank] >= 0) write_routing(args, token, valid, &args->to[rank], slots[rank]);
    }
    if (is_own(args, args->rank)) write_routing(args, token, valid, &args->to[args->rank], token);
}

static void push_token(const struct dispatch_args *args, int64_t token, int64_t valid)
{
    const int32_t *slots = args->send_slot + token * args->ranks;
    struct row_view row = token_row(args, token);
    float global = 0.0f;
    int32_t goes = 0;

    push_routing(args, token, valid);
    for (int32_t rank = 0; rank < args->ranks; rank++)
        goes |= slots[rank] >= 0;
    if (!goes) return;
    if (args->wire_format == FORMAT_NVFP4) global = nvfp4_global(row_largest(&row, args->hidden));
    for (int32_t rank = 0; rank < args->ranks; rank++) {
        if (slots[rank] >= 0)
            row_begin(args->wire_format, global, slot_scales(args, &args->to[rank], slots[rank]));
    }
    for (int64_t first = 0; first < args->hidden; first += ROW_PIECE)
        push_piece(args, token, first, global);
}

struct dispatch_work {
    const struct dispatch_args *args;
    int64_t valid;
};

static void dispatch_body(struct work *work, unsigned char *scratch)
{
    const struct dispatch_work *dispatch = work->args;
    int64_t first, end;

    (void)scratch;
    while (work_next(work, &first, &end)) {
        for (int64_t token = first; token < end; token++)
            push_token(dispatch->args, token, dispatch->valid);
    }
}

// Rows past the tokens are reported without an expert; their columns are nobody's to read.
static int32_t pad(const struct dispatch_args *args, const struct push_slab *to, int32_t sent)
{
    int32_t rows = args->everywhere ? (int32_t)min64(args->pad_rows, args->rows_cap) : 0;

    for (int64_t i = (int64_t)sent * args->top_k; i < (int64_t)rows * args->top_k; i++) {
        to->ids[i] = -1;
        to->weights[i] = 0.0f;
    }
    return rows > sent ? rows : sent;
}

// The count of every rank that gets rows, after the rows.
static void write_counts(const struct dispatch_args *args, const int32_t *sent)
{
    uint64_t all = 0;

    for (int32_t rank = 0; rank < args->ranks; rank++) {
        const struct push_slab *to = &args->to[rank];
        int32_t count;

        if (rank == args->rank || to->rows == NULL) continue;
        count = pad(args, to, sent[rank]);
        __atomic_store_n(&to->count->round, args->round, __ATOMIC_RELAXED);
        __atomic_store_n(&to->count->rows, count, __ATOMIC_RELEASE);
        all += (uint64_t)count;
    }
    if (args->rows_sent == NULL) return;
    *args->rows_sent += all;
    if (args->rows_told != NULL) *args->rows_told = *args->rows_sent;
}

int32_t dispatch_cpu(const struct dispatch_args *args, void *stream)
{
    int failed = has_failed(args->failed);
    struct dispatch_work dispatch = {.args = args, .valid = failed ? 0 : tokens_valid(args)};
    struct work work = {
        .body = dispatch_body, .args = &dispatch, .items = args->tokens, .grain = GRAIN};
    int32_t sent[KERNEL_RANKS_MAX] = {0};

    choose_slots(args, dispatch.valid, failed ? 0 : args->rows_cap, sent);
    work_run(&work, stream, (int64_t)args->tokens * args->hidden * 4);
    if (!failed) write_counts(args, sent);
    return 0;
}
