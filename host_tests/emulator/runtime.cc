// Memory, streams and graphs. Streams run at once, until something on one may have to wait for
// another rank; while one is captured, what is launched on it is kept instead.

#include "host_tests/emulator/block.h"
#include "host_tests/emulator/device.h"
#include "host_tests/emulator/refuse.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

struct work_item {
    std::function<void()> work;
    bool waits;
};
typedef std::vector<work_item> work_list;

namespace
{

// A thread that runs what is pushed, in order.
class worker
{
  public:
    worker() : owner(std::this_thread::get_id()), thread([this] { run(); })
    {
    }
    worker(const worker &) = delete;
    worker &operator=(const worker &) = delete;
    ~worker()
    {
        drain();
        {
            std::lock_guard<std::mutex> hold(lock);

            ended = true;
        }
        changed.notify_all();
        thread.join();
    }
    void push(std::function<void()> work)
    {
        {
            std::lock_guard<std::mutex> hold(lock);

            queue.push_back(std::move(work));
        }
        changed.notify_all();
    }
    void drain()
    {
        std::unique_lock<std::mutex> hold(lock);

        changed.wait(hold, [this] { return queue.empty(); });
    }

    const std::thread::id owner; // whose device runs it

  private:
    void run()
    {
        std::unique_lock<std::mutex> hold(lock);

        for (;;) {
            changed.wait(hold, [this] { return ended || !queue.empty(); });
            if (queue.empty()) return;
            // Others push behind it meanwhile, which leaves it where it is.
            std::function<void()> &first = queue.front();

            hold.unlock();
            first();
            hold.lock();
            queue.pop_front();
            changed.notify_all();
        }
    }

    std::mutex lock;
    std::condition_variable changed;
    std::deque<std::function<void()>> queue; // the first is the one that runs
    bool ended = false;
    std::thread thread; // last: it uses the others
};

// All there are, never freed: what still waits at the end of the program must not look at nothing.
struct worker_list {
    std::mutex lock;
    std::vector<std::shared_ptr<worker>> all;
};

worker_list &workers()
{
    static worker_list *list = new worker_list;

    return *list;
}

} // namespace

struct CUstream_st {
    work_list *captured = nullptr;  // NULL: not capturing
    bool spoilt = false;            // what is captured is invalid
    std::shared_ptr<worker> behind; // NULL: nothing on it has waited
};
struct CUevent_st {
    std::chrono::steady_clock::time_point when;
};
struct CUgraph_st {
    work_list work;
};
struct CUgraphExec_st {
    work_list work;
};

namespace
{

thread_local int captures;      // of this thread's, under way
thread_local int launches_left; // before those that are refused
thread_local cudaError_t refusal;
thread_local int device_in_use = emulator::kNoDevice;
thread_local CUstream_st *own_stream; // what a null stream is, once something on it has waited

void make_worker(CUstream_st *stream)
{
    worker_list &list = workers();
    std::lock_guard<std::mutex> hold(list.lock);

    stream->behind = std::make_shared<worker>();
    list.all.push_back(stream->behind);
}

void end_worker(CUstream_st *stream)
{
    worker_list &list = workers();
    std::shared_ptr<worker> ended = std::move(stream->behind);

    if (ended == nullptr) return;
    ended->drain();
    std::lock_guard<std::mutex> hold(list.lock);
    list.all.erase(std::find(list.all.begin(), list.all.end(), ended));
}

// A thread's own stream ends with it.
struct own_stream_end {
    ~own_stream_end()
    {
        if (own_stream != nullptr) end_worker(own_stream);
        delete own_stream;
    }
};

cudaError_t enqueue(cudaStream_t stream, work_item item)
{
    if (stream == nullptr && item.waits && own_stream == nullptr) {
        static thread_local own_stream_end end;

        (void)end;
        own_stream = new CUstream_st();
    }
    if (stream == nullptr) stream = own_stream;
    if (stream != nullptr && stream->captured != nullptr) {
        stream->captured->push_back(std::move(item));
        return cudaSuccess;
    }
    if (item.waits && stream->behind == nullptr) make_worker(stream);
    if (stream != nullptr && stream->behind != nullptr)
        stream->behind->push(std::move(item.work));
    else
        item.work();
    return cudaSuccess;
}

cudaError_t enqueue(cudaStream_t stream, std::function<void()> work)
{
    return enqueue(stream, work_item{std::move(work), false});
}

void drain(const CUstream_st *stream)
{
    if (stream != nullptr && stream->behind != nullptr) stream->behind->drain();
}

// What this thread's streams have under way.
void drain_all()
{
    std::vector<std::shared_ptr<worker>> mine;
    worker_list &list = workers();

    {
        std::lock_guard<std::mutex> hold(list.lock);

        for (const auto &each : list.all)
            if (each->owner == std::this_thread::get_id()) mine.push_back(each);
    }
    for (const auto &each : mine)
        each->drain();
}

cudaError_t refuse(cudaStream_t stream)
{
    if (stream != nullptr && stream->captured != nullptr &&
        refusal >= cudaErrorStreamCaptureUnsupported && refusal <= cudaErrorCapturedEvent)
        stream->spoilt = true;
    return refusal;
}

// What must not be called while the thread captures.
cudaError_t check_eager()
{
    // Whatever else it does, a call of the runtime's makes the first device's context.
    if (device_in_use == emulator::kNoDevice) device_in_use = 0;
    return captures == 0 ? cudaSuccess : cudaErrorStreamCaptureUnsupported;
}

cudaError_t allocate(void **memory, size_t bytes)
{
    cudaError_t st = check_eager();

    *memory = nullptr;
    if (st != cudaSuccess || bytes == 0) return st;
    return posix_memalign(memory, 256, bytes) == 0 ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t release(void *memory)
{
    cudaError_t st = check_eager();

    if (st == cudaSuccess) free(memory);
    return st;
}

// "9.0", or what MOXIE_EMULATOR_CAPABILITY says: of each device, the last of all that follow.
int capability(int device, int part)
{
    const char *words = getenv("MOXIE_EMULATOR_CAPABILITY");
    const char *word = words != nullptr ? words : "9.0";
    char *rest = nullptr;
    long major;

    for (const char *next = strchr(word, ','); device > 0 && next != nullptr; device--) {
        word = next + 1;
        next = strchr(word, ',');
    }
    major = strtol(word, &rest, 10);
    return static_cast<int>(part == 0 ? major : strtol(rest + 1, nullptr, 10));
}

CUresult encode_tiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *base,
                      const cuuint64_t *extents, const cuuint64_t *strides, const cuuint32_t *box,
                      const cuuint32_t *steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                      CUtensorMapL2promotion, CUtensorMapFloatOOBfill)
{
    static const uint16_t spans[4] = {0, 32, 64, 128};
    CUtensorMap made = {};

    if (rank < 1 || rank > 5 || reinterpret_cast<uintptr_t>(base) % 16 != 0)
        return CUDA_ERROR_INVALID_VALUE;
    made.base = static_cast<const unsigned char *>(base);
    made.rank = static_cast<uint16_t>(rank);
    made.element_bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT8     ? 1
                         : type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4
                                                                   : 2;
    made.swizzle_bytes = spans[swizzle];
    for (cuuint32_t d = 0; d < rank; d++) {
        if (extents[d] == 0 || extents[d] > uint64_t{1} << 32 || box[d] == 0 || box[d] > 256 ||
            steps[d] != 1)
            return CUDA_ERROR_INVALID_VALUE;
        if (d > 0 && (strides[d - 1] % 16 != 0 || strides[d - 1] >= uint64_t{1} << 40))
            return CUDA_ERROR_INVALID_VALUE;
        made.extents[d] = extents[d];
        made.box[d] = static_cast<uint16_t>(box[d]);
        if (d > 0) made.strides[d - 1] = strides[d - 1];
    }
    if (made.box[0] * made.element_bytes % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
    // A narrower box is padded to the span on the device; the kernels have none.
    if (made.swizzle_bytes != 0 && made.box[0] * made.element_bytes != made.swizzle_bytes)
        return CUDA_ERROR_INVALID_VALUE;
    *map = made;
    return CUDA_SUCCESS;
}

// The driver's functions that the library asks for by name.
extern "C" int cuCtxGetCurrent(void **), cuCtxSetCurrent(void *);
extern "C" int cuDevicePrimaryCtxRetain(void **, int), cuDevicePrimaryCtxRelease_v2(int);

struct entry {
    const char *name;
    void *function;
};

#define ENTRY(name)                                                                                \
    {                                                                                              \
#name, reinterpret_cast < void *>(name)                                                    \
    }
const entry entries[] = {
    {"cuTensorMapEncodeTiled", reinterpret_cast<void *>(encode_tiled)},
    ENTRY(cuMemGetAllocationGranularity),
    ENTRY(cuMemCreate),
    ENTRY(cuMemRelease),
    ENTRY(cuMemExportToShareableHandle),
    ENTRY(cuMemImportFromShareableHandle),
    ENTRY(cuMemAddressReserve),
    ENTRY(cuMemAddressFree),
    ENTRY(cuMemMap),
    ENTRY(cuMemUnmap),
    ENTRY(cuMemSetAccess),
    ENTRY(cuCtxGetCurrent),
    ENTRY(cuCtxSetCurrent),
    ENTRY(cuDevicePrimaryCtxRetain),
    {"cuDevicePrimaryCtxRelease", reinterpret_cast<void *>(cuDevicePrimaryCtxRelease_v2)},
};

} // namespace

cudaError_t emulator::enqueue_launch(cudaStream_t stream, const launch &launch)
{
    if (refusal != cudaSuccess && launches_left-- <= 0) return refuse(stream);
    if (launch.grid.x == 0 || launch.grid.y != 1 || launch.grid.z != 1 || launch.block.x == 0 ||
        launch.block.x > kThreadsMax || launch.block.y != 1 || launch.block.z != 1)
        return cudaErrorInvalidConfiguration;
    if (launch.cluster == 0 || launch.cluster > kClusterMax || launch.grid.x % launch.cluster != 0)
        return cudaErrorInvalidClusterSize;
    return enqueue(stream, [launch] { run(launch); });
}

cudaError_t emulator::enqueue_wait(cudaStream_t stream, std::function<void()> work)
{
    return enqueue(stream, work_item{std::move(work), true});
}

int emulator::current_device()
{
    return device_in_use;
}

void emulator::set_current_device(int device)
{
    device_in_use = device;
}

int emulator::device_count()
{
    const char *word = getenv("MOXIE_EMULATOR_DEVICES");
    long count = word != nullptr ? strtol(word, nullptr, 10) : 1;

    return static_cast<int>(std::clamp(count, 1l, static_cast<long>(kDevicesMax)));
}

extern "C" {

void emulator_refuse_launches(int after, int code)
{
    launches_left = after;
    refusal = static_cast<cudaError_t>(code);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult *found)
{
    *function = nullptr;
    *found = cudaDriverEntryPointSymbolNotFound;
    for (const entry &e : entries)
        if (strcmp(name, e.name) == 0) {
            *function = e.function;
            *found = cudaDriverEntryPointSuccess;
        }
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    if (!emulator::is_device(device)) return cudaErrorInvalidDevice;
    device_in_use = device;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
    *device = std::max(device_in_use, 0);
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = emulator::device_count();
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device)
{
    if (!emulator::is_device(device)) return cudaErrorInvalidDevice;
    *value = 0;
    // Few, so that a small case already gives each block several tiles.
    if (attribute == cudaDevAttrMultiProcessorCount) *value = 3;
    if (attribute == cudaDevAttrMemoryClockRate) *value = 2619000; // an H100's
    if (attribute == cudaDevAttrGlobalMemoryBusWidth) *value = 5120;
    if (attribute == cudaDevAttrComputeCapabilityMajor) *value = capability(device, 0);
    if (attribute == cudaDevAttrComputeCapabilityMinor) *value = capability(device, 1);
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize()
{
    cudaError_t st = check_eager();

    if (st == cudaSuccess) drain_all();
    return st;
}

cudaError_t cudaGetLastError()
{
    return cudaSuccess;
}

const char *cudaGetErrorString(cudaError_t error)
{
    switch (error) {
    case cudaSuccess:
        return "no error";
    case cudaErrorInvalidValue:
        return "invalid argument";
    case cudaErrorMemoryAllocation:
        return "out of memory";
    case cudaErrorInvalidDevice:
        return "invalid device ordinal";
    case cudaErrorDeviceUninitialized:
        return "invalid device context";
    case cudaErrorNotSupported:
        return "operation not supported";
    case cudaErrorStreamCaptureUnsupported:
        return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
        return "operation failed due to a previous error during capture";
    default:
        return "an error of the emulator";
    }
}

cudaError_t cudaMalloc(void **memory, size_t bytes)
{
    return allocate(memory, bytes);
}

cudaError_t cudaFree(void *memory)
{
    return release(memory);
}

cudaError_t cudaMallocHost(void **memory, size_t bytes)
{
    return allocate(memory, bytes);
}

cudaError_t cudaFreeHost(void *memory)
{
    return release(memory);
}

cudaError_t cudaMemset(void *memory, int value, size_t bytes)
{
    drain(own_stream);
    memset(memory, value, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream)
{
    return enqueue(stream, [=] { memset(memory, value, bytes); });
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind)
{
    drain(own_stream);
    if (bytes != 0) memcpy(to, from, bytes);
    return check_eager();
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream)
{
    return enqueue(stream, [=] { memcpy(to, from, bytes); });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned)
{
    *stream = new CUstream_st();
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    end_worker(stream);
    delete stream;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    cudaError_t st = check_eager();

    if (st == cudaSuccess) drain(stream != nullptr ? stream : own_stream);
    return st;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode)
{
    if (stream == nullptr || stream->captured != nullptr) return cudaErrorInvalidValue;
    stream->captured = new work_list();
    captures++;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status)
{
    if (stream == nullptr || stream->captured == nullptr)
        *status = cudaStreamCaptureStatusNone;
    else
        *status =
            stream->spoilt ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    const bool spoilt = stream != nullptr && stream->spoilt;

    if (stream == nullptr || stream->captured == nullptr) return cudaErrorInvalidValue;
    *graph = spoilt ? nullptr : new CUgraph_st{std::move(*stream->captured)};
    delete stream->captured;
    stream->captured = nullptr;
    stream->spoilt = false;
    captures--;
    return spoilt ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long)
{
    *exec = new CUgraphExec_st{graph->work};
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    for (const auto &item : exec->work)
        (void)enqueue(stream, item);
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    delete exec;
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    delete graph;
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event)
{
    *event = new CUevent_st();
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    delete event;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    return enqueue(stream, [event] { event->when = std::chrono::steady_clock::now(); });
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end)
{
    *ms = std::chrono::duration<float, std::milli>(end->when - begin->when).count();
    return cudaSuccess;
}

} // extern "C"
