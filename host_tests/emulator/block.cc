#include "host_tests/emulator/block.h"

#include "host_tests/emulator/async.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <sys/mman.h>
#include <ucontext.h>

#ifdef EMULATOR_UNDER_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define ASAN(call) call
#else
#define ASAN(call)
#endif

namespace emulator
{

__thread position here;

namespace
{

constexpr size_t kStackBytes = 256 << 10;
constexpr unsigned kWarps = kThreadsMax / kWarpThreads;
constexpr unsigned kBarriers = 16;
// Short beside any deadline of a kernel, and long enough for another rank to get the core.
constexpr long kGiveWayNs = 20000;
constexpr unsigned kPausesMax = 256;

struct fiber {
    ucontext_t context; // where it begins
    void *left[5];      // where it goes on
    bool begun;
    bool (*ready)(const void *); // NULL: can run
    const void *ready_ctx;
    const char *what;
    bool done;
    bool waited;  // for earlier launches
    bool paused;  // when it last ran, it only looked again for what it spins on
    bool arrived; // at the cluster's barrier, for which it has not waited
    unsigned met; // generation of that
};

struct warp {
    uint64_t values[2][3][kWarpThreads];
    const char *what;
    unsigned arrived, phase;
};

struct meeting {
    unsigned arrived, threads, generation;
};

// A host thread's: it runs one block at a time, and shares nothing, so that a block that spins on
// another rank's memory holds nothing which that rank needs.
struct machine {
    machine();
    machine(const machine &) = delete;
    machine &operator=(const machine &) = delete;
    ~machine();

    void reserve(unsigned fibers_most);

    std::vector<fiber> fibers; // of one block after the other
    std::vector<warp> warps;   // kWarps of each block
    meeting barriers[kClusterMax][kBarriers];
    meeting cluster;
    void *scheduler_left[5];
    void *scheduler_stack_fake;
    const void *scheduler_stack;
    size_t scheduler_stack_bytes;
    unsigned char *stacks;
    const launch *running;
    unsigned current, threads; // of all blocks that run
    // A warp that runs when nobody else can, so that the others get as far ahead as they may.
    unsigned asleep;
    unsigned pauses; // of spinning threads, since it last ran
    uint64_t random;
    alignas(1024) unsigned char smem[kClusterMax][kSmemBytesMax];
};
static_assert(kSmemBytesMax % 1024 == 0);

machine::machine()
    : fibers(), warps(), barriers(), cluster(), scheduler_left(), scheduler_stack_fake(nullptr),
      scheduler_stack(nullptr), scheduler_stack_bytes(0), stacks(nullptr), running(nullptr),
      current(0), threads(0), asleep(0), pauses(0), random(1)
{
    const char *seed = getenv("MOXIE_EMULATOR_SEED");

    if (seed != nullptr) random = strtoull(seed, nullptr, 10) * 2 + 1;
    reserve(kThreadsMax);
}

machine::~machine()
{
    ASAN(__asan_unpoison_memory_region(smem, sizeof smem));
    reserve(0);
}

// Stacks for so many, while no fiber runs.
void machine::reserve(unsigned fibers_most)
{
    if (stacks != nullptr) {
        ASAN(__asan_unpoison_memory_region(stacks, kStackBytes * fibers.size()));
        munmap(stacks, kStackBytes * fibers.size());
    }
    stacks = nullptr;
    fibers.resize(fibers_most);
    warps.resize(fibers_most / kWarpThreads);
    if (fibers_most == 0) return;
    stacks = static_cast<unsigned char *>(mmap(nullptr, kStackBytes * fibers_most,
                                               PROT_READ | PROT_WRITE,
                                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (stacks == MAP_FAILED) abort();
}

thread_local machine *mine;

machine *make_mine()
{
    static thread_local std::unique_ptr<machine> owner = std::make_unique<machine>();

    return owner.get();
}

// Every step of a fiber comes by here, so that it looks at a plain pointer.
machine &m()
{
    if (mine == nullptr) mine = make_mine();
    return *mine;
}

struct limits {
    std::mutex lock;
    std::map<const void *, int> smem_bytes;
};

// Never destroyed: threads may launch until the process ends.
limits &kernel_limits()
{
    static limits &one = *new limits();

    return one;
}

// Jumps, because swapcontext asks the kernel for the signal mask at every switch. AddressSanitizer
// would forget what it knows of the whole stack at every call that it sees not to return, and ask
// the kernel for another stack. It is told of every switch, so it need not see them: neither the C
// library's nor these functions.
[[gnu::noinline, gnu::no_sanitize_address]] void go_back(void **to)
{
    __builtin_longjmp(to, 1);
}

[[gnu::no_sanitize_address]] void switch_to(fiber &to)
{
    if (__builtin_setjmp(m().scheduler_left) != 0) return;
    if (to.begun) go_back(to.left);
    to.begun = true;
    setcontext(&to.context);
    abort();
}

[[gnu::no_sanitize_address]] void switch_back(fiber &from)
{
    if (__builtin_setjmp(from.left) == 0) go_back(m().scheduler_left);
}

void enter(unsigned index)
{
    fiber &to = m().fibers[index];
    void *fake = nullptr;

    m().current = index;
    here.thread = dim3(index % here.block_dim.x, 0, 0);
    here.block =
        dim3(here.block.x - here.block.x % m().running->cluster + index / here.block_dim.x, 0, 0);
    (void)fake;
    ASAN(__sanitizer_start_switch_fiber(&fake, m().stacks + index * kStackBytes, kStackBytes));
    switch_to(to);
    ASAN(__sanitizer_finish_switch_fiber(fake, nullptr, nullptr));
}

// Back to the scheduler; `last` when this fiber will not come again.
void leave(bool last)
{
    void *fake = nullptr;

    (void)fake;
    (void)last;
    ASAN(__sanitizer_start_switch_fiber(last ? nullptr : &fake, m().scheduler_stack,
                                        m().scheduler_stack_bytes));
    switch_back(m().fibers[m().current]);
    ASAN(__sanitizer_finish_switch_fiber(fake, &m().scheduler_stack, &m().scheduler_stack_bytes));
}

void fiber_main()
{
    ASAN(
        __sanitizer_finish_switch_fiber(nullptr, &m().scheduler_stack, &m().scheduler_stack_bytes));
    m().running->thread();
    if (m().running->early && !m().fibers[m().current].waited)
        die("launched early, and ended without griddepcontrol.wait");
    if (m().fibers[m().current].arrived) die("ended without waiting for the cluster");
    m().fibers[m().current].done = true;
    leave(true);
    abort();
}

[[noreturn]] void die_of_deadlock()
{
    std::map<std::string, std::string> waiting;

    for (unsigned i = 0; i < m().threads; i++)
        if (!m().fibers[i].done) waiting[m().fibers[i].what] += " " + std::to_string(i);
    for (const auto &group : waiting)
        fprintf(stderr, "emulator: waits for %s: threads%s\n", group.first.c_str(),
                group.second.c_str());
    die("deadlock");
}

enum outcome { kNobodyRan, kSpun, kWorked };

// One round over the threads from a random one on: without the warp that sleeps, or over its own.
outcome run_round(bool asleep)
{
    const unsigned threads = m().threads, sleeper = m().asleep;
    unsigned index = draw(threads);
    fiber *const fibers = m().fibers.data();
    outcome best = kNobodyRan;

    for (unsigned i = 0; i < threads; i++, index = index + 1 < threads ? index + 1 : 0) {
        fiber &f = fibers[index];

        if ((index / kWarpThreads == sleeper) != asleep) continue;
        if (f.done || (f.ready != nullptr && !f.ready(f.ready_ctx))) continue;
        f.ready = nullptr;
        f.paused = false;
        enter(index);
        best = std::max(best, f.paused ? kSpun : kWorked);
    }
    return best;
}

unsigned block_of_cluster()
{
    return here.block.x % m().running->cluster;
}

bool all_done()
{
    for (unsigned i = 0; i < m().threads; i++)
        if (!m().fibers[i].done) return false;
    return true;
}

// The blocks of one cluster, from `first` on.
void begin_blocks(unsigned first)
{
    const launch &launch = *m().running;

    here.block = dim3(first, 0, 0);
    here.block_dim = launch.block;
    here.grid_dim = launch.grid;
    std::fill_n(m().warps.begin(), launch.cluster * kWarps, warp{});
    std::memset(m().barriers, 0, sizeof m().barriers);
    m().cluster = {};
    for (unsigned i = 0; i < launch.cluster; i++) {
        unsigned char *smem = m().smem[i];

        ASAN(__asan_unpoison_memory_region(smem, kSmemBytesMax));
        std::memset(smem, 0xff, launch.smem_bytes);
        ASAN(__asan_poison_memory_region(smem + launch.smem_bytes,
                                         kSmemBytesMax - launch.smem_bytes));
    }
    async_begin(launch.block.x);
    for (unsigned i = 0; i < m().threads; i++) {
        fiber &f = m().fibers[i];

        f.ready = nullptr;
        f.begun = false;
        f.done = false;
        f.waited = false;
        f.paused = false;
        f.arrived = false;
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = m().stacks + i * kStackBytes;
        f.context.uc_stack.ss_size = kStackBytes;
        f.context.uc_link = nullptr;
        makecontext(&f.context, fiber_main, 0);
    }
}

void run_blocks(unsigned first)
{
    const timespec rest = {0, kGiveWayNs};

    begin_blocks(first);
    m().asleep = (m().threads + kWarpThreads - 1) / kWarpThreads;
    if (draw(2)) m().asleep = draw(m().asleep);
    while (!all_done()) {
        outcome best = run_round(false);

        if (best == kNobodyRan && async_advance(true)) continue;
        // Lanes that look together and vote work between two pauses, but may wait for the one that
        // sleeps.
        if (best != kWorked || m().pauses > kPausesMax) {
            m().pauses = 0;
            best = std::max(best, run_round(true));
        }
        if (best == kNobodyRan && !async_advance(true)) die_of_deadlock();
        // What all only spin on comes from another rank, which may need this core.
        if (best == kSpun) (void)nanosleep(&rest, nullptr);
        async_advance(false);
    }
    async_end();
}

} // namespace

void die(const char *format, ...)
{
    va_list list;

    fprintf(stderr, "emulator: block %u of %u, thread %u: ", here.block.x, here.grid_dim.x,
            here.thread.x);
    va_start(list, format);
    vfprintf(stderr, format, list);
    va_end(list);
    fprintf(stderr, "\n");
    abort();
}

uint32_t draw(uint32_t limit)
{
    m().random = m().random * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>((m().random >> 33) % limit);
}

void suspend(bool (*ready)(const void *), const void *ctx, const char *what)
{
    fiber &f = m().fibers[m().current];

    f.ready = ready;
    f.ready_ctx = ctx;
    f.what = what;
    leave(false);
}

void spin_pause()
{
    m().fibers[m().current].paused = true;
    m().pauses++;
    suspend([](const void *) { return true; }, nullptr, "a pause");
}

uint64_t now_ns()
{
    timespec now;

    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1000000000 + static_cast<uint64_t>(now.tv_nsec);
}

void wait_for_launches()
{
    m().fibers[m().current].waited = true;
}

void barrier(unsigned index, unsigned threads)
{
    meeting &at = m().barriers[block_of_cluster()][index % kBarriers];
    unsigned generation = at.generation;

    if (index >= kBarriers || threads % kWarpThreads != 0)
        die("barrier %u of %u threads", index, threads);
    if (at.arrived == 0) at.threads = threads;
    if (at.threads != threads)
        die("barrier %u: %u threads here, %u elsewhere", index, threads, at.threads);
    if (++at.arrived == threads) {
        at.arrived = 0;
        at.generation++;
    }
    wait_until([&] { return at.generation != generation; }, "a barrier");
}

const uint64_t *warp_exchange(const char *what, uint64_t value, uint64_t second, uint64_t third)
{
    warp &w = m().warps[block_of_cluster() * kWarps + here.thread.x / kWarpThreads];
    unsigned phase = w.phase;

    if (w.arrived == 0) w.what = what;
    if (w.what != what && std::strcmp(w.what, what) != 0)
        die("%s, while lanes of the same warp are at %s", what, w.what);
    w.values[phase & 1][0][lane()] = value;
    w.values[phase & 1][1][lane()] = second;
    w.values[phase & 1][2][lane()] = third;
    if (++w.arrived == kWarpThreads) {
        w.arrived = 0;
        w.phase++;
    }
    wait_until([&] { return w.phase != phase; }, what);
    return w.values[phase & 1][0];
}

void check_mask(uint32_t mask)
{
    if (mask != ~0u) die("a mask of %08x; the emulator knows whole warps", mask);
}

uint32_t warp_match(uint32_t mask, uint32_t value)
{
    const uint64_t *values;
    uint32_t same = 0;

    check_mask(mask);
    values = warp_exchange("__match_any_sync", value);
    for (unsigned i = 0; i < kWarpThreads; i++)
        if (values[i] == value) same |= 1u << i;
    return same;
}

uint32_t warp_ballot(uint32_t mask, bool value)
{
    const uint64_t *values;
    uint32_t lanes = 0;

    check_mask(mask);
    values = warp_exchange("__ballot_sync", value);
    for (unsigned i = 0; i < kWarpThreads; i++)
        if (values[i] != 0) lanes |= 1u << i;
    return lanes;
}

void cluster_arrive()
{
    fiber &f = m().fibers[m().current];

    if (f.arrived) die("arrives at the cluster's barrier twice");
    f.arrived = true;
    f.met = m().cluster.generation;
    if (++m().cluster.arrived < m().threads) return;
    m().cluster.arrived = 0;
    m().cluster.generation++;
}

void cluster_wait()
{
    fiber &f = m().fibers[m().current];

    if (!f.arrived) die("waits for the cluster without having arrived");
    wait_until([&] { return m().cluster.generation != f.met; }, "the cluster");
    f.arrived = false;
}

const unsigned char *of_block(const void *own, unsigned block)
{
    const uint32_t address = smem_address(own);
    bool runs = false;

    if (block >= m().running->cluster)
        die("block %u of a cluster of %u", block, m().running->cluster);
    for (unsigned i = 0; i < here.block_dim.x; i++)
        runs = runs || !m().fibers[block * here.block_dim.x + i].done;
    if (!runs) die("reads shared memory of block %u of the cluster, which has ended", block);
    return m().smem[block] + (address - kSmemBase);
}

void check_alone(const char *what)
{
    if (m().running->cluster > 1) die("%s in a cluster; the emulator knows them outside", what);
}

unsigned char *dynamic_smem()
{
    return m().smem[block_of_cluster()];
}

uint32_t smem_address(const void *pointer)
{
    ptrdiff_t offset = static_cast<const unsigned char *>(pointer) - dynamic_smem();

    if (offset < 0 || static_cast<size_t>(offset) > m().running->smem_bytes)
        die("no address of shared memory");
    return kSmemBase + static_cast<uint32_t>(offset);
}

unsigned char *smem_pointer(uint32_t address, uint32_t bytes)
{
    if (address < kSmemBase || address - kSmemBase + bytes > m().running->smem_bytes)
        die("%u bytes at %u; shared memory ends at %zu", bytes, address,
            kSmemBase + m().running->smem_bytes);
    return dynamic_smem() + (address - kSmemBase);
}

cudaError_t allow_smem(const void *kernel, int bytes)
{
    std::lock_guard<std::mutex> guard(kernel_limits().lock);

    if (bytes < 0 || static_cast<uint32_t>(bytes) > kSmemBytesMax) return cudaErrorInvalidValue;
    kernel_limits().smem_bytes[kernel] = bytes;
    return cudaSuccess;
}

static size_t allowed_smem(const void *kernel)
{
    std::lock_guard<std::mutex> guard(kernel_limits().lock);
    auto limit = kernel_limits().smem_bytes.find(kernel);

    return limit == kernel_limits().smem_bytes.end() ? 48 << 10
                                                     : static_cast<size_t>(limit->second);
}

void run(const launch &launch)
{
    std::vector<unsigned> order(launch.grid.x / launch.cluster);

    m().running = &launch;
    m().threads = launch.block.x * launch.cluster;
    if (launch.cluster * kThreadsMax > m().fibers.size()) m().reserve(launch.cluster * kThreadsMax);
    if (launch.smem_bytes > allowed_smem(launch.kernel))
        die("%zu bytes of shared memory, more than the kernel may use", launch.smem_bytes);
    for (unsigned i = 0; i < order.size(); i++)
        order[i] = i;
    for (unsigned i = 0; i < order.size(); i++)
        std::swap(order[i], order[i + draw(static_cast<uint32_t>(order.size()) - i)]);
    for (unsigned index : order)
        run_blocks(index * launch.cluster);
    m().running = nullptr;
}

} // namespace emulator
