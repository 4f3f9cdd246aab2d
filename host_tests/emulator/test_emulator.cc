// The emulator finds what it promises to find: each kernel here makes one mistake, and must end
// with the words that name it.

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <sys/wait.h>
#include <unistd.h>

namespace
{

struct arguments {
    const unsigned char *global; // [4096], on the device
    float *out;                  // [128]
};

struct smem {
    alignas(1024) unsigned char tile[2][8192]; // 64 rows of 128 bytes
    uint64_t barrier;
};

void make_barrier(smem &s, uint32_t arrivals)
{
    if (threadIdx.x == 0) mbarrier_init(&s.barrier, arrivals);
    __syncthreads();
}

void multiply(smem &s, const arguments &args)
{
    float c[4] = {};

    wgmma_fence();
    wgmma<8, true, false>::run(c, wgmma_descriptor(s.tile[0]), wgmma_descriptor(s.tile[1]));
    wgmma_commit();
    wgmma_wait<0>();
    args.out[threadIdx.x] = c[0] + c[1] + c[2] + c[3];
}

// The barrier's first phase ends once every thread's copies have landed.
void fill(smem &s, const arguments &args)
{
    make_barrier(s, 128);
    for (uint32_t at = threadIdx.x * 16; at < sizeof s.tile; at += blockDim.x * 16)
        cp_async(smem_address(s.tile[0] + at), args.global + at % 4096, 16);
    cp_async_mbarrier_arrive_noinc(&s.barrier);
}

void right(arguments args)
{
    smem &s = *dynamic_smem<smem>();

    fill(s, args);
    mbarrier_wait(&s.barrier, 0);
    fence_proxy_async();
    multiply(s, args);
}

// All groups of a thread's copies but the last one that it waits for have landed.
void groups_of_copies(arguments args)
{
    smem &s = *dynamic_smem<smem>();
    const uint32_t at = threadIdx.x * 16;

    for (uint32_t group = 0; group < 4; group++) {
        cp_async(smem_address(s.tile[0] + group * 2048 + at), args.global + at, 16);
        cp_async_commit();
    }
    cp_async_wait<1>();
    for (uint32_t group = 0; group < 3; group++)
        if (memcmp(s.tile[0] + group * 2048 + at, args.global + at, 16) != 0) abort();
    cp_async_wait<0>();
    if (memcmp(s.tile[0] + 3 * 2048 + at, args.global + at, 16) != 0) abort();
}

void without_proxy_fence(arguments args)
{
    smem &s = *dynamic_smem<smem>();

    fill(s, args);
    mbarrier_wait(&s.barrier, 0);
    multiply(s, args);
}

void fence_before_the_copies_land(arguments args)
{
    smem &s = *dynamic_smem<smem>();

    fill(s, args);
    fence_proxy_async();
    mbarrier_wait(&s.barrier, 0);
    multiply(s, args);
}

void without_wgmma_fence(arguments args)
{
    smem &s = *dynamic_smem<smem>();
    float c[4] = {};

    (void)args;
    wgmma<8, true, false>::run(c, wgmma_descriptor(s.tile[0]), wgmma_descriptor(s.tile[1]));
}

void without_wgmma_wait(arguments args)
{
    smem &s = *dynamic_smem<smem>();
    float c[4] = {};

    (void)args;
    wgmma_fence();
    wgmma<8, true, false>::run(c, wgmma_descriptor(s.tile[0]), wgmma_descriptor(s.tile[1]));
    wgmma_commit();
    __syncthreads();
}

void half_a_warp_shuffles(arguments)
{
    if (threadIdx.x < 16)
        (void)__shfl_sync(~0u, 1, 0);
    else
        __syncwarp();
}

void one_thread_misses_the_barrier(arguments)
{
    if (threadIdx.x != 5) __syncthreads();
}

void barriers_of_two_sizes(arguments)
{
    if (threadIdx.x < 64)
        bar_sync<1, 128>();
    else
        bar_sync<1, 64>();
}

void one_arrival_too_few(arguments)
{
    smem &s = *dynamic_smem<smem>();

    make_barrier(s, 2);
    if (threadIdx.x == 0) mbarrier_arrive(&s.barrier);
    mbarrier_wait(&s.barrier, 0);
}

void bytes_that_nobody_brings(arguments)
{
    smem &s = *dynamic_smem<smem>();

    make_barrier(s, 1);
    if (threadIdx.x == 0) mbarrier_arrive_expect_tx(&s.barrier, 16);
    mbarrier_wait(&s.barrier, 0);
}

void barrier_never_initialised(arguments)
{
    mbarrier_arrive(&dynamic_smem<smem>()->barrier);
}

void copies_left_in_flight(arguments args)
{
    cp_async(smem_address(dynamic_smem<smem>()->tile[0]), args.global, 16);
}

void past_the_end(arguments args)
{
    smem &s = *dynamic_smem<smem>();

    make_barrier(s, 128);
    cp_async(smem_address(&s + 1), args.global, 16);
    cp_async_mbarrier_arrive_noinc(&s.barrier);
    mbarrier_wait(&s.barrier, 0);
}

void rows_not_aligned(arguments)
{
    if (threadIdx.x < 32) stmatrix_trans(smem_address(dynamic_smem<smem>()) + 8, 0, 0);
}

void discard_not_aligned(arguments args)
{
    if (threadIdx.x == 0) discard_l2(args.global + 64);
}

void registers_that_nobody_gave_back(arguments)
{
    setmaxnreg_inc<256>();
}

void not_aligned(arguments args)
{
    cp_async(smem_address(dynamic_smem<smem>()), args.global + 8, 16);
}

// Reads its own tile before its copy can be known to have landed; fails with some seeds only, so
// its words are a result's.
void without_waiting_for_copies(arguments args)
{
    smem &s = *dynamic_smem<smem>();

    fill(s, args);
    fence_proxy_async();
    __syncthreads();
    multiply(s, args);
}

// The last warp sees every round if all take turns; nobody waits for it.
// A box of f32, as the kernels copy scales, from its second number on.
void box_not_aligned(arguments args)
{
    smem &s = *dynamic_smem<smem>();
    CUtensorMap map = {};

    map.base = args.global;
    map.rank = 3;
    map.element_bytes = 4;
    for (int d = 0; d < 3; d++) {
        map.extents[d] = 8;
        map.box[d] = d == 0 ? 4 : 1;
    }
    make_barrier(s, 1);
    if (threadIdx.x == 0) cp_async_bulk_tensor_3d<false>(s.tile[0], &map, &s.barrier, 1, 0, 0);
    __syncthreads();
}

void a_warp_that_only_waits(arguments)
{
    smem &s = *dynamic_smem<smem>();

    make_barrier(s, 1);
    for (uint32_t round = 0; round < 4; round++)
        if (threadIdx.x >= 96) {
            mbarrier_wait(&s.barrier, round % 2);
        } else {
            if (threadIdx.x == 0) mbarrier_arrive(&s.barrier);
            bar_sync<1, 96>();
            bar_sync<1, 96>();
        }
}

void nothing(arguments)
{
}

// Every block reads what all have of thread 5.
void cluster_reads(arguments args)
{
    int32_t *own = dynamic_smem<int32_t>(), sum = 0;

    own[threadIdx.x] = static_cast<int32_t>(blockIdx.x * threadIdx.x);
    cluster_arrive();
    cluster_wait();
    for (uint32_t block = 0; block < 4; block++)
        sum += read_of_block(&own[5], block);
    cluster_arrive();
    if (sum != static_cast<int32_t>(blockIdx.x / 4 * 4 * 4 + 6) * 5) args.out[threadIdx.x] = 1.0f;
    cluster_wait();
}

void cluster_not_waited_for(arguments)
{
    cluster_arrive();
}

void cluster_waits_first(arguments)
{
    cluster_wait();
}

void cluster_arrives_twice(arguments)
{
    cluster_arrive();
    cluster_arrive();
}

void block_misses_the_cluster(arguments)
{
    if (blockIdx.x % 4 == 2) return;
    cluster_arrive();
    cluster_wait();
}

void reads_a_block_that_has_ended(arguments args)
{
    int32_t *own = dynamic_smem<int32_t>();

    own[threadIdx.x] = 0;
    cluster_arrive();
    cluster_wait();
    if (blockIdx.x % 4 == 1) return;
    for (uint32_t round = 0; round < 4096; round++) {
        args.out[threadIdx.x] += static_cast<float>(read_of_block(&own[threadIdx.x], 1));
        __syncthreads();
    }
}

void reads_past_the_cluster(arguments args)
{
    args.out[threadIdx.x] = static_cast<float>(read_of_block(dynamic_smem<int32_t>(), 4));
}

void copies_in_a_cluster(arguments args)
{
    cp_async(smem_address(dynamic_smem<smem>()->tile[0]), args.global, 16);
}

struct mistake {
    const char *name;
    void (*kernel)(arguments);
    const char *words; // NULL: none
    bool early;
    unsigned cluster; // blocks; 0: none
};

int failures;

void run_kernel(const mistake &m)
{
    // What is drawn for a block is drawn often.
    const launch_shape shape = {64, 128, sizeof(smem), m.early ? LAUNCH_EARLY : LAUNCH_AFTER,
                                m.cluster};
    arguments args = {};

    if (cudaMalloc(const_cast<unsigned char **>(&args.global), 4096) != cudaSuccess) exit(2);
    if (cudaMalloc(&args.out, 128 * sizeof(float)) != cudaSuccess) exit(2);
    memset(args.out, 0, 128 * sizeof(float));
    memset(const_cast<unsigned char *>(args.global), 0, 4096);
    if (launch(m.kernel, shape, nullptr, args) != cudaSuccess) exit(2);
    for (int i = 0; i < 128; i++)
        if (args.out[i] != 0.0f) exit(3);
    (void)cudaFree(const_cast<unsigned char *>(args.global));
    (void)cudaFree(args.out);
    exit(0);
}

// In a process of its own, whose last words are read.
void try_kernel(const mistake &m)
{
    char said[4096] = {};
    size_t length = 0;
    ssize_t got;
    int ends[2], status = 0;
    pid_t child;
    bool fine;

    fflush(stdout);
    if (pipe(ends) != 0 || (child = fork()) < 0) exit(2);
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        run_kernel(m);
    }
    close(ends[1]);
    while ((got = read(ends[0], said + length, sizeof said - 1 - length)) > 0)
        length += static_cast<size_t>(got);
    close(ends[0]);
    waitpid(child, &status, 0);
    fine = m.words == nullptr ? WIFEXITED(status) && WEXITSTATUS(status) == 0
                              : !(WIFEXITED(status) && WEXITSTATUS(status) == 0) &&
                                    strstr(said, m.words) != nullptr;
    printf("%s %s\n", fine ? "ok  " : "FAIL", m.name);
    if (!fine)
        printf("status %d, wanted \"%s\", said:\n%s\n", status, m.words != nullptr ? m.words : "",
               said);
    failures += !fine;
}

// Sizes that a device does not launch.
void refuses_clusters()
{
    for (unsigned cluster : {0u, 3u, 16u}) {
        cudaLaunchAttribute attribute = {};
        cudaLaunchConfig_t config = {};

        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim = {cluster, 1, 1};
        config.gridDim = dim3(64);
        config.blockDim = dim3(128);
        config.attrs = &attribute;
        config.numAttrs = 1;
        if (cudaLaunchKernelEx(&config, nothing, arguments{}) == cudaErrorInvalidClusterSize)
            continue;
        printf("FAIL a cluster of %u\n", cluster);
        failures++;
    }
}

} // namespace

int main()
{
    const mistake mistakes[] = {
        {"right", right, nullptr, false, 0},
        {"groups of copies", groups_of_copies, nullptr, false, 0},
        {"no proxy fence", without_proxy_fence, "without a proxy fence", false, 0},
        {"proxy fence too early", fence_before_the_copies_land, "without a proxy fence", false, 0},
        {"copies not waited for", without_waiting_for_copies, "", false, 0},
        {"no wgmma fence", without_wgmma_fence, "wgmma without a fence", false, 0},
        {"no wgmma wait", without_wgmma_wait, "wgmma in flight", false, 0},
        {"half a warp", half_a_warp_shuffles, "lanes of the same warp", false, 0},
        {"a thread misses a barrier", one_thread_misses_the_barrier, "deadlock", false, 0},
        {"a barrier of two sizes", barriers_of_two_sizes, "threads here", false, 0},
        {"an arrival too few", one_arrival_too_few, "waits for an mbarrier", false, 0},
        {"bytes that nobody brings", bytes_that_nobody_brings, "deadlock", false, 0},
        {"a barrier never initialised", barrier_never_initialised, "not initialised", false, 0},
        {"copies left in flight", copies_left_in_flight, "copies in flight", false, 0},
        {"past the end", past_the_end, "shared memory ends", false, 0},
        {"not aligned", not_aligned, "not aligned", false, 0},
        {"rows not aligned", rows_not_aligned, "no multiple of 16", false, 0},
        {"a discard not aligned", discard_not_aligned, "no multiple of 128", false, 0},
        {"a box not aligned", box_not_aligned, "a tensor copy from 1,", false, 0},
        {"a warp that only waits", a_warp_that_only_waits, "waits for an mbarrier: threads 96",
         false, 0},
        {"registers", registers_that_nobody_gave_back, "setmaxnreg asks for", false, 0},
        {"launched early, never waits", nothing, "without griddepcontrol.wait", true, 0},
        {"a cluster", cluster_reads, nullptr, false, 4},
        {"a cluster not waited for", cluster_not_waited_for, "without waiting for the cluster",
         false, 4},
        {"a cluster waited for first", cluster_waits_first, "without having arrived", false, 4},
        {"a cluster arrived at twice", cluster_arrives_twice, "twice", false, 4},
        {"a block misses a cluster", block_misses_the_cluster, "waits for the cluster", false, 4},
        {"a block that has ended", reads_a_block_that_has_ended, "which has ended", false, 4},
        {"a block past the cluster", reads_past_the_cluster, "block 4 of a cluster of 4", false, 4},
        {"copies in a cluster", copies_in_a_cluster, "cp.async in a cluster", false, 4},
    };

    for (const mistake &m : mistakes)
        try_kernel(m);
    refuses_clusters();
    return failures != 0;
}
