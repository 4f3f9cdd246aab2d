// A block of CUDA threads on one CPU thread, the one that launched it. Every CUDA thread is a fiber
// that runs until it must wait; which of those that can go on goes first, and when a copy in flight
// lands, is drawn from a seed. Waiting that nothing can end is a deadlock, which ends the program
// with what every thread waits for. Host threads run blocks beside each other, as ranks do.

#ifndef MOXIE_EMULATOR_BLOCK_H
#define MOXIE_EMULATOR_BLOCK_H

#include "cuda_runtime_api.h"

#include <cstdint>
#include <cstring>
#include <functional>

struct dim3 {
    unsigned x, y, z;

    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z)
    {
    }
};

namespace emulator
{

// Of the fiber that runs.
struct position {
    dim3 thread{0, 0, 0}, block{0, 0, 0}, block_dim, grid_dim;
};
// __thread, which says that no constructor runs: thread_local would ask at every use.
extern __thread position here;

constexpr unsigned kWarpThreads = 32;
constexpr unsigned kWarpgroupThreads = 128;
constexpr unsigned kThreadsMax = 1024;
constexpr unsigned kClusterMax = 8; // blocks of a cluster that every device can run
// What a block of an H200 may ask for, and where its addresses begin: 0 is nobody's.
constexpr uint32_t kSmemBytesMax = 232448;
constexpr uint32_t kSmemBase = 1024;

static inline int lane()
{
    return static_cast<int>(here.thread.x % kWarpThreads);
}

// Ends the program: kernel, block, thread, then the words.
[[noreturn]] void die(const char *format, ...) __attribute__((format(printf, 1, 2)));

// ---- Waiting -----------------------------------------------------------------------------------

// Lets others run until `ready` is true; `what` is for the report of a deadlock.
void suspend(bool (*ready)(const void *), const void *ctx, const char *what);

template <class Ready> void wait_until(const Ready &ready, const char *what)
{
    if (!ready())
        suspend([](const void *ctx) { return (*static_cast<const Ready *>(ctx))(); }, &ready, what);
}

// Lets others run, and other ranks when there is nobody here but who spins. Never a deadlock: what
// is spun on may be in memory that another rank writes, and whoever spins has a deadline.
void spin_pause();
// What %globaltimer reads.
uint64_t now_ns();

// ---- Barriers and warps ------------------------------------------------------------------------

// bar.sync: `threads` threads of the block meet.
void barrier(unsigned index, unsigned threads);

// barrier.cluster: all threads of the cluster's blocks meet, and each arrives before it waits.
void cluster_arrive();
void cluster_wait();
// The byte of another block of the cluster that is `own` of this one, while that block runs.
const unsigned char *of_block(const void *own, unsigned block);
// What a cluster's blocks cannot do here ends the program.
void check_alone(const char *what);

// All lanes of a warp give up to three values and get everyone's, [3][32]. `what` must be the same
// for all.
const uint64_t *warp_exchange(const char *what, uint64_t value, uint64_t second = 0,
                              uint64_t third = 0);
uint32_t warp_match(uint32_t mask, uint32_t value);
uint32_t warp_ballot(uint32_t mask, bool value);
void check_mask(uint32_t mask);

template <class T> T warp_read(const char *what, uint32_t mask, T value, int from)
{
    uint64_t bits = 0;
    T read;

    static_assert(sizeof value <= sizeof bits);
    check_mask(mask);
    std::memcpy(&bits, &value, sizeof value);
    bits = warp_exchange(what, bits)[from & 31];
    std::memcpy(&read, &bits, sizeof read);
    return read;
}

// ---- Launches ----------------------------------------------------------------------------------

struct launch {
    dim3 grid, block;
    size_t smem_bytes;
    bool early;       // may begin while the launch before it ends
    unsigned cluster; // blocks
    const void *kernel;
    std::function<void()> thread;
};

// cudaFuncSetAttribute's limit for a kernel; without it, 48 KiB.
cudaError_t allow_smem(const void *kernel, int bytes);
cudaError_t enqueue_launch(cudaStream_t stream, const launch &launch);
// Runs all blocks, in an order drawn from the seed.
void run(const launch &launch);

// griddepcontrol.wait; a thread of an early launch that never calls it ends the program.
void wait_for_launches();

// The block's dynamic shared memory, [smem_bytes], filled with 0xff when the block begins.
unsigned char *dynamic_smem();
uint32_t smem_address(const void *pointer);
unsigned char *smem_pointer(uint32_t address, uint32_t bytes);

// A number below `limit`, from the seed.
uint32_t draw(uint32_t limit);

} // namespace emulator

#endif
