#include "host_tests/emulator/async.h"

#include "host_tests/emulator/block.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <vector>

namespace emulator
{

namespace
{

constexpr uint32_t kChunk = 16;
constexpr uint32_t kRegisters = 65536; // of a multiprocessor

// In the 8 bytes of an mbarrier.
struct barrier_state {
    int32_t bytes; // announced and not yet come
    uint32_t arrivals : 15, pending : 15, phase : 1, made : 1;
};
static_assert(sizeof(barrier_state) == sizeof(uint64_t));

struct tensor_copy {
    CUtensorMap map;
    uint32_t smem;
    uint64_t *barrier;
    int32_t at[5];
};

// One of a thread's, in order: a copy, an arrival, or the end of a group.
struct thread_copy {
    enum { kCopy, kArrive, kCommit } kind;
    uint32_t smem, bytes, given;
    const void *global;
    uint64_t *barrier;
};

struct thread_state {
    std::deque<thread_copy> copies;
    uint64_t fenced; // moment of the last fence
    uint32_t registers;
};

struct chunk_state {
    uint64_t written; // moment; 0: not by cp.async
    unsigned writer;
};

struct flight {
    std::vector<tensor_copy> tensors;
    std::vector<thread_state> threads;
    std::vector<chunk_state> chunks;
    std::vector<unsigned> copying; // threads with copies
    uint64_t moment;
};

flight &f()
{
    static thread_local flight mine;

    return mine;
}

barrier_state &state_of(uint64_t *barrier)
{
    barrier_state &state = *reinterpret_cast<barrier_state *>(barrier);

    (void)smem_address(barrier);
    if (state.made != 1 || state.arrivals == 0 || state.arrivals == 0x7fff)
        die("an mbarrier that was not initialised");
    return state;
}

void settle(barrier_state &state)
{
    if (state.pending != 0 || state.bytes != 0) return;
    state.pending = state.arrivals;
    state.phase ^= 1;
}

chunk_state &chunk_at(uint32_t address)
{
    return f().chunks[(address - kSmemBase) / kChunk];
}

void land_thread_copy(unsigned thread)
{
    thread_state &state = f().threads[thread];
    thread_copy copy = state.copies.front();

    state.copies.pop_front();
    if (copy.kind == thread_copy::kArrive) {
        barrier_state &barrier = state_of(copy.barrier);

        if (barrier.pending == 0) die("one arrival too many");
        barrier.pending--;
        settle(barrier);
    } else if (copy.kind == thread_copy::kCopy) {
        unsigned char *to = smem_pointer(copy.smem, copy.bytes);

        std::memset(to, 0, copy.bytes);
        std::memcpy(to, copy.global, copy.given);
        chunk_at(copy.smem) = {++f().moment, thread};
    }
}

uint32_t swizzled(uint32_t address, uint32_t span)
{
    return span == 0 ? address : address ^ ((address >> 7 & (span / 16 - 1)) << 4);
}

// One row of a box, [box[0]], at its coordinates in dimensions 1.. .
void land_row(const tensor_copy &copy, const uint32_t index[5], uint32_t row)
{
    const CUtensorMap &map = copy.map;
    const unsigned char *from = map.base;
    uint32_t bytes = map.box[0] * map.element_bytes;
    bool inside = true;

    for (unsigned d = 1; d < map.rank; d++) {
        int64_t at = static_cast<int64_t>(copy.at[d]) + index[d];

        inside = inside && at >= 0 && static_cast<uint64_t>(at) < map.extents[d];
        from += at * static_cast<int64_t>(map.strides[d - 1]);
    }
    for (uint32_t offset = 0; offset < bytes; offset += kChunk) {
        uint32_t address = swizzled(copy.smem + row * bytes + offset, map.swizzle_bytes);
        unsigned char *to = smem_pointer(address, kChunk);
        uint32_t part = std::min(kChunk, bytes - offset);

        std::memset(to, 0, part);
        for (uint32_t i = 0; inside && i < part; i += map.element_bytes) {
            int64_t at = copy.at[0] + static_cast<int64_t>((offset + i) / map.element_bytes);

            if (at >= 0 && static_cast<uint64_t>(at) < map.extents[0])
                std::memcpy(to + i, from + at * map.element_bytes, map.element_bytes);
        }
        chunk_at(address) = {0, 0};
    }
}

void land_tensor_copy(const tensor_copy &copy)
{
    const CUtensorMap &map = copy.map;
    uint32_t rows = 1, bytes = map.box[0] * map.element_bytes;
    barrier_state &barrier = state_of(copy.barrier);

    for (unsigned d = 1; d < map.rank; d++)
        rows *= map.box[d];
    for (uint32_t row = 0; row < rows; row++) {
        uint32_t index[5] = {}, left = row;

        for (unsigned d = 1; d < map.rank; d++) {
            index[d] = left % map.box[d];
            left /= map.box[d];
        }
        land_row(copy, index, row);
    }
    barrier.bytes -= static_cast<int32_t>(rows * bytes);
    settle(barrier);
}

// What a kernel that is alone on its multiprocessor is compiled for, in steps of 8.
uint32_t registers_at_launch()
{
    return std::min(kRegisters / static_cast<uint32_t>(f().threads.size()) / 8 * 8, 255u);
}

} // namespace

void async_begin(unsigned threads)
{
    f().tensors.clear();
    f().copying.clear();
    f().threads.assign(threads, thread_state());
    for (thread_state &state : f().threads)
        state.registers = registers_at_launch();
    f().chunks.assign(kSmemBytesMax / kChunk, chunk_state());
    f().moment = 0;
    wgmma_begin();
}

bool async_advance(bool must)
{
    std::vector<tensor_copy> &tensors = f().tensors;
    std::vector<unsigned> &copying = f().copying;
    bool any = !tensors.empty() || !copying.empty();

    // Copies of the engine land in any order; those of a thread in its own.
    for (size_t i = tensors.size(); i-- > 0;)
        if (must || draw(4) == 0) {
            tensor_copy copy = tensors[i];

            tensors.erase(tensors.begin() + static_cast<ptrdiff_t>(i));
            land_tensor_copy(copy);
            must = false;
        }
    for (size_t i = copying.size(); i-- > 0;) {
        std::deque<thread_copy> &copies = f().threads[copying[i]].copies;

        for (uint32_t n = must ? 1 + draw(8) : draw(3); n > 0 && !copies.empty(); n--, must = false)
            land_thread_copy(copying[i]);
        if (copies.empty()) copying.erase(copying.begin() + static_cast<ptrdiff_t>(i));
    }
    return any;
}

void async_end()
{
    size_t registers = 0, given = f().threads.size() * registers_at_launch();

    for (const thread_state &state : f().threads)
        registers += state.registers;
    if (registers > given)
        die("setmaxnreg asks for %zu registers in all, and the block has %zu", registers, given);
    if (!f().tensors.empty() || !f().copying.empty()) die("the block ended with copies in flight");
    wgmma_end();
}

void mbarrier_init(uint64_t *barrier, uint32_t arrivals)
{
    barrier_state state = {0, arrivals, arrivals, 0, 1};

    check_alone("mbarriers");
    (void)smem_address(barrier);
    std::memcpy(barrier, &state, sizeof state);
}

void mbarrier_arrive(uint64_t *barrier, uint32_t expected_bytes)
{
    barrier_state &state = state_of(barrier);

    if (state.pending == 0) die("one arrival too many");
    state.bytes += static_cast<int32_t>(expected_bytes);
    state.pending--;
    settle(state);
}

bool mbarrier_test(uint64_t *barrier, uint32_t parity)
{
    return state_of(barrier).phase != parity;
}

void mbarrier_wait(uint64_t *barrier, uint32_t parity)
{
    barrier_state &state = state_of(barrier);

    wait_until([&] { return state.phase != parity; }, "an mbarrier");
}

void copy_tensor(void *smem, const CUtensorMap *map, uint64_t *barrier, const int32_t *coordinates,
                 unsigned rank)
{
    tensor_copy copy = {*map, smem_address(smem), barrier, {}};

    if (rank != map->rank) die("a copy of %u dimensions by a map of %u", rank, map->rank);
    if (copy.smem % 128 != 0) die("a tensor copy to an address that is no multiple of 128");
    if (coordinates[0] * map->element_bytes % 16 != 0)
        die("a tensor copy from %d, which is no multiple of 16 bytes", coordinates[0]);
    std::copy(coordinates, coordinates + rank, copy.at);
    f().tensors.push_back(copy);
}

static void add_thread_copy(const thread_copy &copy)
{
    std::deque<thread_copy> &copies = f().threads[here.thread.x].copies;

    if (copies.empty()) f().copying.push_back(here.thread.x);
    copies.push_back(copy);
}

void copy(uint32_t smem, const void *global, uint32_t bytes, uint32_t given)
{
    check_alone("cp.async");
    if (smem % bytes != 0 || reinterpret_cast<uintptr_t>(global) % bytes != 0)
        die("cp.async of %u bytes, not aligned", bytes);
    add_thread_copy({thread_copy::kCopy, smem, bytes, given, global, nullptr});
}

void copy_arrive_noinc(uint64_t *barrier)
{
    add_thread_copy({thread_copy::kArrive, 0, 0, 0, nullptr, barrier});
}

void copy_commit()
{
    add_thread_copy({thread_copy::kCommit, 0, 0, 0, nullptr, nullptr});
}

void copy_wait(unsigned pending)
{
    const std::deque<thread_copy> &copies = f().threads[here.thread.x].copies;
    std::vector<unsigned> &copying = f().copying;
    auto groups = std::count_if(copies.begin(), copies.end(), [](const thread_copy &copy) {
        return copy.kind == thread_copy::kCommit;
    });

    while (groups > static_cast<ptrdiff_t>(pending)) {
        groups -= copies.front().kind == thread_copy::kCommit;
        land_thread_copy(here.thread.x);
    }
    if (copies.empty())
        copying.erase(std::remove(copying.begin(), copying.end(), here.thread.x), copying.end());
}

void fence_proxy_async()
{
    f().threads[here.thread.x].fenced = ++f().moment;
}

void set_registers(uint32_t registers)
{
    f().threads[here.thread.x].registers = registers;
}

const unsigned char *read_16(uint32_t address)
{
    const chunk_state &chunk = chunk_at(address);
    unsigned first = here.thread.x / kWarpgroupThreads * kWarpgroupThreads;

    if (chunk.written != 0 && f().threads[chunk.writer].fenced < chunk.written)
        for (unsigned i = first; i < first + kWarpgroupThreads; i++)
            if (f().threads[i].fenced < chunk.written)
                die("wgmma reads what cp.async wrote, without a proxy fence between");
    return smem_pointer(address, kChunk);
}

} // namespace emulator
