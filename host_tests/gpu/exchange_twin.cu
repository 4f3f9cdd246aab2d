// dispatch and sum and their CPU twins, same args structs, same random data: ranks that are away or own nothing, maps with
// holes, ids of nobody, full slabs, padding, a failed group. Every byte of all memory must be equal afterwards.

#include "host_tests/gpu/twin.cuh"

extern "C" {
#include "kernels/cpu/numbers.h"
#include "kernels/cpu/rows.h"
}

#define POISON 0x5a // neither an id of -1 nor a number of 0

static int one_in(uint32_t times)
{
    return draw(times) == 0;
}

static int draw_format()
{
    static const int formats[] = {FORMAT_BF16, FORMAT_F16, FORMAT_F32};

    return formats[draw(3)];
}

// Mostly numbers of many magnitudes, whole groups of zeros, and what scales stumble over. No NaN: its bits are nobody's promise.
static void fill_numbers(twin &to, int format, int64_t count, bool rare)
{
    static const float odd[] = {0.0f, -0.0f, INFINITY, 3e38f, 1e-44f};
    bool zeros = one_in(4);

    for (int64_t i = 0; i < count; i++) {
        float value = ldexpf((float)((int)draw(4001) - 2000), (int)draw(16) - 14);

        if (zeros && i / 128 % 3 == 0) value = 0.0f;
        if (rare && one_in(3000)) value = odd[draw(5)];
        numbers_encode(format, &value, 1, to.cpu.data() + i * number_bytes(format));
    }
    to.send();
}

// ---- dispatch ----------------------------------------------------------------------------------

struct shape {
    int ranks, rank, tokens, cap, top_k, hidden, map_count, id_bytes, weight_format, x_format, wire_format;
    int everywhere, pad_rows, failed, sms;
    int64_t x_stride, id_stride, weight_stride, row_stride, scale_stride;
    int64_t expert_first[KERNEL_RANKS_MAX + 1];
};

static shape draw_shape()
{
    bool many_ranks = one_in(12), many_tokens = one_in(8);
    shape s = {};

    s.ranks = many_ranks ? 10 + (int)draw(55) : 1 + (int)draw(9);
    s.rank = (int)draw(s.ranks);
    s.tokens = one_in(10) ? 0 : many_tokens ? 1000 + (int)draw(2200) : one_in(4) ? 200 + (int)draw(400) : (int)draw(70);
    s.cap = one_in(3) ? 1 + (int)draw(s.tokens + 1) : s.tokens + 1 + (int)draw(draw(2) ? 3 : 30);
    s.top_k = 1 + (int)draw(one_in(8) ? 32 : 8);
    s.hidden = 8 * (1 + (int)draw(many_tokens || many_ranks ? 4 : one_in(3) ? 300 : 80));
    s.map_count = draw(2) ? 0 : 1 + (int)draw(30);
    s.id_bytes = draw(2) ? 4 : 8;
    s.weight_format = draw_format();
    s.x_format = draw_format();
    s.wire_format = draw(2) ? s.x_format : FORMAT_FP8_BLOCK128;
    s.everywhere = one_in(3);
    s.pad_rows = draw(2) ? 0 : (int)draw(s.cap + 4);
    s.failed = (int)draw(8);
    s.sms = draw(2) ? 0 : draw(2) ? 1 : 2 + (int)draw(23);
    s.x_stride = s.hidden * number_bytes(s.x_format) + 16 * draw(2);
    s.id_stride = (s.top_k + draw(3)) * s.id_bytes;
    s.weight_stride = (s.top_k + draw(3)) * number_bytes(s.weight_format);
    s.row_stride = (row_bytes(s.wire_format, s.hidden) + 15) / 16 * 16 + 16 * draw(2);
    s.scale_stride = row_scale_bytes(s.wire_format, s.hidden) + 4 * draw(3);
    for (int r = 0; r < s.ranks; r++)
        s.expert_first[r + 1] = s.expert_first[r] + draw(many_ranks ? 3 : 6);
    return s;
}

static void print_shape(const shape &s)
{
    printf("ranks %d rank %d tokens %d cap %d top-k %d hidden %d map %d id bytes %d formats %d %d %d everywhere %d pad %d failed %d\n",
           s.ranks, s.rank, s.tokens, s.cap, s.top_k, s.hidden, s.map_count, s.id_bytes, s.x_format, s.wire_format, s.weight_format,
           s.everywhere, s.pad_rows, s.failed);
}

struct source {
    twin x, ids, weights, valid, map, failed;

    explicit source(const shape &s)
        : x(s.tokens * s.x_stride), ids(s.tokens * s.id_stride), weights(s.tokens * s.weight_stride), valid(4), map(s.map_count * 4),
          failed(4)
    {
    }
};

static void fill_source(const shape &s, source &from)
{
    int experts = (int)s.expert_first[s.ranks];

    fill_numbers(from.x, s.x_format, s.tokens * s.x_stride / number_bytes(s.x_format), s.wire_format == FORMAT_FP8_BLOCK128);
    fill_numbers(from.weights, s.weight_format, s.tokens * s.weight_stride / number_bytes(s.weight_format), false);
    for (int64_t i = 0; i < s.tokens * s.id_stride / s.id_bytes; i++) {
        int64_t id = (int64_t)draw(experts + 6) - 3;

        if (one_in(40)) id = draw(2) ? INT32_MAX : INT32_MIN;
        if (s.id_bytes == 8)
            ((int64_t *)from.ids.cpu.data())[i] = one_in(40) ? id + ((int64_t)1 << 32) : id;
        else
            ((int32_t *)from.ids.cpu.data())[i] = (int32_t)id;
    }
    for (int i = 0; i < s.map_count; i++)
        ((int32_t *)from.map.cpu.data())[i] = (int32_t)draw(experts + 4) - 2;
    *(int32_t *)from.valid.cpu.data() = draw(8) ? (int32_t)draw(s.tokens + 9) : draw(2) ? INT32_MIN : INT32_MAX;
    *(uint32_t *)from.failed.cpu.data() = s.failed == 1 ? 0x80000000u : 0;
    for (twin *t : {&from.ids, &from.map, &from.valid, &from.failed})
        t->send();
}

struct destination {
    twin rows, scales, ids, weights, counts, send_slot, rows_sent, rows_told;

    explicit destination(const shape &s)
        : rows(s.ranks * s.cap * s.row_stride), scales(s.ranks * s.cap * s.scale_stride), ids((size_t)s.ranks * places(s) * 4),
          weights((size_t)s.ranks * places(s) * 4), counts(s.ranks * sizeof(round_count)), send_slot((size_t)s.tokens * s.ranks * 4), rows_sent(8), rows_told(8)
    {
        for (twin *t : {&rows, &scales, &ids, &weights, &counts, &send_slot, &rows_sent, &rows_told})
            t->fill(POISON);
    }
    // Of a slab, which the own rank's tokens fit too.
    static int64_t places(const shape &s)
    {
        return (int64_t)(s.cap > s.tokens ? s.cap : s.tokens) * s.top_k;
    }
};

// Rank r is away when bit r of `away` is set.
static void view(const shape &s, destination &to, uint64_t away, bool device, push_slab *slabs)
{
    for (int r = 0; r < s.ranks; r++) {
        slabs[r] = push_slab();
        if ((away >> r & 1) != 0) continue;
        slabs[r].ids = to.ids.on<int32_t>(device) + r * destination::places(s);
        slabs[r].weights = to.weights.on<float>(device) + r * destination::places(s);
        if (r == s.rank) continue;
        slabs[r].rows = to.rows.on<char>(device) + r * s.cap * s.row_stride;
        slabs[r].scales = to.scales.on<char>(device) + r * s.cap * s.scale_stride;
        slabs[r].count = to.counts.on<round_count>(device) + r;
    }
}

static dispatch_args args_of(const shape &s, source &from, destination &to, bool device)
{
    dispatch_args args = {};

    args.x = from.x.on<void>(device);
    args.ids = from.ids.on<void>(device);
    args.weights = from.weights.on<void>(device);
    args.expert_map = s.map_count > 0 ? from.map.on<int32_t>(device) : NULL;
    args.expert_first = s.expert_first;
    args.failed = s.failed < 4 ? from.failed.on<uint32_t>(device) : NULL;
    args.send_slot = to.send_slot.on<int32_t>(device);
    args.x_stride_bytes = s.x_stride;
    args.id_stride_bytes = s.id_stride;
    args.weight_stride_bytes = s.weight_stride;
    args.row_stride_bytes = s.row_stride;
    args.scale_stride_bytes = s.scale_stride;
    args.map_count = s.map_count;
    args.x_format = s.x_format;
    args.wire_format = s.wire_format;
    args.id_bytes = s.id_bytes;
    args.weight_format = s.weight_format;
    args.tokens = s.tokens;
    args.hidden = s.hidden;
    args.top_k = s.top_k;
    args.rows_cap = s.cap;
    args.ranks = s.ranks;
    args.rank = s.rank;
    args.everywhere = s.everywhere;
    args.pad_rows = s.pad_rows;
    args.sms = s.sms;
    return args;
}

static int try_dispatch()
{
    shape s = draw_shape();
    source from(s);
    destination to(s);
    uint64_t away = draw(2) ? 0 : (uint64_t)draw(UINT32_MAX) << 32 | draw(UINT32_MAX);
    bool padded = draw(2), counted = draw(4);
    int64_t first = draw(4);
    int same;

    away &= away << 1;
    fill_source(s, from);
    for (int device = 0; device < 2; device++) {
        dispatch_args args = args_of(s, from, to, device);
        push_slab slabs[KERNEL_RANKS_MAX];

        view(s, to, away, device, slabs);
        args.to = slabs;
        args.tokens_valid = padded ? from.valid.on<int32_t>(device) : NULL;
        args.token_first = first;
        args.round = static_cast<int32_t>(first);
        args.rows_sent = counted ? to.rows_sent.on<uint64_t>(device) : NULL;
        args.rows_told = counted && first == 0 ? to.rows_told.on<uint64_t>(device) : NULL;
        CHECK(device ? kernels_cuda.dispatch(&args, NULL) : kernels_cpu.dispatch(&args, stream_of_cpu()));
    }
    CHECK(cudaDeviceSynchronize());
    if (s.wire_format == FORMAT_FP8_BLOCK128) to.rows.clear_nan_signs();
    same = to.send_slot.same("dispatch.send_slot") & to.counts.same("dispatch.counts") & to.rows_sent.same("dispatch.rows_sent") & to.rows_told.same("dispatch.rows_told") &
           to.ids.same("dispatch.ids") & to.weights.same("dispatch.weights") & to.rows.same("dispatch.rows") &
           to.scales.same("dispatch.scales");
    if (!same) print_shape(s);
    return same;
}

// ---- sum ---------------------------------------------------------------------------------------

static int try_sum()
{
    bool wide = one_in(8); // a row has more pieces than a block has warps
    int ranks = one_in(6) ? 10 + (int)draw(55) : 1 + (int)draw(9), rank = (int)draw(ranks), tokens = (int)draw(wide ? 5 : 40);
    int cap = 1 + (int)draw(wide ? 4 : 40), hidden = 8 * (1 + (wide ? 1024 : 0) + (int)draw(80)), format = draw_format(), bytes = (int)number_bytes(format);
    int64_t y_stride = (hidden + 4 * draw(3)) * bytes, part_stride = (hidden + 4 * draw(3)) * bytes;
    int64_t y_offset = draw(2) * bytes, part_offset = draw(2) * bytes;
    twin y(tokens * y_stride + y_offset), parts(ranks * cap * part_stride + part_offset), slots((size_t)tokens * ranks * 4), failed(4), now(8);
    uint64_t active = draw(2) ? ~(uint64_t)0 : (uint64_t)draw(UINT32_MAX) << 32 | draw(UINT32_MAX);
    uint64_t missing = one_in(3) ? draw(UINT32_MAX) : 0;
    int fails = (int)draw(8), earlier = draw(2) ? (int)draw(tokens + 1) : 0, sms = draw(2) ? 0 : draw(2) ? 1 : 2 + (int)draw(23), same;

    fill_numbers(y, format, (tokens * y_stride + y_offset) / bytes, false);
    fill_numbers(parts, format, (ranks * cap * part_stride + part_offset) / bytes, false);
    for (int i = 0; i < tokens * ranks; i++)
        ((int32_t *)slots.cpu.data())[i] = one_in(50) ? INT32_MIN : (int32_t)draw(cap + 4) - 2;
    slots.send();
    *(uint32_t *)failed.cpu.data() = fails == 1 ? 2 : 0;
    failed.send();
    *(uint64_t *)now.cpu.data() = active;
    now.send();
    for (int device = 0; device < 2; device++) {
        const void *rows[KERNEL_RANKS_MAX] = {};
        sum_args args = {};

        for (int r = 0; r < ranks; r++)
            if (r != rank && (missing >> r & 1) == 0) rows[r] = parts.on<char>(device) + part_offset + r * cap * part_stride;
        args.y = y.on<char>(device) + y_offset + earlier * y_stride;
        args.y_earlier = y.on<char>(device) + y_offset;
        args.tokens_earlier = earlier;
        args.sms = sms;
        args.y_stride_bytes = y_stride;
        args.parts = rows;
        args.part_stride_bytes = part_stride;
        args.send_slot = slots.on<int32_t>(device);
        args.failed = fails < 4 ? failed.on<uint32_t>(device) : NULL;
        // A graph holds the ranks of its capture, and the device those of now.
        args.active_now = fails % 2 ? now.on<uint64_t>(device) : NULL;
        args.active = fails % 2 ? ~active : active;
        args.format = format;
        args.tokens = tokens - earlier;
        args.hidden = hidden;
        args.ranks = ranks;
        args.rank = rank;
        args.rows_cap = cap;
        CHECK(device ? kernels_cuda.sum(&args, NULL) : kernels_cpu.sum(&args, stream_of_cpu()));
    }
    CHECK(cudaDeviceSynchronize());
    same = y.same("sum.y");
    if (!same) printf("ranks %d rank %d tokens %d after %d cap %d hidden %d format %d failed %d\n", ranks, rank, tokens - earlier, earlier, cap, hidden, format, fails);
    return same;
}

// ---- What there is no kernel for ---------------------------------------------------------------

static int try_refusals()
{
    shape s = draw_shape();
    source from(s);
    destination to(s);
    push_slab slabs[KERNEL_RANKS_MAX];
    dispatch_args args = args_of(s, from, to, true);
    sum_args sum = {};
    int refused;

    view(s, to, 0, true, slabs);
    args.to = slabs;
    args.wire_format = FORMAT_NVFP4;
    refused = kernels_cuda.dispatch(&args, NULL) == cudaErrorInvalidValue;
    args.wire_format = s.x_format == FORMAT_BF16 ? FORMAT_F16 : FORMAT_BF16;
    refused &= kernels_cuda.dispatch(&args, NULL) == cudaErrorInvalidValue;
    args.wire_format = s.x_format;
    args.hidden = 12;
    refused &= kernels_cuda.dispatch(&args, NULL) == cudaErrorInvalidValue;
    sum.format = FORMAT_FP8_BLOCK128;
    sum.hidden = 8;
    refused &= kernels_cuda.sum(&sum, NULL) == cudaErrorInvalidValue;
    if (!refused) printf("something without a kernel was not refused\n");
    return refused;
}

static int try_seed()
{
    return try_dispatch() && try_sum() && try_refusals();
}

int main(int argc, char **argv)
{
    return try_seeds(argc, argv, try_seed);
}
