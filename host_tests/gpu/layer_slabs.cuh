// A layer on the GPU over slabs of several ranks, which must have the bits of one slab. Included by layer_twin.cu alone.

#ifndef MOXIE_HOST_TESTS_GPU_LAYER_SLABS_CUH
#define MOXIE_HOST_TESTS_GPU_LAYER_SLABS_CUH

#include "host_tests/gpu/layer_case.cuh"

#include <math.h>
#include <string.h>

#include <algorithm>

// Runs the layer on a poisoned y, whose first numbers are then in `to`, as many as that has.
template <class Number> static void run_layer(const gpu_layer &g, std::vector<Number> &to)
{
    const size_t bytes = to.size() * sizeof(Number);
    CHECK(cudaMemset(g.y, 0xff, bytes));
    CHECK(run_stages(&kernels_cuda, g.s, NULL));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(to.data(), g.y, bytes, cudaMemcpyDeviceToHost));
}

// Whether the device has one launch for it. Runs it.
static bool fits_one_launch(const gpu_layer &g)
{
    stages s = g.s;
    s.turns = g.turns;
    const layer_args args = at_once(s);
    const int st = kernels_cuda.layer(&args, NULL);
    if (st != LAYER_UNFIT) CHECK(st);
    return st == 0;
}

// The rows of a slab from one on.
static row_slab rows_from(row_slab of, int32_t first, int32_t rows)
{
    of.rows = (const char *)of.rows + first * of.row_stride_bytes;
    of.ids = (const char *)of.ids + first * of.id_stride_bytes;
    of.weights = (const char *)of.weights + first * of.weight_stride_bytes;
    of.cap = rows;
    return of;
}

// The slab with rows of e4m3; what it took, for cudaFree.
static void *coded(row_slab &slab, int32_t hidden)
{
    const int64_t groups = (hidden + 127) / 128, rows_bytes = groups * 128;
    char *memory = poison<char>(slab.cap * (rows_bytes + groups * 4));
    quantise_args args = {};
    args.x = slab.rows;
    args.x_stride_bytes = slab.row_stride_bytes;
    args.x_format = slab.format;
    args.rows_count = slab.cap;
    args.columns = hidden;
    args.format = slab.format = FORMAT_FP8_BLOCK128;
    slab.rows = args.rows = memory;
    slab.row_stride_bytes = args.row_stride_bytes = rows_bytes;
    slab.scales = args.scales = memory + slab.cap * rows_bytes;
    slab.scale_stride_bytes = args.scale_stride_bytes = groups * 4;
    CHECK(kernels_cuda.quantise(&args, NULL));
    return memory;
}

// Whether tokens of ranks, in slabs of which one has no row, one a row that is not valid and in fp8 codes, get the bits of those in one.
static int same_in_slabs(gpu_layer &g, const layer_case &c, const std::vector<float> &all)
{
    const int32_t first = c.tokens / 2, second = c.tokens - first;
    const stages one = g.s;
    const size_t valid = (size_t)(c.tokens - 1) * c.hidden;
    row_slab x[] = {rows_from(g.s.slab, 0, first), {}, rows_from(g.s.slab, first, second)};
    out_slab y[] = {g.s.out, {}, g.s.out};
    int32_t *count = upload(std::vector<int32_t>(1, second - 1));
    void *codes = g.s.fp8 ? coded(x[2], c.hidden) : NULL;
    std::vector<float> got(all.size());
    int same;
    y[0].cap = first;
    y[2].cap = second;
    y[2].rows = (char *)y[2].rows + first * y[2].row_stride_bytes;
    x[2].count = y[2].count = count;
    g.s.route.slabs = x;
    g.s.combine.slabs = y;
    g.s.route.slabs_count = g.s.combine.slabs_count = 3;
    same = fits_one_launch(g);
    run_layer(g, got);
    same = same && memcmp(got.data(), all.data(), valid * 4) == 0 &&
           std::all_of(got.begin() + valid, got.end(), [](float number) { return std::isnan(number); });
    g.s = one;
    cudaFree(count);
    cudaFree(codes);
    return same;
}

// Whether tokens in several slabs, whose ids follow each other, so that the products count them, get the bits of those in one. The last row
// of the first slab is not valid, and has no expert.
static int same_in_a_run(gpu_layer &g, const layer_case &c, const std::vector<float> &all)
{
    const stages one = g.s;
    std::vector<float> got(all.size()), want = all;
    std::vector<row_slab> x;
    std::vector<out_slab> y;
    std::vector<int32_t> counts;
    std::vector<char> ids(g.s.slab.id_stride_bytes);
    int32_t slabs = 2, cap;
    char *row;
    int same;
    while (slabs < KERNEL_RANKS_MAX && c.tokens % slabs != 0)
        slabs++;
    if (c.tokens % slabs != 0 || g.s.gemms.route == NULL) return 1;
    cap = c.tokens / slabs;
    counts.assign(slabs, cap);
    counts[0]--;
    std::fill_n(want.begin() + (size_t)counts[0] * c.hidden, c.hidden, NAN);
    int32_t *valid = upload(counts);
    row = (char *)g.s.slab.ids + counts[0] * g.s.slab.id_stride_bytes;
    CHECK(cudaMemcpy(ids.data(), row, ids.size(), cudaMemcpyDeviceToHost));
    CHECK(cudaMemset(row, 0xff, ids.size()));
    for (int32_t i = 0; i < slabs; i++) {
        x.push_back(rows_from(g.s.slab, i * cap, cap));
        y.push_back(g.s.out);
        y[i].rows = (char *)y[i].rows + i * cap * y[i].row_stride_bytes;
        y[i].cap = cap;
        x[i].count = y[i].count = valid + i;
    }
    g.s.route.slabs = g.s.quantise_x.slabs = x.data();
    g.s.route.rows_cap = g.s.quantise_x.rows_cap = g.s.combine.rows_cap = cap;
    g.s.route.slabs_count = g.s.quantise_x.slabs_count = g.s.combine.slabs_count = slabs;
    g.s.combine.slabs = y.data();
    if (!g.s.fp8) {
        g.s.gemms.gate_up.slabs = x.data();
        g.s.gemms.gate_up.slabs_count = slabs;
        g.s.gemms.gate_up.rows_cap = cap;
    }
    run_layer(g, got);
    same = std::equal(got.begin(), got.end(), want.begin(), [](float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); });
    g.s = one;
    CHECK(cudaMemcpy(row, ids.data(), ids.size(), cudaMemcpyHostToDevice));
    cudaFree(valid);
    return same;
}

// Whether a launch ends in which nobody makes the first tiles, as where a peer's ids change while blocks read them; and the next one is right.
static int ends_without_mates(gpu_layer &g, const std::vector<float> &all)
{
    const stages one = g.s;
    const uint32_t taken = 1;
    const row_slab x[] = {g.s.slab, {}};
    const out_slab y[] = {g.s.out, {}};
    std::vector<float> got(all.size());
    int same;
    g.s.route.slabs = x;
    g.s.combine.slabs = y;
    g.s.route.slabs_count = g.s.combine.slabs_count = 2;
    CHECK(cudaMemcpy(g.turns, &taken, sizeof taken, cudaMemcpyHostToDevice));
    run_layer(g, got);
    same = memcmp(got.data(), all.data(), all.size() * 4) != 0;
    for (int i = 0; i < 2; i++) { // both halves of mid
        run_layer(g, got);
        same = same && memcmp(got.data(), all.data(), all.size() * 4) == 0;
    }
    g.s = one;
    return same;
}

#endif
