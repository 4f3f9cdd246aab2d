// Ranks as processes and as threads: kernels that wait for each other's rows in shared windows, and
// what a host thread has of its own.

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"

#include <cuda_bf16.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

extern "C" {
int cuDeviceGetCount(int *count);
int cuDeviceGet(int *device, int ordinal);
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuCtxGetCurrent(void **context);
int cuCtxSetCurrent(void *context);
}

namespace
{

constexpr size_t kWindowBytes = size_t{2} << 20;
constexpr uint64_t kRounds = 60;
constexpr uint64_t kPatienceNs = 20000000000;
constexpr unsigned kThreads = 128;

int failures;

void check(bool fine, const char *what)
{
    printf("%s %s\n", fine ? "ok  " : "FAIL", what);
    failures += !fine;
}

// ---- The kernel --------------------------------------------------------------------------------

// A peer may be one round ahead, so that its next row has another place.
struct window {
    uint64_t flag; // the last round whose row is here
    uint64_t rows[2][kThreads];
};

struct arguments {
    window *mine, *theirs;
    const __nv_bfloat16 *numbers; // [8][8], one row for each operand of the product: v, then 1
    uint64_t round;
    float v;
    bool leads;
    unsigned *faults;
};

struct smem {
    alignas(1024) unsigned char tile[2][8192]; // 64 rows of 128 bytes
    uint64_t filled;
};

uint64_t row_value(uint64_t round, bool from_leader)
{
    return round * 1000 + threadIdx.x + (from_leader ? 500 : 0);
}

void put(const arguments &a)
{
    a.theirs->rows[a.round % 2][threadIdx.x] = row_value(a.round, a.leads);
    fence_system();
    __syncthreads();
    if (threadIdx.x == 0) store_release_system(&a.theirs->flag, a.round);
}

void take(const arguments &a)
{
    uint64_t until = global_timer_ns() + kPatienceNs;

    while (load_acquire_system(&a.mine->flag) < a.round && global_timer_ns() < until)
        spin_pause(100);
    if (a.mine->rows[a.round % 2][threadIdx.x] != row_value(a.round, !a.leads))
        atomicAdd(a.faults, 1u);
    __syncthreads();
}

// A product of v and 1 whose operands are in shared memory while the ranks wait for each other.
void exchange(arguments a)
{
    smem &s = *dynamic_smem<smem>();
    __shared__ unsigned arrived;
    float c[4] = {};

    if (threadIdx.x == 0) {
        arrived = 0;
        mbarrier_init(&s.filled, kThreads);
    }
    __syncthreads();
    for (uint32_t at = threadIdx.x * 16; at < sizeof s.tile; at += kThreads * 16)
        cp_async(smem_address(s.tile[0] + at), a.numbers + at / sizeof s.tile[0] * 8, 16);
    cp_async_mbarrier_arrive_noinc(&s.filled);
    atomicAdd(&arrived, 1u);
    if (a.leads) put(a);
    take(a);
    if (!a.leads) put(a);
    mbarrier_wait(&s.filled, 0);
    fence_proxy_async();
    __syncthreads();
    if (arrived != kThreads) atomicAdd(a.faults, 1u);
    wgmma_fence();
    wgmma<8, true, false>::run(c, wgmma_descriptor(s.tile[0]), wgmma_descriptor(s.tile[1]));
    wgmma_commit();
    wgmma_wait<0>();
    for (float sum : c)
        if (sum != 16 * a.v) atomicAdd(a.faults, 1u);
}

template <class Argument> void run_block(void (*kernel)(Argument), const Argument &argument)
{
    if (launch(kernel, {1, kThreads, sizeof(smem), LAUNCH_AFTER}, nullptr, argument) != cudaSuccess)
        exit(2);
}

// All rounds of one rank; the ranks take turns at being first.
unsigned run_rank(int rank, window *mine, window *theirs)
{
    alignas(16) __nv_bfloat16 numbers[2][8];
    unsigned faults = 0;

    for (uint64_t round = 1; round <= kRounds && faults == 0; round++) {
        float v = static_cast<float>(round % 4 + static_cast<uint64_t>(rank));

        for (int i = 0; i < 8; i++) {
            numbers[0][i] = __float2bfloat16_rn(v);
            numbers[1][i] = __float2bfloat16_rn(1.0f);
        }
        run_block(exchange, {mine, theirs, numbers[0], round, v,
                             round % 2 == static_cast<uint64_t>(rank), &faults});
    }
    return faults;
}

// ---- Two processes -----------------------------------------------------------------------------

void must(bool fine, const char *what)
{
    if (fine) return;
    fprintf(stderr, "%s\n", what);
    _exit(2);
}

void send_descriptor(int socket, int fd)
{
    char byte = 0, control[CMSG_SPACE(sizeof fd)] = {};
    iovec part = {&byte, 1};
    msghdr message = {};
    cmsghdr *header;

    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
    must(sendmsg(socket, &message, 0) == 1, "sendmsg");
}

int receive_descriptor(int socket)
{
    char byte, control[CMSG_SPACE(sizeof(int))] = {};
    iovec part = {&byte, 1};
    msghdr message = {};
    int fd = -1;

    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    must(recvmsg(socket, &message, 0) == 1 && CMSG_FIRSTHDR(&message) != nullptr, "recvmsg");
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
    return fd;
}

window *map_window(CUmemGenericAllocationHandle handle, int device)
{
    CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, device},
                              CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUdeviceptr address;

    must(cuMemAddressReserve(&address, kWindowBytes, 0, 0, 0) == CUDA_SUCCESS, "reserve");
    must(cuMemMap(address, kWindowBytes, 0, handle, 0) == CUDA_SUCCESS, "map");
    must(cuMemSetAccess(address, kWindowBytes, &access, 1) == CUDA_SUCCESS, "access");
    must(cuMemRelease(handle) == CUDA_SUCCESS, "release");
    return reinterpret_cast<window *>(address);
}

void unmap_window(window *w)
{
    CUdeviceptr address = reinterpret_cast<CUdeviceptr>(w);

    must(cuMemUnmap(address, kWindowBytes) == CUDA_SUCCESS, "unmap");
    must(cuMemAddressFree(address, kWindowBytes) == CUDA_SUCCESS, "free");
}

// A rank's own window, which its peer gets, and the peer's.
unsigned run_process(int rank, int socket)
{
    CUmemAllocationProp wanted = {};
    CUmemGenericAllocationHandle handle;
    window *mine, *theirs;
    unsigned faults;
    int fd;

    wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.location = {CU_MEM_LOCATION_TYPE_DEVICE, rank};
    wanted.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    must(cudaSetDevice(rank) == cudaSuccess, "device");
    must(cuMemCreate(&handle, kWindowBytes, &wanted, 0) == CUDA_SUCCESS, "create");
    must(cuMemExportToShareableHandle(&fd, handle, wanted.requestedHandleTypes, 0) == CUDA_SUCCESS,
         "export");
    send_descriptor(socket, fd);
    close(fd);
    mine = map_window(handle, rank);
    fd = receive_descriptor(socket);
    must(cuMemImportFromShareableHandle(&handle, reinterpret_cast<void *>(intptr_t{fd}),
                                        wanted.requestedHandleTypes) == CUDA_SUCCESS,
         "import");
    close(fd);
    theirs = map_window(handle, rank);
    faults = run_rank(rank, mine, theirs);
    unmap_window(mine);
    unmap_window(theirs);
    return faults;
}

void try_processes()
{
    int ends[2], status;
    bool fine = true;

    fflush(stdout);
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) exit(2);
    for (int rank = 0; rank < 2; rank++) {
        pid_t child = fork();

        if (child < 0) exit(2);
        if (child == 0) exit(run_process(rank, ends[rank]) != 0);
    }
    for (int rank = 0; rank < 2; rank++)
        fine = wait(&status) > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0 && fine;
    close(ends[0]);
    close(ends[1]);
    check(fine, "two processes exchange rows");
}

// ---- Two threads -------------------------------------------------------------------------------

void try_threads()
{
    static window windows[2];
    unsigned faults[2];

    std::thread first([&] { faults[0] = run_rank(0, &windows[0], &windows[1]); });
    std::thread second([&] { faults[1] = run_rank(1, &windows[1], &windows[0]); });
    first.join();
    second.join();
    check(faults[0] == 0 && faults[1] == 0, "two threads exchange rows");
}

size_t pages_mapped()
{
    FILE *file = fopen("/proc/self/statm", "r");
    size_t pages;

    if (file == nullptr || fscanf(file, "%zu", &pages) != 1) exit(2);
    (void)fclose(file);
    return pages;
}

void nothing(int)
{
}

// Stacks are mapped, which no sanitizer counts. The allocator keeps some room for every thread.
void try_many_threads()
{
    size_t before, after;

    std::thread(run_block<int>, nothing, 0).join();
    before = pages_mapped();
    for (int i = 0; i < 8; i++)
        std::thread(run_block<int>, nothing, 0).join();
    after = pages_mapped();
    check(after < before + ((512 << 20) / 4096), "a thread that ends leaves nothing");
}

// ---- Waiting -----------------------------------------------------------------------------------

// One thread waits for another of its block, which all others keep from its turn.
void spin_in_a_block(uint64_t *flag)
{
    if (threadIdx.x == kThreads - 1) store_release_system(flag, 1);
    while (load_acquire_system(flag) == 0)
        spin_pause(100);
}

void spin_in_vain(uint64_t *out)
{
    uint64_t begin = global_timer_ns();

    while (global_timer_ns() - begin < 30000000)
        spin_pause(100);
    if (threadIdx.x == 0) *out = global_timer_ns() - begin;
}

void spin_beside_a_barrier(uint64_t *out)
{
    uint64_t begin = global_timer_ns();

    if (threadIdx.x == 0)
        while (global_timer_ns() - begin < 5000000)
            spin_pause(100);
    __syncthreads();
    if (threadIdx.x == 0) *out = 1;
}

void add_and_swap(unsigned long long *out)
{
    unsigned expected = 5;

    atomicAdd(&out[0], 2ull);
    if (threadIdx.x == 0 && atomicCAS(&expected, 5u, 6u) == 5 && atomicCAS(&expected, 5u, 7u) == 6)
        out[1] = atomicCAS(&out[1], 0ull, 1ull) + expected;
}

void try_waiting()
{
    unsigned long long sums[2] = {};
    uint64_t word = 0;

    run_block(spin_in_a_block, &word);
    check(word == 1, "a block's threads wait for one of them");
    run_block(spin_in_vain, &word);
    check(word >= 30000000 && word < 10000000000, "whoever spins in vain has a deadline");
    word = 0;
    run_block(spin_beside_a_barrier, &word);
    check(word == 1, "one thread spins, the others wait");
    run_block(add_and_swap, &sums[0]);
    check(sums[0] == 2 * kThreads && sums[1] == 6, "atomics");
}

// ---- Devices and streams -----------------------------------------------------------------------

void try_devices()
{
    int count = 0, device = -1, other = -1, value = -1;
    void *context = nullptr, *current = nullptr;

    check(cudaGetDeviceCount(&count) == cudaSuccess && count == 2 &&
              cuDeviceGetCount(&count) == 0 && count == 2,
          "two devices");
    check(cuDeviceGet(&device, 1) == 0 && device == 1 && cuDeviceGet(&device, 2) != 0,
          "devices have ordinals");
    check(cudaSetDevice(2) == cudaErrorInvalidDevice && cudaSetDevice(-1) == cudaErrorInvalidDevice,
          "a device that is none");
    check(cuDevicePrimaryCtxRetain(&context, 1) == 0 && cuCtxSetCurrent(context) == 0 &&
              cudaGetDevice(&device) == cudaSuccess && device == 1 &&
              cuCtxGetCurrent(&current) == 0 && current == context,
          "the driver's context is the runtime's device");
    std::thread([&] {
        (void)cudaGetDevice(&other);
        (void)cuCtxGetCurrent(&current);
        (void)cudaFree(nullptr);
        (void)cuCtxGetCurrent(&context);
    }).join();
    check(other == 0, "a thread begins with the first device");
    check(current == nullptr && context != nullptr, "and with its context when it uses it");
    check(cuCtxSetCurrent(&count) != 0 && cuDevicePrimaryCtxRetain(&context, 2) != 0,
          "a context that is none");
    check(cuCtxSetCurrent(nullptr) == 0 && cudaGetDevice(&device) == cudaSuccess && device == 0 &&
              cuCtxGetCurrent(&current) == 0 && current == nullptr,
          "without a context, the first device");
    check(cudaDeviceGetAttribute(&value, cudaDevAttrComputeCapabilityMajor, 1) == cudaSuccess &&
              value == 9 &&
              cudaDeviceGetAttribute(&value, static_cast<cudaDeviceAttr>(1), 1) == cudaSuccess &&
              value == 0 &&
              cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 2) != cudaSuccess,
          "attributes");
}

void add_one(unsigned *word)
{
    if (threadIdx.x == 0) atomicAdd(word, 1u);
}

void try_graph()
{
    cudaStreamCaptureStatus none, active;
    cudaStream_t stream;
    cudaGraphExec_t exec;
    cudaGraph_t graph;
    unsigned word = 0;

    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) exit(2);
    (void)cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
    (void)cudaStreamIsCapturing(stream, &active);
    if (launch(add_one, {1, kThreads, 0, LAUNCH_AFTER}, stream, &word) != cudaSuccess) exit(2);
    if (cudaStreamEndCapture(stream, &graph) != cudaSuccess) exit(2);
    (void)cudaStreamIsCapturing(stream, &none);
    check(active == cudaStreamCaptureStatusActive && none == cudaStreamCaptureStatusNone &&
              word == 0,
          "a stream says whether it captures");
    if (cudaGraphInstantiate(&exec, graph, 0) != cudaSuccess) exit(2);
    std::thread([&] { (void)cudaGraphLaunch(exec, stream); }).join();
    check(word == 1, "another thread launches the graph");
    (void)cudaGraphExecDestroy(exec);
    (void)cudaGraphDestroy(graph);
    (void)cudaStreamDestroy(stream);
}

} // namespace

int main()
{
    setenv("MOXIE_EMULATOR_DEVICES", "2", 1);
    try_processes();
    try_threads();
    try_many_threads();
    try_waiting();
    try_devices();
    try_graph();
    return failures != 0;
}
