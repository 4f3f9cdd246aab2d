// Words of kernels/ll.h that one GPU stores while another looks at them: a value that is not its tag's is half of a word. With one GPU both
// are that one.
//   words_whole [STORES]: of every word, 100 000 unless it says otherwise

#include "host_tests/gpu/twin.cuh"
#include "kernels/cuda/ptx.cuh"

#define BLOCKS  32
#define THREADS 256
#define LIMIT_S 60

struct counts {
    unsigned long long looks, changes, halves, silent;
};

static __device__ uint64_t value_of(uint64_t tag)
{
    return (tag + blockIdx.x * THREADS + threadIdx.x) * 0x9e3779b97f4a7c15u;
}

static __global__ void store(unsigned char *words, uint64_t stores)
{
    unsigned char *word = words + (int64_t)(blockIdx.x * THREADS + threadIdx.x) * LL_WORD_BYTES;

    for (uint64_t tag = 1; tag <= stores; tag++)
        store_tagged(word, {value_of(tag), tag});
}

static __global__ void look(const unsigned char *words, uint64_t stores, counts *seen)
{
    const unsigned char *word = words + (int64_t)(blockIdx.x * THREADS + threadIdx.x) * LL_WORD_BYTES;
    const uint64_t until = global_timer_ns() + LIMIT_S * 1000000000ull;
    counts own = {};

    for (uint64_t before = 0; before < stores;) {
        const tagged now = load_tagged(word);

        own.looks++;
        own.changes += now.tag != before;
        own.halves += now.tag != 0 && now.value != value_of(now.tag);
        before = now.tag;
        if (global_timer_ns() >= until) {
            own.silent++;
            break;
        }
    }
    atomicAdd(&seen->looks, own.looks);
    atomicAdd(&seen->changes, own.changes);
    atomicAdd(&seen->halves, own.halves);
    atomicAdd(&seen->silent, own.silent);
}

int main(int argc, char **argv)
{
    const uint64_t stores = argc > 1 ? strtoull(argv[1], nullptr, 10) : 100000;
    const size_t bytes = (size_t)BLOCKS * THREADS * LL_WORD_BYTES;
    cudaStream_t writing, looking;
    unsigned char *words;
    counts *seen, all;
    int devices = 0, reaches = 0;

    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        printf("no GPU\n");
        return 77;
    }
    if (devices > 1) CHECK(cudaDeviceCanAccessPeer(&reaches, 1, 0));
    CHECK(cudaSetDevice(0));
    CHECK(cudaMalloc((void **)&words, bytes));
    CHECK(cudaMalloc((void **)&seen, sizeof *seen));
    CHECK(cudaMemset(words, 0, bytes));
    CHECK(cudaMemset(seen, 0, sizeof *seen));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaStreamCreateWithFlags(&looking, cudaStreamNonBlocking));
    look<<<BLOCKS, THREADS, 0, looking>>>(words, stores, seen);
    CHECK(cudaGetLastError());
    if (reaches) {
        CHECK(cudaSetDevice(1));
        CHECK(cudaDeviceEnablePeerAccess(0, 0));
    }
    CHECK(cudaStreamCreateWithFlags(&writing, cudaStreamNonBlocking));
    store<<<BLOCKS, THREADS, 0, writing>>>(words, stores);
    CHECK(cudaGetLastError());
    CHECK(cudaStreamSynchronize(writing));
    CHECK(cudaStreamSynchronize(looking));
    CHECK(cudaMemcpy(&all, seen, sizeof all, cudaMemcpyDeviceToHost));
    printf("%s: %llu looks saw %llu of %llu stores, %llu halves; %llu words whose last store was not seen\n", reaches ? "from GPU 1 to GPU 0" : "on one GPU",
           all.looks, all.changes, (unsigned long long)stores * BLOCKS * THREADS, all.halves, all.silent);
    return all.halves != 0 || all.silent != 0 || all.changes == 0;
}
