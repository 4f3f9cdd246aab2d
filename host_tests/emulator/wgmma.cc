// wgmma.mma_async.m64nNk16 of 16-bit numbers and m64nNk32 of e4m3, or of e5m2 in registers and
// e4m3, with fp32 sums. Operands by descriptor, in the canonical layouts of the PTX manual ("Shared
// Memory Matrix Layout"), swizzled by the bits of the address.

#include "host_tests/emulator/async.h"
#include "host_tests/emulator/block.h"
#include "host_tests/emulator/numbers.h"
#include "host_tests/tensor_core.h"

#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

namespace emulator
{

namespace
{

constexpr unsigned kWarpgroups = kThreadsMax / kWarpgroupThreads;
constexpr int kRows = 64, kDepthMax = 32, kColumnsMax = 256;

struct product {
    wgmma_operands operands;
    float *c[kWarpgroupThreads];
    const uint32_t *a[kWarpgroupThreads]; // NULL: by descriptor
    unsigned issued;                      // threads
};

struct thread_state {
    uint64_t issued;              // products
    std::vector<uint64_t> groups; // products issued when each was committed, the uncompleted ones
    bool fenced;
};

struct warpgroup {
    std::deque<product> products; // not yet run
    uint64_t run;                 // products run so far
    thread_state threads[kWarpgroupThreads];
};

// A host thread's.
struct products {
    warpgroup warpgroups[kWarpgroups];
    float a[kRows][kDepthMax], b[kDepthMax][kColumnsMax];  // of the product that runs
    tensor_core_factors a_factors, b_factors[kColumnsMax]; // e4m3
};

products &all()
{
    static thread_local std::unique_ptr<products> one;

    if (one == nullptr) one = std::make_unique<products>();
    return *one;
}

warpgroup &mine()
{
    return all().warpgroups[here.thread.x / kWarpgroupThreads];
}

thread_state &me(warpgroup &w)
{
    return w.threads[here.thread.x % kWarpgroupThreads];
}

// A descriptor's fields, in bytes.
struct layout {
    uint32_t start, leading, stride, span;
};

layout layout_of(uint64_t descriptor)
{
    static const uint32_t spans[4] = {0, 128, 64, 32};
    layout l = {static_cast<uint32_t>(descriptor & 0x3fff) << 4,
                static_cast<uint32_t>(descriptor >> 16 & 0x3fff) << 4,
                static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4, spans[descriptor >> 62]};

    if ((descriptor >> 49 & 7) != 0) die("a wgmma descriptor with a base offset");
    if (l.span == 0) die("a wgmma operand without swizzling, which the emulator does not know");
    return l;
}

// Where element (row, k) of an operand lies. K-major: rows of `span` bytes, 8 rows a `stride`.
// Otherwise `span` bytes hold consecutive rows of one k, 8 k a `stride`, and `leading` leads to the
// next rows.
uint32_t element_address(const layout &l, bool rows_in, uint32_t bytes, uint32_t row, uint32_t k)
{
    uint32_t across = l.span / bytes, address;

    if (rows_in)
        address = l.start + row / across * l.leading + k / 8 * l.stride + k % 8 * l.span +
                  row % across * bytes;
    else
        address = l.start + row / 8 * l.stride + row % 8 * l.span + k * bytes;
    return address ^ ((address >> 7 & (l.span / 16 - 1)) << 4);
}

bool is_fp8(number type)
{
    return type == kE4m3 || type == kE5m2;
}

float number_of(number type, uint16_t bits)
{
    return type == kBf16 ? from_bf16(bits) : from_f16(bits);
}

float number_at(number type, const unsigned char *at)
{
    uint16_t bits;

    if (is_fp8(type)) return from_e4m3(*at);
    std::memcpy(&bits, at, sizeof bits);
    return number_of(type, bits);
}

// An operand, and where its element (row, k) goes: to[row * row_stride + k * k_stride].
struct matrix {
    uint64_t descriptor;
    bool rows_in;
    uint32_t rows;
    float *to;
    uint32_t row_stride, k_stride;
};

// By 16 bytes, which hold numbers of one row, or rows_in of one k.
void read_operand(const matrix &from, number type)
{
    layout l = layout_of(from.descriptor);
    uint32_t bytes = is_fp8(type) ? 1 : 2, held = 16 / bytes;
    uint32_t row_step = from.rows_in ? held : 1, k_step = from.rows_in ? 1 : held;
    uint32_t stride = from.rows_in ? from.row_stride : from.k_stride;

    for (uint32_t row = 0; row < from.rows; row += row_step)
        for (uint32_t k = 0; k < 32 / bytes; k += k_step) {
            const unsigned char *at = read_16(element_address(l, from.rows_in, bytes, row, k));
            float *to = from.to + row * from.row_stride + k * from.k_stride;

            for (uint32_t i = 0; i < held; i++)
                to[i * stride] = number_at(type, at + i * bytes);
        }
}

// a from registers, as mma's lanes have it: bf16.
void read_bf16(const product &p, float (*to)[kDepthMax])
{
    for (unsigned thread = 0; thread < kWarpgroupThreads; thread++)
        for (unsigned i = 0; i < 8; i++) {
            unsigned row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
            unsigned k = thread % 4 * 2 + i / 4 * 8 + i % 2;

            to[row][k] = from_bf16(static_cast<uint16_t>(p.a[thread][i / 2] >> i % 2 * 16));
        }
}

// The same of fp8.
void read_fp8(const product &p, float (*to)[kDepthMax])
{
    for (unsigned thread = 0; thread < kWarpgroupThreads; thread++)
        for (unsigned i = 0; i < 16; i++) {
            unsigned row = thread / 32 * 16 + thread % 32 / 4 + i / 4 % 2 * 8;
            unsigned k = thread % 4 * 4 + i / 8 * 16 + i % 4;
            uint8_t bits = static_cast<uint8_t>(p.a[thread][i / 4] >> i % 4 * 8);

            to[row][k] = p.operands.type == kE5m2 ? from_e5m2(bits) : from_e4m3(bits);
        }
}

// Of 64 x N sums a thread has those of two rows, two columns of every eight.
float &sum_at(const product &p, int row, int column)
{
    return p.c[row / 16 * 32 + row % 8 * 4 + column % 8 / 2]
              [column / 8 * 4 + row % 16 / 8 * 2 + column % 2];
}

// As f32 has it, for those who compare with such sums.
bool sums_are_exact()
{
    static const bool exact = std::getenv("MOXIE_EMULATOR_EXACT_SUMS") != nullptr;

    return exact;
}

// With the roundings of the device, which are seen in what is quantised after.
void run_e4m3(const product &p)
{
    products &all = emulator::all();

    for (int column = 0; column < p.operands.n; column++)
        tensor_core_read(&all.b[0][column], kColumnsMax, kDepthMax, &all.b_factors[column]);
    for (int row = 0; row < kRows; row++) {
        if (p.operands.type == kE5m2)
            tensor_core_read_e5m2(all.a[row], 1, kDepthMax, &all.a_factors);
        else
            tensor_core_read(all.a[row], 1, kDepthMax, &all.a_factors);
        for (int column = 0; column < p.operands.n; column++) {
            float &sum = sum_at(p, row, column);

            sum = tensor_core_sum(&all.a_factors, &all.b_factors[column],
                                  p.operands.adds ? sum : 0.0f);
        }
    }
}

// Eight columns at once, which four threads have; each sum in the order of k. Sanitizers, which
// have seen where the numbers came from and see where the sums go, would look at each number once
// more.
[[gnu::no_sanitize("address,undefined")]] void
add_products(const float *a, const float (*b)[kColumnsMax], int column, int depth, float *sums)
{
    for (int k = 0; k < depth; k++)
        for (int i = 0; i < 8; i++)
            sums[i] += a[k] * b[k][column + i];
}

void run_product(const product &p)
{
    float(*a)[kDepthMax] = all().a, (*b)[kColumnsMax] = all().b;
    int n = p.operands.n, depth = is_fp8(p.operands.type) ? 32 : 16;

    if (p.a[0] != nullptr && is_fp8(p.operands.type))
        read_fp8(p, a);
    else if (p.a[0] != nullptr)
        read_bf16(p, a);
    else
        read_operand({p.operands.a, p.operands.a_rows_in, kRows, a[0], kDepthMax, 1},
                     p.operands.type);
    read_operand({p.operands.b, false, static_cast<uint32_t>(n), b[0], 1, kColumnsMax},
                 p.operands.type);
    if (is_fp8(p.operands.type) && !sums_are_exact()) {
        run_e4m3(p);
        return;
    }
    for (int row = 0; row < kRows; row++)
        for (int column = 0; column < n; column += 8) {
            float sums[8] = {};

            for (int i = 0; i < 8 && p.operands.adds; i++)
                sums[i] = sum_at(p, row, column + i);
            add_products(a[row], b, column, depth, sums);
            for (int i = 0; i < 8; i++)
                sum_at(p, row, column + i) = sums[i];
        }
}

} // namespace

void wgmma_begin()
{
    for (warpgroup &w : all().warpgroups)
        w = warpgroup();
}

void mma(float (&c)[4], number type, const uint64_t *words)
{
    float rows[2][16], columns[2][16]; // of this lane's sums

    for (unsigned i = 0; i < 2; i++) {
        const uint64_t *row = words + i * kWarpThreads + lane() / 4 * 4;
        const uint64_t *column = words + 2 * kWarpThreads + (lane() % 4 * 2 + i) * 4;

        for (int k = 0; k < 16; k++) {
            const int place = (k / 8 * 2 + k % 2) * 16;

            rows[i][k] = number_of(type, static_cast<uint16_t>(row[k / 2 % 4] >> place));
            columns[i][k] = number_of(type, static_cast<uint16_t>(column[k / 2 % 4] >> place));
        }
    }
    // In the order of k, as wgmma.
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 16; k++)
            c[i] += rows[i / 2][k] * columns[i % 2][k];
}

void wgmma_end()
{
    for (const warpgroup &w : all().warpgroups)
        if (!w.products.empty()) die("the block ended with wgmma in flight");
}

void wgmma_fence()
{
    check_alone("wgmma");
    me(mine()).fenced = true;
}

void wgmma_issue(const wgmma_operands &operands, float *c, const uint32_t *a)
{
    warpgroup &w = mine();
    thread_state &thread = me(w);
    size_t index = thread.issued++ - w.run;

    if (!thread.fenced) die("wgmma without a fence before it");
    if (index == w.products.size()) w.products.push_back({operands, {}, {}, 0});
    if (!(w.products[index].operands == operands))
        die("a warpgroup's threads disagree about a wgmma");
    w.products[index].c[here.thread.x % kWarpgroupThreads] = c;
    w.products[index].a[here.thread.x % kWarpgroupThreads] = a;
    w.products[index].issued++;
}

void wgmma_commit()
{
    thread_state &thread = me(mine());

    thread.groups.push_back(thread.issued);
    thread.fenced = false;
}

void wgmma_wait(unsigned pending)
{
    warpgroup &w = mine();
    std::vector<uint64_t> &groups = me(w).groups;
    uint64_t until;

    if (groups.size() <= pending) return;
    until = groups[groups.size() - 1 - pending];
    groups.erase(groups.begin(), groups.end() - pending);
    wait_until(
        [&] {
            for (uint64_t i = w.run; i < until; i++)
                if (i - w.run >= w.products.size() ||
                    w.products[i - w.run].issued < kWarpgroupThreads)
                    return false;
            return true;
        },
        "the other threads' wgmma");
    for (; w.run < until; w.run++) {
        run_product(w.products.front());
        w.products.pop_front();
    }
}

} // namespace emulator
