// The instructions of sm_90a that C++ has no words for: one function per form, named after the instruction. Every
// release, acquire, fence, barrier and asynchronous copy clobbers memory.

#ifndef MOXIE_KERNELS_CUDA_PTX_CUH
#define MOXIE_KERNELS_CUDA_PTX_CUH

#include "kernels/cuda/ptx_number.cuh"
#include "kernels/cuda/ptx_system.cuh"

#include <cuda.h>
#include <stdint.h>

// ---- Shared memory addresses and barriers ------------------------------------------------------

// The block's dynamic shared memory.
template <class T> __device__ __forceinline__ T *dynamic_smem()
{
    extern __shared__ __align__(1024) unsigned char dynamic_smem_bytes[];

    return reinterpret_cast<T *>(dynamic_smem_bytes);
}

__device__ __forceinline__ uint32_t smem_address(const void *pointer)
{
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// `arrivals` of threads (and the announced bytes) complete a phase.
__device__ __forceinline__ void mbarrier_init(uint64_t *barrier, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals) : "memory");
}

// Makes the initialised barriers visible to the asynchronous proxy.
__device__ __forceinline__ void fence_mbarrier_init()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t *barrier, uint32_t arrivals = 1)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals) : "memory");
}

// Arrives and announces bytes that asynchronous copies will bring.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t *barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait(uint64_t *barrier, uint32_t parity)
{
    uint32_t done;

    asm volatile("{\n\t.reg .pred p;\n\t"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, p;\n\t}"
                 : "=r"(done)
                 : "r"(smem_address(barrier)), "r"(parity)
                 : "memory");
    return done != 0;
}

// Whether the phase of that parity is complete, without waiting.
__device__ __forceinline__ bool mbarrier_test(uint64_t *barrier, uint32_t parity)
{
    uint32_t done;

    asm volatile("{\n\t.reg .pred p;\n\t"
                 "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, p;\n\t}"
                 : "=r"(done)
                 : "r"(smem_address(barrier)), "r"(parity)
                 : "memory");
    return done != 0;
}

// Waits for the phase of that parity. Only copies and threads of the same block complete it, so it always ends.
__device__ __forceinline__ void mbarrier_wait(uint64_t *barrier, uint32_t parity)
{
    while (!mbarrier_try_wait(barrier, parity)) {
    }
}

// threadIdx.x, without a register for it between two uses.
__device__ __forceinline__ uint32_t thread_read_anew()
{
    uint32_t thread;

    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// A constant, in a register: known to be one it would be put there wherever it is used. No lane has the highest bit of this mask.
__device__ __forceinline__ uint32_t in_register(uint32_t value)
{
    uint32_t below;

    asm volatile("mov.u32 %0, %%lanemask_lt;" : "=r"(below));
    return value + (below >> 31);
}

// One lane of the warp, all of which call it. What only that lane does the compiler knows to be one thread's, and issues copies at
// once; behind a comparison of thread numbers it puts a loop over the lanes around each, which takes 300 cycles.
__device__ __forceinline__ bool elect_one()
{
    uint32_t elected;

    asm volatile("{\n\t.reg .pred p;\n\t"
                 "elect.sync _|p, 0xffffffff;\n\t"
                 "selp.u32 %0, 1, 0, p;\n\t}"
                 : "=r"(elected));
    return elected != 0;
}

// ---- Clusters ----------------------------------------------------------------------------------

// What a thread of any block wrote before it arrived all see after they have waited.
__device__ __forceinline__ void cluster_arrive()
{
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait()
{
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// What another block of the cluster has where this one has `own` in shared memory.
__device__ __forceinline__ int32_t read_of_block(const int32_t *own, uint32_t block)
{
    uint32_t address;
    int32_t value;

    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem_address(own)), "r"(block));
    asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

// ---- Copies ------------------------------------------------------------------------------------

// A line of global memory into the L2.
__device__ __forceinline__ void prefetch_l2(const void *at)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at) : "memory");
}

// The same of as many bytes, a multiple of 16, as `at` is.
__device__ __forceinline__ void prefetch_l2_bulk(const void *at, uint32_t bytes)
{
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(bytes) : "memory");
}

__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(map)) : "memory");
}

// What nobody reads again, whose place in the L2 goes first.
__device__ __forceinline__ uint64_t l2_evict_first()
{
    uint64_t policy;

    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// What is read again soon, whose place in the L2 goes last, until it is loaded to go first.
__device__ __forceinline__ uint64_t l2_evict_last()
{
    uint64_t policy;

    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ void store_evict_last(void *to, const uint4 &words)
{
    asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w),
                 "l"(l2_evict_last())
                 : "memory");
}

__device__ __forceinline__ void store_evict_last(void *to, const uint2 &words)
{
    asm volatile("st.global.L2::cache_hint.v2.b32 [%0], {%1, %2}, %3;" ::"l"(to), "r"(words.x), "r"(words.y), "l"(l2_evict_last()) : "memory");
}

__device__ __forceinline__ void store_evict_last(void *to, uint32_t word)
{
    asm volatile("st.global.L2::cache_hint.b32 [%0], %1, %2;" ::"l"(to), "r"(word), "l"(l2_evict_last()) : "memory");
}

__device__ __forceinline__ uint4 load_evict_first(const uint4 *from)
{
    uint4 words;

    asm volatile("ld.global.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(from), "l"(l2_evict_first()));
    return words;
}

// What 128 bytes from a multiple of that on hold may be lost: it need not go to memory.
__device__ __forceinline__ void discard_l2(const void *at)
{
    asm volatile("discard.global.L2 [%0], 128;" ::"l"(at) : "memory");
}

// A box of a 5-D tensor into shared memory; its bytes count towards the barrier. Out of bounds reads zero. Along the first
// dimension a box begins at a multiple of 16 bytes. `read_once`: nobody reads it again.
template <bool read_once>
__device__ __forceinline__ void cp_async_bulk_tensor_5d(void *smem, const CUtensorMap *map, uint64_t *barrier, int32_t c0,
                                                        int32_t c1, int32_t c2, int32_t c3, int32_t c4)
{
    if constexpr (read_once)
        asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                     "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(smem_address(smem)),
                     "l"(reinterpret_cast<uint64_t>(map)), "r"(smem_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3),
                     "r"(c4), "l"(l2_evict_first())
                     : "memory");
    else
        asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(smem_address(smem)),
                     "l"(reinterpret_cast<uint64_t>(map)), "r"(smem_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3),
                     "r"(c4)
                     : "memory");
}

template <bool read_once>
__device__ __forceinline__ void cp_async_bulk_tensor_3d(void *smem, const CUtensorMap *map, uint64_t *barrier, int32_t c0,
                                                        int32_t c1, int32_t c2)
{
    if constexpr (read_once)
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                     "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(smem_address(smem)),
                     "l"(reinterpret_cast<uint64_t>(map)), "r"(smem_address(barrier)), "r"(c0), "r"(c1), "r"(c2),
                     "l"(l2_evict_first())
                     : "memory");
    else
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(smem_address(smem)),
                     "l"(reinterpret_cast<uint64_t>(map)), "r"(smem_address(barrier)), "r"(c0), "r"(c1), "r"(c2)
                     : "memory");
}

// 16 bytes past the L1 into shared memory; `given` 0 writes zeros and reads nothing.
__device__ __forceinline__ void cp_async(uint32_t smem, const void *global, uint32_t given)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(global), "r"(given) : "memory");
}

// 4 bytes, through it.
__device__ __forceinline__ void cp_async_4(uint32_t smem, const void *global)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem), "l"(global) : "memory");
}

// Ends a group of this thread's copies, and waits until all groups but the last `pending` have landed.
__device__ __forceinline__ void cp_async_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int pending> __device__ __forceinline__ void cp_async_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// An arrival of this thread, which the barrier was initialised to expect, once its copies so far have landed.
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(uint64_t *barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(barrier)) : "memory");
}

// Ordinary writes to shared memory become visible to wgmma and the copy engine: by the threads that wrote, once they have,
// or by those that read.
__device__ __forceinline__ void fence_proxy_async()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Ordinary writes to global memory, which this thread may see, become visible to the copy engine.
__device__ __forceinline__ void fence_proxy_async_global()
{
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

// ---- Registers and dependent launches ----------------------------------------------------------

template <uint32_t registers> __device__ __forceinline__ void setmaxnreg_inc()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

template <uint32_t registers> __device__ __forceinline__ void setmaxnreg_dec()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// Everything that earlier launches of the stream wrote is visible after it.
__device__ __forceinline__ void griddepcontrol_wait()
{
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// The next launch of the stream may start; it still waits before it reads.
__device__ __forceinline__ void griddepcontrol_launch_dependents()
{
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// An 8 x 8 block of 16-bit numbers, a row over four lanes, becomes its transpose.
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t packed)
{
    uint32_t turned;

    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(packed));
    return turned;
}

// Two 8 x 8 blocks of 16-bit numbers, as movmatrix takes them, become the transposed blocks in shared memory: lanes 0 to 7 say
// where the rows of the first go, 8 to 15 those of the second, at multiples of 16 bytes.
__device__ __forceinline__ void stmatrix_trans(uint32_t row, uint32_t first, uint32_t second)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared::cta.b16 [%0], {%1, %2};" ::"r"(row), "r"(first), "r"(second) : "memory");
}

// Four as they are: lanes 8 i to 8 i + 7 say where the rows of block i go.
__device__ __forceinline__ void stmatrix(uint32_t row, const uint32_t (&blocks)[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(blocks[0]), "r"(blocks[1]),
                 "r"(blocks[2]), "r"(blocks[3])
                 : "memory");
}

// ---- Barriers of a block -----------------------------------------------------------------------

// A barrier of `threads` threads of a block; 0 is __syncthreads.
template <uint32_t barrier, uint32_t threads> __device__ __forceinline__ void bar_sync()
{
    asm volatile("bar.sync %0, %1;" ::"n"(barrier), "n"(threads) : "memory");
}

// ---- mma ---------------------------------------------------------------------------------------

// Four matrices of 8 x 8 16-bit numbers, whose rows of 16 bytes the lanes 8 i to 8 i + 7 name: of each a lane has two numbers of a row.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row));
}

// c[16 x 8] += a[16 x 16] . b[16 x 8] of 16-bit numbers, by a warp. Lane 4 r + q has, of a, inputs 2 q and 2 q + 1 of rows r and r + 8,
// then inputs 2 q + 8 and 2 q + 9 of both; of b, the same inputs of column r; of c, columns 2 q and 2 q + 1 of row r, then of r + 8.
template <bool is_bf16> __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b, uint32_t b_next)
{
    if constexpr (is_bf16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(b_next));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(b_next));
}

// ---- wgmma -------------------------------------------------------------------------------------

__device__ __forceinline__ void wgmma_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// What computes registers that wgmma reads stays before the fence.
template <int count> __device__ __forceinline__ void wgmma_fence_registers(uint32_t (&a)[count][4])
{
#pragma unroll
    for (int32_t i = 0; i < count; i++)
        asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
    wgmma_fence();
}

__device__ __forceinline__ void wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int pending> __device__ __forceinline__ void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// A tile of 128-byte rows, swizzled by 128 bytes, groups of 8 rows 1024 bytes apart: K-major, a row holds 64 inputs of one
// of M or N; rows_in, it holds 64 of M of one input.
__device__ __forceinline__ uint32_t wgmma_descriptor(const void *smem)
{
    return (smem_address(smem) & 0x3ffffu) >> 4 | 1u << 16;
}

// The upper half, which is the same for all. It is joined last, so that nobody adds 64 bits.
__device__ __forceinline__ uint64_t wgmma_whole(uint32_t descriptor)
{
    return uint64_t{1u << 30 | 1024 >> 4} << 32 | descriptor;
}

// What a descriptor grows by for the next 16 inputs.
template <bool rows_in> constexpr uint32_t wgmma_next_inputs = (rows_in ? 16 * 128 : 16 * 2) >> 4;

// c[64 x N] += a[64 x 16] . b[N x 16]^T, fp32 sums; a warpgroup's c is N / 2 registers a thread. The operands' type is bf16
// or f16; a_rows_in: a's tile is rows_in. b's is K-major.
template <int N, bool is_bf16, bool a_rows_in> struct wgmma;

// The operands' numbers in an instruction's text, and its registers.
#define WGMMA_R4 "%0, %1, %2, %3"
#define WGMMA_R8 WGMMA_R4 ", %4, %5, %6, %7"
#define WGMMA_R16 WGMMA_R8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_R24 WGMMA_R16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_R32 WGMMA_R24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_R40 WGMMA_R32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_R48 WGMMA_R40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_R56 WGMMA_R48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_R64 WGMMA_R56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_R72 WGMMA_R64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define WGMMA_R80 WGMMA_R72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_R88 WGMMA_R80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define WGMMA_R96 WGMMA_R88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_R104 WGMMA_R96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define WGMMA_R112 WGMMA_R104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_R120 WGMMA_R112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define WGMMA_R128 WGMMA_R120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_C4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define WGMMA_C8(i) WGMMA_C4(i), WGMMA_C4(i + 4)
#define WGMMA_C16(i) WGMMA_C8(i), WGMMA_C8(i + 8)
#define WGMMA_C24(i) WGMMA_C16(i), WGMMA_C8(i + 16)
#define WGMMA_C32(i) WGMMA_C24(i), WGMMA_C8(i + 24)
#define WGMMA_C40(i) WGMMA_C32(i), WGMMA_C8(i + 32)
#define WGMMA_C48(i) WGMMA_C40(i), WGMMA_C8(i + 40)
#define WGMMA_C56(i) WGMMA_C48(i), WGMMA_C8(i + 48)
#define WGMMA_C64(i) WGMMA_C56(i), WGMMA_C8(i + 56)
#define WGMMA_C72(i) WGMMA_C64(i), WGMMA_C8(i + 64)
#define WGMMA_C80(i) WGMMA_C72(i), WGMMA_C8(i + 72)
#define WGMMA_C88(i) WGMMA_C80(i), WGMMA_C8(i + 80)
#define WGMMA_C96(i) WGMMA_C88(i), WGMMA_C8(i + 88)
#define WGMMA_C104(i) WGMMA_C96(i), WGMMA_C8(i + 96)
#define WGMMA_C112(i) WGMMA_C104(i), WGMMA_C8(i + 104)
#define WGMMA_C120(i) WGMMA_C112(i), WGMMA_C8(i + 112)
#define WGMMA_C128(i) WGMMA_C120(i), WGMMA_C8(i + 120)

#define WGMMA_TEXT(n, type, sums, a, b, trans) \
    "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" sums "}, %" #a ", %" #b ", 1, 1, 1, %" #trans ", 0;"

// n / 2 sums, and the numbers of the three operands after them.
#define WGMMA(n, sums, a_at, b_at, trans_at)                                                                              \
    template <bool is_bf16, bool a_rows_in> struct wgmma<n, is_bf16, a_rows_in> {                                         \
        static __device__ __forceinline__ void run(float (&c)[sums], uint32_t a, uint32_t b)                              \
        {                                                                                                                 \
            if constexpr (is_bf16)                                                                                        \
                asm volatile(WGMMA_TEXT(n, "bf16", WGMMA_R##sums, a_at, b_at, trans_at)                                   \
                             : WGMMA_C##sums(0)                                                                           \
                             : "l"(wgmma_whole(a)), "l"(wgmma_whole(b)), "n"(static_cast<int>(a_rows_in)));               \
            else                                                                                                          \
                asm volatile(WGMMA_TEXT(n, "f16", WGMMA_R##sums, a_at, b_at, trans_at)                                    \
                             : WGMMA_C##sums(0)                                                                           \
                             : "l"(wgmma_whole(a)), "l"(wgmma_whole(b)), "n"(static_cast<int>(a_rows_in)));               \
        }                                                                                                                 \
    }

// The same of e4m3, 32 inputs of a K-major a; without `adds` the sums are overwritten.
template <int N> struct wgmma_e4m3;

#define WGMMA_E4M3(n, sums, a_at, b_at, adds_at)                                                                          \
    template <> struct wgmma_e4m3<n> {                                                                                    \
        static __device__ __forceinline__ void run(float (&c)[sums], uint32_t a, uint32_t b, int32_t adds)                \
        {                                                                                                                 \
            asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" #adds_at ", 0;\n\t"                                     \
                         "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" WGMMA_R##sums "}, %" #a_at          \
                         ", %" #b_at ", p, 1, 1;\n\t}"                                                                    \
                         : WGMMA_C##sums(0)                                                                               \
                         : "l"(wgmma_whole(a)), "l"(wgmma_whole(b)), "r"(adds));                                          \
        }                                                                                                                 \
    }

// The same of bf16 with a in registers, as mma takes it: of each warp 16 rows.
template <int N> struct wgmma_packed;

#define WGMMA_PACKED(n, sums, a0, a1, a2, a3, b_at)                                                                       \
    template <> struct wgmma_packed<n> {                                                                                  \
        static __device__ __forceinline__ void run(float (&c)[sums], const uint32_t (&a)[4], uint32_t b)                  \
        {                                                                                                                 \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" WGMMA_R##sums "}, {%" #a0 ", %" #a1 \
                         ", %" #a2 ", %" #a3 "}, %" #b_at ", 1, 1, 1, 0;"                                                 \
                         : WGMMA_C##sums(0)                                                                               \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(wgmma_whole(b)));                              \
        }                                                                                                                 \
    }

// The same of e5m2 or e4m3 in registers and e4m3, 32 inputs; without `adds` the sums are overwritten.
template <int N, bool is_e5m2, bool adds> struct wgmma_pieces;

#define WGMMA_PIECES_OF(n, sums, a0, a1, a2, a3, b_at, type, is_e5m2, adds)                                                     \
    template <> struct wgmma_pieces<n, is_e5m2, adds> {                                                                         \
        static __device__ __forceinline__ void run(float (&c)[sums], const uint32_t (&a)[4], uint32_t b)                        \
        {                                                                                                                       \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k32.f32." #type ".e4m3 {" WGMMA_R##sums "}, {%" #a0 ", %" #a1   \
                         ", %" #a2 ", %" #a3 "}, %" #b_at ", " #adds ", 1, 1;"                                                  \
                         : WGMMA_C##sums(0)                                                                                     \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(wgmma_whole(b)));                                    \
        }                                                                                                                       \
    }

#define WGMMA_PIECES(n, sums, a0, a1, a2, a3, b_at)                            \
    WGMMA_PIECES_OF(n, sums, a0, a1, a2, a3, b_at, e5m2, true, 0);             \
    WGMMA_PIECES_OF(n, sums, a0, a1, a2, a3, b_at, e5m2, true, 1);             \
    WGMMA_PIECES_OF(n, sums, a0, a1, a2, a3, b_at, e4m3, false, 0);            \
    WGMMA_PIECES_OF(n, sums, a0, a1, a2, a3, b_at, e4m3, false, 1)

WGMMA(8, 4, 4, 5, 6);
WGMMA(16, 8, 8, 9, 10);
WGMMA(32, 16, 16, 17, 18);
WGMMA(48, 24, 24, 25, 26);
WGMMA(64, 32, 32, 33, 34);
WGMMA(80, 40, 40, 41, 42);
WGMMA(96, 48, 48, 49, 50);
WGMMA(112, 56, 56, 57, 58);
WGMMA(128, 64, 64, 65, 66);
WGMMA(144, 72, 72, 73, 74);
WGMMA(160, 80, 80, 81, 82);
WGMMA(176, 88, 88, 89, 90);
WGMMA(192, 96, 96, 97, 98);
WGMMA(208, 104, 104, 105, 106);
WGMMA(224, 112, 112, 113, 114);
WGMMA(240, 120, 120, 121, 122);
WGMMA(256, 128, 128, 129, 130);
WGMMA_E4M3(8, 4, 4, 5, 6);
WGMMA_E4M3(16, 8, 8, 9, 10);
WGMMA_E4M3(32, 16, 16, 17, 18);
WGMMA_E4M3(48, 24, 24, 25, 26);
WGMMA_E4M3(64, 32, 32, 33, 34);
WGMMA_E4M3(80, 40, 40, 41, 42);
WGMMA_E4M3(128, 64, 64, 65, 66);
WGMMA_PIECES(8, 4, 4, 5, 6, 7, 8);
WGMMA_PIECES(16, 8, 8, 9, 10, 11, 12);
WGMMA_PIECES(32, 16, 16, 17, 18, 19, 20);
WGMMA_PACKED(32, 16, 16, 17, 18, 19, 20);
WGMMA_PACKED(48, 24, 24, 25, 26, 27, 28);
WGMMA_PACKED(64, 32, 32, 33, 34, 35, 36);
WGMMA_PACKED(80, 40, 40, 41, 42, 43, 44);
WGMMA_PACKED(96, 48, 48, 49, 50, 51, 52);
WGMMA_PACKED(112, 56, 56, 57, 58, 59, 60);
WGMMA_PACKED(128, 64, 64, 65, 66, 67, 68);

#endif
