// kernels/cuda/ptx.cuh for the emulator: the same functions, each doing what the instruction of its name does.

#ifndef MOXIE_KERNELS_CUDA_PTX_CUH
#define MOXIE_KERNELS_CUDA_PTX_CUH

#include "host_tests/emulator/async.h"
#include "host_tests/emulator/numbers.h"
#include "kernels/cuda/ptx_system.cuh"

#include <cuda_runtime.h>

template <class T> T *dynamic_smem()
{
    return reinterpret_cast<T *>(emulator::dynamic_smem());
}

static inline uint32_t smem_address(const void *pointer)
{
    return emulator::smem_address(pointer);
}

static inline void mbarrier_init(uint64_t *barrier, uint32_t arrivals)
{
    emulator::mbarrier_init(barrier, arrivals);
}

static inline void fence_mbarrier_init() {}

static inline void mbarrier_arrive(uint64_t *barrier, uint32_t arrivals = 1)
{
    for (; arrivals > 0; arrivals--)
        emulator::mbarrier_arrive(barrier, 0);
}

static inline void mbarrier_arrive_expect_tx(uint64_t *barrier, uint32_t bytes)
{
    emulator::mbarrier_arrive(barrier, bytes);
}

static inline bool mbarrier_test(uint64_t *barrier, uint32_t parity)
{
    return emulator::mbarrier_test(barrier, parity);
}

static inline void mbarrier_wait(uint64_t *barrier, uint32_t parity)
{
    emulator::mbarrier_wait(barrier, parity);
}

static inline void cluster_arrive()
{
    emulator::cluster_arrive();
}

static inline void cluster_wait()
{
    emulator::cluster_wait();
}

static inline int32_t read_of_block(const int32_t *own, uint32_t block)
{
    int32_t value;

    memcpy(&value, emulator::of_block(own, block), sizeof value);
    return value;
}

static inline uint32_t thread_read_anew()
{
    return threadIdx.x;
}

static inline uint32_t in_register(uint32_t value)
{
    return value;
}

static inline bool elect_one()
{
    return __shfl_sync(~0u, threadIdx.x % 32, 0) == threadIdx.x % 32;
}

static inline void prefetch_tensormap(const CUtensorMap *) {}
// Reads, so that a sanitizer sees what nobody may.
static inline void prefetch_l2(const void *at)
{
    (void)*static_cast<const volatile char *>(at);
}

static inline void prefetch_l2_bulk(const void *at, uint32_t bytes)
{
    if ((uintptr_t)at % 16 != 0 || bytes % 16 != 0 || bytes == 0) emulator::die("a bulk prefetch of what 16 does not divide");
    prefetch_l2(at);
    prefetch_l2(static_cast<const char *>(at) + bytes - 1);
}

static inline void store_evict_last(void *to, const uint4 &words)
{
    memcpy(to, &words, sizeof words);
}

static inline void store_evict_last(void *to, const uint2 &words)
{
    memcpy(to, &words, sizeof words);
}

static inline void store_evict_last(void *to, uint32_t word)
{
    *(uint32_t *)to = word;
}

// Lost at once.
static inline void discard_l2(const void *at)
{
    if ((uintptr_t)at % 128 != 0) emulator::die("a discard at an address that is no multiple of 128");
    memset((void *)at, 0xff, 128);
}

static inline uint4 load_evict_first(const uint4 *from)
{
    return *from;
}

template <bool read_once>
void cp_async_bulk_tensor_5d(void *smem, const CUtensorMap *map, uint64_t *barrier, int32_t c0, int32_t c1, int32_t c2, int32_t c3,
                             int32_t c4)
{
    const int32_t at[5] = {c0, c1, c2, c3, c4};

    emulator::copy_tensor(smem, map, barrier, at, 5);
}

template <bool read_once>
void cp_async_bulk_tensor_3d(void *smem, const CUtensorMap *map, uint64_t *barrier, int32_t c0, int32_t c1, int32_t c2)
{
    const int32_t at[3] = {c0, c1, c2};

    emulator::copy_tensor(smem, map, barrier, at, 3);
}

static inline void cp_async(uint32_t smem, const void *global, uint32_t given)
{
    emulator::copy(smem, global, 16, given);
}

static inline void cp_async_4(uint32_t smem, const void *global)
{
    emulator::copy(smem, global, 4, 4);
}

static inline void cp_async_commit()
{
    emulator::copy_commit();
}

template <int pending> void cp_async_wait()
{
    emulator::copy_wait(pending);
}

static inline void cp_async_mbarrier_arrive_noinc(uint64_t *barrier)
{
    emulator::copy_arrive_noinc(barrier);
}

static inline void fence_proxy_async()
{
    emulator::fence_proxy_async();
}

// The engine of the emulator reads what is there.
static inline void fence_proxy_async_global() {}

template <uint32_t registers> void setmaxnreg_inc()
{
    emulator::set_registers(registers);
}

template <uint32_t registers> void setmaxnreg_dec()
{
    emulator::set_registers(registers);
}

// Launches run one after another, so there is nothing to wait for; whether it is called counts.
static inline void griddepcontrol_wait()
{
    emulator::wait_for_launches();
}

static inline void griddepcontrol_launch_dependents() {}

static inline uint32_t movmatrix_trans(uint32_t packed)
{
    const uint64_t *rows = emulator::warp_exchange("movmatrix", packed);
    uint32_t row = emulator::lane() / 4, column = emulator::lane() % 4 * 2, turned = 0;

    for (uint32_t i = 0; i < 2; i++)
        turned |= static_cast<uint32_t>(rows[(column + i) * 4 + row / 2] >> (row % 2 * 16) & 0xffff) << i * 16;
    return turned;
}

template <int count> void stmatrix_blocks(uint32_t row, const uint32_t (&blocks)[count])
{
    const uint64_t *rows = emulator::warp_exchange("stmatrix", row);

    for (int i = 0; i < count; i++) {
        uint32_t to = static_cast<uint32_t>(rows[i * 8 + emulator::lane() / 4]);

        if (to % 16 != 0) emulator::die("stmatrix to an address that is no multiple of 16");
        memcpy(emulator::smem_pointer(to, 16) + emulator::lane() % 4 * 4, &blocks[i], 4);
    }
}

static inline void stmatrix(uint32_t row, const uint32_t (&blocks)[4])
{
    stmatrix_blocks(row, blocks);
}

static inline void stmatrix_trans(uint32_t row, uint32_t first, uint32_t second)
{
    const uint32_t turned[2] = {movmatrix_trans(first), movmatrix_trans(second)};

    stmatrix_blocks(row, turned);
}

static inline float min_nan(float x, float y)
{
    return x < y || x != x ? x : y;
}

static inline float max_nan(float x, float y)
{
    return x > y || x != x ? x : y;
}

static inline void e4m3_to_f16(uint32_t codes, uint32_t &low, uint32_t &high)
{
    uint16_t halves[4];

    for (int32_t i = 0; i < 4; i++)
        halves[i] = emulator::to_f16(emulator::from_e4m3(static_cast<uint8_t>(codes >> i * 8)));
    low = halves[0] | static_cast<uint32_t>(halves[1]) << 16;
    high = halves[2] | static_cast<uint32_t>(halves[3]) << 16;
}

static inline uint32_t bytes_by(uint32_t low, uint32_t high, uint32_t by)
{
    const uint64_t from = low | uint64_t{high} << 32;
    uint32_t bytes = 0;

    for (int32_t i = 0; i < 4; i++) {
        const uint32_t which = by >> i * 4, byte = static_cast<uint32_t>(from >> which % 8 * 8 & 0xff);

        bytes |= ((which & 8) == 0 ? byte : (byte >> 7) * 0xff) << i * 8;
    }
    return bytes;
}

static inline uint32_t shifted_by(uint32_t low, uint32_t high, uint32_t bits)
{
    return static_cast<uint32_t>((low | uint64_t{high} << 32) >> bits % 32);
}

static inline uint32_t bf16_fma(uint32_t x, uint32_t y, uint32_t z)
{
    uint32_t sums = 0;

    for (int32_t i = 0; i < 32; i += 16) {
        const auto number = [i](uint32_t pair) { return static_cast<double>(emulator::from_bf16(static_cast<uint16_t>(pair >> i))); };

        sums |= static_cast<uint32_t>(emulator::to_bf16(static_cast<float>(number(x) * number(y) + number(z)))) << i;
    }
    return sums;
}

static inline uint32_t bf16_multiply(uint32_t x, uint32_t y)
{
    return bf16_fma(x, y, 0x80008000u); // -0, so that a product of 0 keeps its sign
}

template <bool is_high> uint32_t twice(uint32_t pair)
{
    return (is_high ? pair >> 16 : pair & 0xffff) * 0x10001;
}

static inline float exp2_approx(float x)
{
    return exp2f(x);
}

static inline float reciprocal_approx(float x)
{
    return 1.0f / x;
}

template <uint32_t barrier, uint32_t threads> void bar_sync()
{
    emulator::barrier(barrier, threads);
}

static inline void load_matrices(uint32_t (&to)[4], uint32_t row)
{
    const uint64_t *rows = emulator::warp_exchange("ldmatrix", row);

    for (int32_t i = 0; i < 4; i++)
        memcpy(&to[i], emulator::smem_pointer(static_cast<uint32_t>(rows[i * 8 + emulator::lane() / 4]), 16) + emulator::lane() % 4 * 4, 4);
}

template <bool is_bf16> void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b, uint32_t b_next)
{
    const auto both = [](uint32_t low, uint32_t high) { return low | uint64_t{high} << 32; };

    emulator::mma(c, is_bf16 ? emulator::kBf16 : emulator::kF16, emulator::warp_exchange("mma", both(a[0], a[2]), both(a[1], a[3]), both(b, b_next)));
}

static inline void wgmma_fence()
{
    emulator::wgmma_fence();
}

template <int count> void wgmma_fence_registers(uint32_t (&)[count][4])
{
    emulator::wgmma_fence();
}

static inline void wgmma_commit()
{
    emulator::wgmma_commit();
}

template <int pending> void wgmma_wait()
{
    emulator::wgmma_wait(pending);
}

static inline uint32_t wgmma_descriptor(const void *smem)
{
    return (smem_address(smem) & 0x3ffffu) >> 4 | 1u << 16;
}

static inline uint64_t wgmma_whole(uint32_t descriptor)
{
    return uint64_t{1u << 30 | 1024 >> 4} << 32 | descriptor;
}

template <bool rows_in> constexpr uint32_t wgmma_next_inputs = (rows_in ? 16 * 128 : 16 * 2) >> 4;

template <int N, bool is_bf16, bool a_rows_in> struct wgmma {
    static void run(float (&c)[N / 2], uint32_t a, uint32_t b)
    {
        emulator::wgmma_issue({wgmma_whole(a), wgmma_whole(b), N, is_bf16 ? emulator::kBf16 : emulator::kF16, a_rows_in, true}, c);
    }
};

template <int N> struct wgmma_e4m3 {
    static void run(float (&c)[N / 2], uint32_t a, uint32_t b, int32_t adds)
    {
        emulator::wgmma_issue({wgmma_whole(a), wgmma_whole(b), N, emulator::kE4m3, false, adds != 0}, c);
    }
};

template <int N, bool is_e5m2, bool adds> struct wgmma_pieces {
    static void run(float (&c)[N / 2], const uint32_t (&a)[4], uint32_t b)
    {
        emulator::wgmma_issue({0, wgmma_whole(b), N, is_e5m2 ? emulator::kE5m2 : emulator::kE4m3, false, adds}, c, a);
    }
};

template <int N> struct wgmma_packed {
    static void run(float (&c)[N / 2], const uint32_t (&a)[4], uint32_t b)
    {
        emulator::wgmma_issue({0, wgmma_whole(b), N, emulator::kBf16, false, true}, c, a);
    }
};

#endif
