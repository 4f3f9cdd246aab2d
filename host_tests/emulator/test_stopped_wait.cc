// A wait whose process is stopped over its middle, which no kernel of a device is: rank 1 of 3
// waits for rank 0, which waits too and says so all the time, and for rank 2, which is gone.

#include "kernels/cuda/cuda.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

namespace
{

constexpr int32_t kRanks = 3, kWaiter = 1;
constexpr int64_t kTimeoutMs = 400;
constexpr int64_t kStopMs = 120, kWakeMs = 600, kEndMs = 2000; // from the start of the wait

struct shared {
    alignas(
        FLAG_LINE_BYTES) unsigned char windows[kRanks][(kRanks * WORD_COUNT + 1) * FLAG_LINE_BYTES];
    flag_state state;
    flag_report report;
};

// Of rank 0, and the one that stops the waiting process.
[[noreturn]] void beat(shared *all, pid_t waiting)
{
    auto *line = reinterpret_cast<volatile uint64_t *>(
        all->windows[kWaiter] + (1 + WORD_BEAT * kRanks + 0) * FLAG_LINE_BYTES);

    for (int64_t ms = 0; ms < kEndMs; ms += 10) {
        *line = static_cast<uint64_t>(ms + 1);
        if (ms == kStopMs) (void)kill(waiting, SIGSTOP);
        if (ms == kWakeMs) (void)kill(waiting, SIGCONT);
        (void)usleep(10000);
    }
    _exit(EXIT_SUCCESS);
}

int32_t wait_for_peers(shared *all)
{
    void *windows[kRanks];
    await_args args = {};

    for (int32_t rank = 0; rank < kRanks; rank++)
        windows[rank] = all->windows[rank];
    all->state.active = (1u << kRanks) - 1;
    all->state.epochs[0] = 1;
    args.state = &all->state;
    args.window = args.beats = windows[kWaiter];
    args.peer_beats = windows;
    args.report = &all->report;
    args.timeout_ns = kTimeoutMs * 1000000;
    args.word = WORD_COMBINE;
    args.ranks = kRanks;
    args.rank = kWaiter;
    return kernels_cuda.await(&args, nullptr);
}

} // namespace

int main()
{
    void *memory =
        mmap(nullptr, sizeof(shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    shared *all = static_cast<shared *>(memory);
    pid_t waiting = getpid(), child;

    if (memory == MAP_FAILED) return EXIT_FAILURE;
    child = fork();
    if (child < 0) return EXIT_FAILURE;
    if (child == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        beat(all, waiting);
    }
    if (wait_for_peers(all) != 0) return EXIT_FAILURE;
    (void)kill(child, SIGKILL);
    (void)waitpid(child, nullptr, 0);
    (void)printf("kind %u, rank %d, silent 0x%llx\n", all->report.verdict.kind,
                 all->report.verdict.rank,
                 static_cast<unsigned long long>(all->report.verdict.silent));
    return all->report.verdict.kind == VERDICT_SILENT && all->report.verdict.rank == 2
               ? EXIT_SUCCESS
               : EXIT_FAILURE;
}
