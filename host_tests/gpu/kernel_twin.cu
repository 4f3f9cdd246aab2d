// The kernels beside the GEMMs and their CPU twins, same args structs, same random data with everything a host can send:
// ids of no expert, maps, counts past the end, several slabs, layouts by expert. What the twins write must be equal.

#include "host_tests/gpu/cuts.cuh"
#include "host_tests/gpu/scalings.cuh"
#include "host_tests/gpu/twin.cuh"

// ---- A draw ------------------------------------------------------------------------------------

#define SLABS_MAX KERNEL_RANKS_MAX

struct sample {
    int slabs, cap, top_k, experts, expert_first, map_count, id_bytes, hidden, by, rows_per_expert;
    int64_t positions;
};

static sample draw_sample()
{
    sample s;

    s.slabs = draw(4) ? 1 + (int)draw(3) : 1;
    s.cap = 1 + (int)draw(90);
    s.top_k = draw(6) ? 1 + (int)draw(draw(8) == 0 ? 32 : 8) : 1;
    s.experts = 1 + (int)draw(draw(8) == 0 ? 1024 : 20);
    s.expert_first = (int)draw(5);
    s.map_count = draw(2) ? 0 : 1 + (int)draw(30);
    s.id_bytes = draw(2) ? 4 : 8;
    s.hidden = 8 * (1 + (int)draw(80));
    s.by = draw(3) ? ROUTE_BY_IDS : draw(2) ? ROUTE_BY_PREFIX : ROUTE_BY_COUNTS;
    s.rows_per_expert = 1 + (int)draw(12);
    if (s.by != ROUTE_BY_IDS) {
        s.slabs = s.top_k = 1;
        s.cap = s.by == ROUTE_BY_COUNTS ? s.experts * s.rows_per_expert : s.cap;
    }
    s.positions = (int64_t)s.slabs * s.cap * s.top_k;
    return s;
}

// Positions for 3 to 132 blocks of route, in one slab or in up to 64.
static sample draw_many()
{
    sample s = draw_sample();
    int positions = draw(20) == 0 ? 140000 : 1500 + (int)draw(14000);

    s.by = ROUTE_BY_IDS;
    s.hidden = 8;
    s.slabs = 1 + (int)draw(draw(2) ? 3 : SLABS_MAX);
    s.top_k = 1 + (int)draw(draw(3) ? 8 : 32);
    s.cap = 1 + positions / s.slabs / s.top_k;
    if (draw(6) == 0) s.experts = 1 + (int)draw(1024);
    s.positions = (int64_t)s.slabs * s.cap * s.top_k;
    return s;
}

static void fill_ids(const sample &s, void *ids, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        int64_t id = (int64_t)draw(s.experts + 8) - 2;

        if (draw(40) == 0) id = draw(2) ? INT32_MAX : INT32_MIN;
        if (s.id_bytes == 8)
            ((int64_t *)ids)[i] = draw(60) == 0 ? id + ((int64_t)1 << 32) : id;
        else
            ((int32_t *)ids)[i] = (int32_t)id;
    }
}

// bf16 between -2 and 2.
static void fill_rows(void *to, int64_t numbers)
{
    for (int64_t i = 0; i < numbers; i++) {
        float value = (float)((int)draw(4001) - 2000) / 1000.0f;
        uint32_t bits;

        memcpy(&bits, &value, 4);
        ((uint16_t *)to)[i] = (uint16_t)(bits >> 16);
    }
}

// ---- The kernels -------------------------------------------------------------------------------

static int try_record()
{
    sample s = draw_sample();
    int tokens = (int)draw(s.cap + 1), experts = s.experts;
    twin ids((size_t)s.cap * s.top_k * s.id_bytes), map(s.map_count * 4), valid(4), out((size_t)s.cap * (s.top_k + 3) * 4);

    fill_ids(s, ids.cpu.data(), (int64_t)s.cap * s.top_k);
    for (int i = 0; i < s.map_count; i++)
        ((int32_t *)map.cpu.data())[i] = (int32_t)draw(experts + 4) - 2;
    *(int32_t *)valid.cpu.data() = draw(5) ? (int32_t)draw(s.cap + 9) : draw(2) ? INT32_MIN : INT32_MAX;
    ids.send();
    map.send();
    valid.send();
    bool padded = draw(2), mapped = s.map_count > 0;
    int64_t first = draw(4);
    for (int device = 0; device < 2; device++) {
        record_args args = {};

        args.ids = ids.on<void>(device);
        args.id_stride_bytes = s.top_k * s.id_bytes;
        args.expert_map = mapped ? map.on<int32_t>(device) : NULL;
        args.map_count = s.map_count;
        args.tokens_valid = padded ? valid.on<int32_t>(device) : NULL;
        args.token_first = first;
        args.out = out.on<int32_t>(device);
        args.out_stride = s.top_k + 3;
        args.id_bytes = s.id_bytes;
        args.tokens = tokens;
        args.top_k = s.top_k;
        args.experts = experts;
        CHECK(device ? kernels_cuda.record(&args, NULL) : kernels_cpu.record(&args, stream_of_cpu()));
    }
    CHECK(cudaDeviceSynchronize());
    return out.same("record.out");
}

static int try_quantise()
{
    int rows = (int)draw(20), columns = 1 + (int)draw(700), format = draw(2) ? FORMAT_BF16 : FORMAT_F32;
    int bytes = format == FORMAT_F32 ? 4 : 2, groups = (columns + 127) / 128;
    twin x((size_t)rows * columns * 4), out((size_t)rows * (columns + 5) + 1), scales((size_t)rows * groups * 4), count(4);
    twin index((size_t)rows * 4);
    bool counted = draw(2), indexed = draw(2);
    int shift = draw(3) == 0 ? (int)draw(220) - 110 : 0; // down to groups that are too small for a scale

    for (int i = 0; i < rows * columns; i++) {
        static const float rare[] = {0.0f, -0.0f, INFINITY, NAN, 3e38f, 1e-44f};
        float value = ldexpf((float)((int)draw(4001) - 2000), (int)draw(24) - 20 + shift);
        uint32_t bits;

        if (draw(3000) == 0) value = rare[draw(6)];
        if (columns % 7 == 0 && i / 128 % 3 == 0) value = 0.0f;
        memcpy(&bits, &value, 4);
        if (bytes == 4)
            ((float *)x.cpu.data())[i] = value;
        else
            ((uint16_t *)x.cpu.data())[i] = (uint16_t)(bits >> 16);
    }
    *(int32_t *)count.cpu.data() = (int32_t)draw(rows + 3) - 1;
    for (int i = 0; i < rows; i++)
        ((int32_t *)index.cpu.data())[i] = (int32_t)draw(rows);
    x.send();
    index.send();
    count.send();
    for (int device = 0; device < 2; device++) {
        quantise_args args = {};

        args.x = x.on<void>(device);
        args.rows = out.on<void>(device);
        args.scales = scales.on<void>(device);
        args.count = counted ? count.on<int32_t>(device) : NULL;
        args.x_row = indexed ? index.on<int32_t>(device) : NULL;
        args.x_stride_bytes = columns * bytes;
        args.row_stride_bytes = columns + 5;
        args.scale_stride_bytes = groups * 4;
        args.x_format = format;
        args.format = FORMAT_FP8_BLOCK128;
        args.rows_count = rows;
        args.columns = columns;
        CHECK(device ? kernels_cuda.quantise(&args, NULL) : kernels_cpu.quantise(&args, stream_of_cpu()));
    }
    CHECK(cudaDeviceSynchronize());
    out.clear_nan_signs();
    scales.one_nan();
    return out.same("quantise.rows") & scales.same("quantise.scales");
}

// Every number below `count` once, a third of them -1; now and then one that is past all, and so none.
static void shuffle_places(int32_t *to, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        size_t other = draw((uint32_t)i + 1);

        to[i] = to[other];
        to[other] = draw(3) ? (int32_t)i : -1;
    }
    if (draw(3) == 0) to[draw((uint32_t)count)] = draw(2) ? INT32_MAX : (int32_t)count;
}

// The places that are taken without gaps, as route makes them; x_row says whose each is. Returns how many.
static int32_t close_places(int32_t *places, int32_t *x_row, size_t count, int top_k)
{
    std::vector<int32_t> index(count, -1); // by place
    int32_t taken = 0;

    for (size_t i = 0; i < count; i++)
        if (places[i] >= 0 && places[i] < (int32_t)count) index[places[i]] = (int32_t)i;
    for (int32_t i : index) {
        if (i < 0) continue;
        x_row[taken] = i / top_k;
        places[i] = taken++;
    }
    return taken;
}

// Rows of several slabs in one launch, of every format, e4m3 among them: to the places of their pairs, or from where a pair says.
static int try_quantise_slabs()
{
    bool by_expert = draw(4) == 0, aligned = draw(2); // each with a matrix of scales of its own
    int slabs = by_expert ? 1 : 1 + (int)draw(draw(4) ? 5 : SLABS_MAX), cap = 1 + (int)draw(6), columns = 1 + (int)draw(1500);
    int expert_rows = by_expert ? 1 + (int)draw(cap) : 0, groups = (columns + 127) / 128, x_bytes = aligned ? (columns + 7) / 8 * 32 : columns * 4 + 8;
    int row_bytes = aligned ? (columns + 7) / 8 * 8 : columns + 3, top_k = 1 + (int)draw(draw(3) ? 4 : 32);
    bool scattered = draw(3), by_group = draw(2), in_columns = draw(2), spread = scattered && draw(2), counted = !spread && draw(4), once = scattered && draw(2);
    size_t rows = (size_t)slabs * cap, places = scattered ? rows * top_k : draw(50), pitch = (places + 3) / 4 * 4;
    twin x(rows * x_bytes), x_scales((rows + cap) * (groups + 1) * 4), out(places * row_bytes + 1), scales(pitch * groups * 4 + 4);
    twin counts(slabs * 4), row_pair(rows * top_k * 4), x_row(places * 4 + 4), count(4), row_scales(rows * groups * 4);
    int formats[SLABS_MAX], caps[SLABS_MAX];
    row_slab views[SLABS_MAX];

    fill_rows(x.cpu.data(), (int64_t)(rows * x_bytes / 2));
    fill_rows(x_scales.cpu.data(), (int64_t)((rows + cap) * (groups + 1) * 2));
    for (int i = 0; i < slabs; i++) {
        static const int any[] = {FORMAT_BF16, FORMAT_F16, FORMAT_F32, FORMAT_FP8_BLOCK128};

        formats[i] = by_expert ? FORMAT_FP8_BLOCK128 : any[draw(4)];
        caps[i] = spread || draw(3) ? cap : (int)draw(cap + 1);
        ((int32_t *)counts.cpu.data())[i] = (int32_t)draw(cap + 3) - 1;
    }
    shuffle_places((int32_t *)row_pair.cpu.data(), rows * top_k);
    for (size_t i = 0; i < places; i++)
        ((int32_t *)x_row.cpu.data())[i] = (int32_t)draw((uint32_t)rows);
    if (spread) *(int32_t *)count.cpu.data() = close_places((int32_t *)row_pair.cpu.data(), (int32_t *)x_row.cpu.data(), places, top_k);
    for (twin *each : {&x, &x_scales, &counts, &row_pair, &x_row, &count})
        each->send();
    for (int device = 0; device < 2; device++) {
        quantise_args args = {};
        for (int i = 0; i < slabs; i++) {
            views[i] = row_slab();
            views[i].rows = x.on<char>(device) + (int64_t)i * cap * x_bytes;
            views[i].scales = x_scales.on<char>(device) + (int64_t)i * cap * (groups + 1) * 4;
            views[i].count = counted ? counts.on<int32_t>(device) + i : NULL;
            views[i].row_stride_bytes = x_bytes;
            views[i].scale_stride_bytes = in_columns ? 4 : (groups + 1) * 4;
            views[i].group_stride_bytes = in_columns ? (expert_rows != 0 ? expert_rows : cap) * 4 : 0;
            views[i].scale_expert_stride_bytes = (int64_t)expert_rows * (groups + 1) * 4;
            views[i].expert_rows = expert_rows;
            views[i].cap = caps[i];
            views[i].format = formats[i];
        }
        args.slabs = views;
        args.row_pair = scattered ? row_pair.on<int32_t>(device) : NULL;
        args.x_row = x_row.on<int32_t>(device);
        args.count = spread ? count.on<int32_t>(device) : counted ? counts.on<int32_t>(device) : NULL;
        args.rows_count = (int32_t)places;
        args.rows_once = once;
        args.row_scales = spread ? row_scales.on<float>(device) : NULL;
        args.rows = out.on<void>(device);
        args.scales = scales.on<void>(device);
        args.row_stride_bytes = row_bytes;
        args.scale_stride_bytes = by_group ? 4 : groups * 4;
        args.group_stride_bytes = by_group ? (int64_t)pitch * 4 : 0;
        args.format = FORMAT_FP8_BLOCK128;
        args.slabs_count = slabs;
        args.rows_cap = cap;
        args.top_k = top_k;
        args.columns = columns;
        CHECK(device ? kernels_cuda.quantise(&args, NULL) : kernels_cpu.quantise(&args, stream_of_cpu()));
    }
    CHECK(cudaDeviceSynchronize());
    out.clear_nan_signs();
    scales.one_nan();
    if (out.same("quantise.rows of slabs") & scales.same("quantise.scales of slabs")) return 1;
    printf("quantise: slabs %d cap %d columns %d counted %d scattered %d spread %d once %d by group %d in columns %d expert rows %d\n", slabs, cap,
           columns, counted, scattered, spread, once, by_group, in_columns, expert_rows);
    return 0;
}

// What route wrote, for the kernels after it.
struct routed {
    twin offset, progress, pair_row, pair_weight, row_pair;

    explicit routed(const sample &s)
        : offset((s.experts + 1) * 4), progress((s.experts + GEMM_PROGRESS_WORDS + 1) * 4), pair_row(s.positions * 4), pair_weight(s.positions * 4), row_pair(s.positions * 4)
    {
        row_pair.fill(0x55); // -1 must be written
        progress.fill(0x55); // zeros, but for the launch, and nothing past them
    }
};

struct slabs {
    twin ids, weights, counts, rows, map, expert_counts;
    row_slab views[2][SLABS_MAX];

    explicit slabs(const sample &s)
        : ids(s.positions * s.id_bytes), weights(s.positions * 4), counts(SLABS_MAX * 4),
          rows((size_t)s.slabs * s.cap * (s.hidden + 8) * 2), map(s.map_count * 4), expert_counts((s.experts + 1) * 4)
    {
    }
};

static void fill_slabs(const sample &s, slabs &from)
{
    const int32_t wrong[] = {INT32_MIN, -1, (int32_t)draw(s.cap + 1), 1 << 30, INT32_MAX};
    int32_t sum = 0;

    fill_ids(s, from.ids.cpu.data(), s.positions);
    for (int64_t i = 0; i < s.positions; i++)
        ((float *)from.weights.cpu.data())[i] = (float)draw(1000) / 1000.0f;
    fill_rows(from.rows.cpu.data(), (int64_t)s.slabs * s.cap * (s.hidden + 8));
    for (int i = 0; i < SLABS_MAX; i++)
        ((int32_t *)from.counts.cpu.data())[i] = (int32_t)draw(s.cap + 3) - 1;
    for (int i = 0; i < s.map_count; i++)
        ((int32_t *)from.map.cpu.data())[i] = (int32_t)draw(s.experts + 8) - 2;
    for (int e = 0; e <= s.experts; e++) {
        ((int32_t *)from.expert_counts.cpu.data())[e] = s.by != ROUTE_BY_PREFIX ? (int32_t)draw(s.rows_per_expert + 3) - 1
                                                        : draw(8) != 0         ? sum
                                                                               : wrong[draw(5)]; // a peer may write anything
        if (draw(2)) sum += (int32_t)draw(2 + 2 * s.cap / s.experts);
    }
    for (twin *t : {&from.ids, &from.weights, &from.counts, &from.rows, &from.map, &from.expert_counts})
        t->send();
}

static void view_slabs(const sample &s, slabs &from, bool counted)
{
    int64_t of_slab = (int64_t)s.cap * s.top_k;

    for (int device = 0; device < 2; device++)
        for (int i = 0; i < s.slabs; i++) {
            row_slab &v = from.views[device][i];

            v = row_slab();
            v.rows = from.rows.on<uint16_t>(device) + (int64_t)i * s.cap * (s.hidden + 8);
            v.ids = s.by == ROUTE_BY_IDS ? from.ids.on<char>(device) + i * of_slab * s.id_bytes : NULL;
            v.weights = from.weights.on<float>(device) + i * of_slab;
            v.count = counted ? from.counts.on<int32_t>(device) + i : NULL;
            v.row_stride_bytes = (s.hidden + 8) * 2;
            v.id_stride_bytes = s.top_k * s.id_bytes;
            v.weight_stride_bytes = s.top_k * 4;
            v.cap = s.cap;
            v.format = FORMAT_BF16;
            v.id_bytes = s.id_bytes;
            v.weight_format = FORMAT_F32;
        }
}

static route_args route_of(const sample &s, slabs &from, routed &to, bool device)
{
    route_args args = {};

    args.slabs = from.views[device];
    args.expert_map = s.map_count > 0 ? from.map.on<int32_t>(device) : NULL;
    args.expert_counts = from.expert_counts.on<int32_t>(device);
    args.expert_offset = to.offset.on<int32_t>(device);
    args.progress = to.progress.on<uint32_t>(device);
    args.pair_row = to.pair_row.on<int32_t>(device);
    args.pair_weight = to.pair_weight.on<float>(device);
    args.row_pair = to.row_pair.on<int32_t>(device);
    args.pairs_max = s.positions;
    args.map_count = s.map_count;
    args.expert_first = s.expert_first;
    args.experts = s.experts;
    args.slabs_count = s.slabs;
    args.rows_cap = s.cap;
    args.rows_per_expert = s.rows_per_expert;
    args.top_k = s.top_k;
    args.by = s.by;
    return args;
}

static int try_expand(const sample &s, slabs &from, routed &routes)
{
    int per_expert = draw(2) ? 0 : 1 + (int)draw(20);
    int64_t rows = per_expert ? (int64_t)per_expert * s.experts : s.positions;
    twin out((size_t)rows * (s.hidden + 8) * 2), weights(rows * 4), counts((s.experts + 1) * 4), index(s.positions * 4);

    for (int device = 0; device < 2; device++) {
        expand_args args = {};

        args.slabs = from.views[device];
        args.expert_offset = routes.offset.on<int32_t>(device);
        args.pair_row = routes.pair_row.on<int32_t>(device);
        args.pair_weight = routes.pair_weight.on<float>(device);
        args.row_pair = routes.row_pair.on<int32_t>(device);
        args.rows = out.on<void>(device);
        args.weights = weights.on<float>(device);
        args.counts = counts.on<int32_t>(device);
        args.row_index = index.on<int32_t>(device);
        args.row_stride_bytes = (s.hidden + 8) * 2;
        args.experts = s.experts;
        args.slabs_count = s.slabs;
        args.rows_cap = s.cap;
        args.rows_per_expert = per_expert;
        args.masked = per_expert > 0;
        args.hidden = s.hidden;
        args.top_k = s.top_k;
        CHECK(device ? kernels_cuda.expand(&args, NULL) : kernels_cpu.expand(&args, stream_of_cpu()));
    }
    CHECK(cudaDeviceSynchronize());
    return out.same("expand.rows") & weights.same("expand.weights") & counts.same("expand.counts") &
           index.same("expand.row_index");
}

static int try_combine(const sample &s, slabs &from, routed &routes, bool counted)
{
    const int64_t stride = (s.hidden * 4 + 127) / 128 * 128;
    twin pairs((size_t)(s.positions * stride)), out((size_t)s.slabs * s.cap * s.hidden * 4);
    static const int formats[] = {FORMAT_F32, FORMAT_BF16, FORMAT_F16};
    int format = formats[draw(3)], pair_format = formats[draw(3)];
    int left_out = (int)draw(7);
    bool weighted = draw(2), placed = s.by == ROUTE_BY_IDS && s.slabs == 1 && s.top_k == 1 && draw(2);
    int spends = (int)draw(2);
    int slab_first = (int)draw(s.slabs + 2), sms = draw(2) ? 0 : draw(2) ? 1 : 2 + (int)draw(63);
    out_slab views[SLABS_MAX];

    // As they lie they are numbers in f16, too.
    if (pair_format != FORMAT_F32) fill_rows(pairs.cpu.data(), s.positions * stride / 2);
    for (int64_t i = 0; pair_format == FORMAT_F32 && i < s.positions * stride / 4; i++)
        ((float *)pairs.cpu.data())[i] = (float)((int)draw(4001) - 2000) / 1024.0f;
    pairs.send();
    // Products that are exact are the same bits whether they are rounded before they are added or not.
    for (size_t i = 0; i < routes.pair_weight.cpu.size() / 4; i++)
        ((uint32_t *)routes.pair_weight.cpu.data())[i] &= 0xffff0000u;
    routes.pair_weight.send();
    for (int device = 0; device < 2; device++) {
        combine_args args = {};

        for (int i = 0; i < s.slabs; i++)
            views[i] = {i == left_out ? NULL : out.on<char>(device) + (int64_t)i * s.cap * s.hidden * 4,
                        counted ? from.counts.on<int32_t>(device) + i : NULL, s.hidden * 4, s.cap, format};
        args.pair_out = pairs.on<void>(device);
        args.pair_stride_bytes = stride;
        args.pairs = s.positions;
        args.row_pair = s.by == ROUTE_BY_IDS ? routes.row_pair.on<int32_t>(device) : NULL;
        args.pair_row = s.by == ROUTE_BY_IDS ? NULL : routes.pair_row.on<int32_t>(device);
        args.pairs_count = routes.offset.on<int32_t>(device) + s.experts;
        args.pair_weight = weighted ? routes.pair_weight.on<float>(device) : NULL;
        args.slabs = views;
        args.pair_format = pair_format;
        args.slabs_count = s.slabs;
        args.slab_first = slab_first;
        args.sms = sms;
        args.rows_cap = s.cap;
        args.hidden = s.hidden;
        args.top_k = s.top_k;
        args.placed = placed;
        args.spends = spends;
        args.scale = 0.5f;
        CHECK(device ? kernels_cuda.combine(&args, NULL) : kernels_cpu.combine(&args, stream_of_cpu()));
    }
    CHECK(cudaDeviceSynchronize());
    return out.same("combine.slabs");
}

static int try_route()
{
    sample s = draw_sample();
    bool counted = draw(2);
    slabs from(s);
    routed to(s);
    int same;

    fill_slabs(s, from);
    view_slabs(s, from, counted && s.by == ROUTE_BY_IDS);
    for (int device = 0; device < 2; device++) {
        route_args args = route_of(s, from, to, device);

        CHECK(device ? kernels_cuda.route(&args, NULL) : kernels_cpu.route(&args, stream_of_cpu()));
    }
    CHECK(cudaDeviceSynchronize());
    same = to.offset.same("route.expert_offset") & to.pair_row.same("route.pair_row") & to.pair_weight.same("route.pair_weight") &
           to.row_pair.same("route.row_pair") & to.progress.same("route.progress");
    if (same && s.by == ROUTE_BY_IDS) same = try_expand(s, from, to);
    if (same) same = try_combine(s, from, to, counted && s.by == ROUTE_BY_IDS);
    if (!same)
        printf("slabs %d cap %d top-k %d experts %d first %d map %d id bytes %d hidden %d by %d rows per expert %d\n", s.slabs,
               s.cap, s.top_k, s.experts, s.expert_first, s.map_count, s.id_bytes, s.hidden, s.by, s.rows_per_expert);
    return same;
}

// ---- route with many blocks --------------------------------------------------------------------

// Slabs of several sizes, some empty, one full.
static void view_many(const sample &s, slabs &from, bool counted)
{
    bool none = draw(12) == 0;

    for (int i = 0; counted && i < s.slabs; i++)
        if (none || draw(3) == 0) ((int32_t *)from.counts.cpu.data())[i] = none || draw(4) ? 0 : s.cap;
    from.counts.send();
    view_slabs(s, from, counted);
    for (int i = 0; i < s.slabs; i++) {
        int cap = i > 0 && draw(3) == 0 ? 1 + (int)draw(s.cap) : s.cap;
        bool weighted = draw(8) > 0;

        for (row_slab *views : from.views) {
            views[i].cap = cap;
            if (!weighted) views[i].weights = NULL;
        }
    }
}

// Ids and counts of the device lie in memory that route writes last: what is read twice is not the same.
static void overwrite_inputs(const sample &s, slabs &from, routed &to, bool counted)
{
    CHECK(cudaMemcpy(to.pair_row.gpu, from.ids.cpu.data(), s.positions * s.id_bytes, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(to.offset.gpu, from.counts.cpu.data(), s.slabs * 4, cudaMemcpyHostToDevice));
    for (int i = 0; i < s.slabs; i++) {
        from.views[1][i].ids = to.pair_row.gpu + (int64_t)i * s.cap * s.top_k * s.id_bytes;
        if (counted) from.views[1][i].count = to.offset.on<int32_t>(true) + i;
    }
}

static int try_route_many()
{
    sample s = draw_many();
    bool counted = draw(3), small = draw(10) == 0;
    bool overwritten = s.id_bytes == 4 && s.slabs <= s.experts && draw(4);
    twin scratch(small ? 4000 : 132 * (s.experts + 66) * 4 + (s.positions + 132 * 1024) * 4);
    slabs from(s);
    routed to(s);
    size_t pairs;
    int same;

    fill_slabs(s, from);
    view_many(s, from, counted);
    if (overwritten) overwrite_inputs(s, from, to, counted);
    int pairs_max = draw(4) ? (int)s.positions : (int)draw((uint32_t)s.positions);
    for (int device = 0; device < 2; device++) {
        route_args args = route_of(s, from, to, device);

        args.pairs_max = pairs_max;
        args.scratch = scratch.on<void>(device);
        args.scratch_bytes = (int64_t)scratch.cpu.size();
        CHECK(device ? kernels_cuda.route(&args, NULL) : kernels_cpu.route(&args, stream_of_cpu()));
    }
    CHECK(cudaDeviceSynchronize());
    pairs = ((int32_t *)to.offset.cpu.data())[s.experts];
    same = to.offset.same("route.expert_offset", (s.experts + 1) * 4) & to.pair_row.same("route.pair_row", pairs * 4) &
           to.pair_weight.same("route.pair_weight") & to.row_pair.same("route.row_pair") & to.progress.same("route.progress");
    if (!overwritten) same &= to.pair_row.same("route.pair_row past its end");
    if (!same)
        printf("many: slabs %d cap %d top-k %d experts %d first %d map %d id bytes %d counted %d overwritten %d\n",
               s.slabs, s.cap, s.top_k, s.experts, s.expert_first, s.map_count, s.id_bytes, counted, overwritten);
    return same;
}

static int check_torn(const sample &s, routed &to)
{
    std::vector<int32_t> offset(s.experts + 1), pair_row(s.positions), row_pair(s.positions);
    int good;

    CHECK(cudaMemcpy(offset.data(), to.offset.gpu, offset.size() * 4, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(pair_row.data(), to.pair_row.gpu, pair_row.size() * 4, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(row_pair.data(), to.row_pair.gpu, row_pair.size() * 4, cudaMemcpyDeviceToHost));
    good = offset[0] == 0 && offset[s.experts] <= s.positions;
    for (int e = 0; e < s.experts; e++)
        good &= offset[e] <= offset[e + 1];
    for (int64_t i = 0; good && i < offset[s.experts]; i++)
        good &= pair_row[i] >= 0 && pair_row[i] < s.slabs * s.cap;
    for (int64_t i = 0; i < s.positions - 1; i++)
        good &= row_pair[i] >= -1 && row_pair[i] < s.positions;
    if (!good) printf("torn: slabs %d cap %d top-k %d experts %d\n", s.slabs, s.cap, s.top_k, s.experts);
    return good;
}

// A count that changes while blocks read it: the last position of row_pair, which one of them clears. Rows may be left out
// or come twice, but every pair has a row and every place a pair that there is.
static int try_route_torn()
{
    sample s = draw_many();
    s.slabs = 2;
    s.positions = (int64_t)s.slabs * s.cap * s.top_k;
    twin scratch(132 * (s.experts + 66) * 4 + (s.positions + 132 * 1024) * 4);
    slabs from(s);
    routed to(s);
    route_args args;

    fill_slabs(s, from);
    view_slabs(s, from, true);
    ((int32_t *)from.counts.cpu.data())[1] = (int32_t)draw(s.cap);
    to.row_pair.fill(0xff);
    ((int32_t *)to.row_pair.cpu.data())[s.positions - 1] = s.cap;
    from.counts.send();
    to.row_pair.send();
    from.views[1][0].count = to.row_pair.on<int32_t>(true) + s.positions - 1;
    args = route_of(s, from, to, true);
    args.scratch = scratch.on<void>(true);
    args.scratch_bytes = (int64_t)scratch.cpu.size();
    CHECK(kernels_cuda.route(&args, NULL));
    CHECK(cudaDeviceSynchronize());
    return check_torn(s, to);
}

static int try_seed()
{
    if (!try_record() || !try_quantise() || !try_quantise_slabs() || !try_route()) return 0;
    return draw(2) || (try_route_many() && (draw(3) > 0 || try_route_torn()));
}

int main(int argc, char **argv)
{
    const int st = try_seeds(argc, argv, try_seed);

    return st != 0 ? st : !try_scalings() || !try_cuts();
}
