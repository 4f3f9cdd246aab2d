// What happens in a block beside its threads: barriers in shared memory, copies in flight, wgmma. A
// copy lands at a moment drawn from the seed, at the latest when somebody can only wait for it, and
// reads its source then. wgmma runs when its result is waited for. So a stage that is reused too
// early, or read too soon, gives wrong numbers here too.
//
// Shared memory written by cp.async is the generic proxy's: wgmma may read it only after
// fence.proxy.async of the thread that wrote it (once its copies have landed) or of all those that
// read it.

#ifndef MOXIE_EMULATOR_ASYNC_H
#define MOXIE_EMULATOR_ASYNC_H

#include <cuda.h>

#include <cstdint>

namespace emulator
{

void async_begin(unsigned threads);
// Lets some copies land, at least one if `must`; false when there was none.
bool async_advance(bool must);
// Dies when something is still in flight.
void async_end();

void mbarrier_init(uint64_t *barrier, uint32_t arrivals);
void mbarrier_arrive(uint64_t *barrier, uint32_t expected_bytes);
bool mbarrier_test(uint64_t *barrier, uint32_t parity);
void mbarrier_wait(uint64_t *barrier, uint32_t parity);

void copy_tensor(void *smem, const CUtensorMap *map, uint64_t *barrier, const int32_t *coordinates,
                 unsigned rank);
// cp.async of `bytes`, 4 or 16, of which the first `given` come from memory and the rest are zeros.
void copy(uint32_t smem, const void *global, uint32_t bytes, uint32_t given);
// Arrives once this thread's copies so far have landed; the phase's count does not change.
void copy_arrive_noinc(uint64_t *barrier);
// Ends a group of this thread's copies, and lets all groups but the last `pending` land.
void copy_commit();
void copy_wait(unsigned pending);
void fence_proxy_async();
// setmaxnreg: this thread's registers from now on. The block dies at its end when warpgroups had
// asked for more in all than it is launched with, which on a device waits for ever.
void set_registers(uint32_t registers);

// kE5m2: of a, in registers, and b is e4m3.
enum number { kBf16, kF16, kE4m3, kE5m2 };

// c[64 x n] = a . b^T, plus c where it adds, over 32 bytes of inputs; `c` is the thread's n / 2
// sums. Where the thread has four registers of a, they are read when the product runs.
struct wgmma_operands {
    uint64_t a, b;
    int n;
    number type;
    bool a_rows_in; // a lies with its 64 rows contiguous
    bool adds;

    bool operator==(const wgmma_operands &o) const
    {
        return a == o.a && b == o.b && n == o.n && type == o.type && a_rows_in == o.a_rows_in &&
               adds == o.adds;
    }
};
void wgmma_fence();
void wgmma_issue(const wgmma_operands &operands, float *c, const uint32_t *a = nullptr);
void wgmma_commit();
void wgmma_wait(unsigned pending);

// mma.m16n8k16 of kBf16 or kF16: a lane's four sums, from what warp_exchange gives of all lanes:
// words 0 and 2 of a, words 1 and 3, both words of b.
void mma(float (&c)[4], number type, const uint64_t *words);

// For wgmma: 16 bytes at an address that this thread's warpgroup may read.
const unsigned char *read_16(uint32_t address);

void wgmma_begin();
void wgmma_end();

} // namespace emulator

#endif
