// The driver's memory by handles, of which windows are made: an allocation is a file in memory, a
// reservation a range of addresses that nobody may touch, and a mapping puts the one into the
// other. What another process imports is a descriptor of the file, so that the pages live as long
// as anybody has a handle, a mapping or a descriptor.

#include "host_tests/emulator/device.h"

#include <cuda.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace
{

using emulator::is_device;
using emulator::kDevicesMax;

constexpr size_t kGranularity = size_t{2} << 20;
// An allocation never changes its size, which also tells its descriptor from any other.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;

struct allocation {
    allocation(int fd, size_t bytes, bool shareable) : fd(fd), bytes(bytes), shareable(shareable)
    {
    }
    allocation(const allocation &) = delete;
    allocation &operator=(const allocation &) = delete;
    ~allocation()
    {
        close(fd);
    }

    const int fd;
    const size_t bytes;
    const bool shareable;
};

struct mapping {
    size_t bytes;
    int access[kDevicesMax];
};

// Of the process: threads that are ranks share its addresses.
struct memory {
    std::mutex lock;
    std::map<CUmemGenericAllocationHandle, std::unique_ptr<allocation>> handles;
    std::map<CUdeviceptr, size_t> reservations;
    std::map<CUdeviceptr, mapping> mappings;
    CUmemGenericAllocationHandle last;
};

// Never destroyed: threads may use it until the process ends.
memory &m()
{
    static memory &one = *new memory();

    return one;
}

void *pointer(CUdeviceptr address)
{
    return reinterpret_cast<void *>(address);
}

bool whole(size_t bytes)
{
    return bytes != 0 && bytes % kGranularity == 0;
}

bool is_valid(const CUmemAllocationProp *wanted)
{
    return wanted != nullptr && wanted->type == CU_MEM_ALLOCATION_TYPE_PINNED &&
           wanted->location.type == CU_MEM_LOCATION_TYPE_DEVICE && is_device(wanted->location.id);
}

bool can_share(CUmemAllocationHandleType type)
{
    const char *word = getenv("MOXIE_EMULATOR_SHARING");

    return type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR &&
           (word == nullptr || strcmp(word, "0") != 0);
}

CUmemGenericAllocationHandle keep(int fd, size_t bytes, bool shareable)
{
    std::lock_guard<std::mutex> guard(m().lock);

    m().handles[++m().last] = std::make_unique<allocation>(fd, bytes, shareable);
    return m().last;
}

// Whether the range lies in one reservation, and no mapping in the range.
bool is_free(CUdeviceptr address, size_t bytes)
{
    auto next = m().reservations.upper_bound(address);
    auto above = m().mappings.lower_bound(address);

    if (next == m().reservations.begin()) return false;
    const auto &[base, size] = *std::prev(next);
    if (bytes > size || address - base > size - bytes) return false;
    if (above != m().mappings.end() && above->first < address + bytes) return false;
    return above == m().mappings.begin() ||
           std::prev(above)->first + std::prev(above)->second.bytes <= address;
}

// Whether whole mappings fill the range.
bool is_mapped(CUdeviceptr address, size_t bytes)
{
    CUdeviceptr end = address + bytes;

    while (address < end) {
        auto at = m().mappings.find(address);

        if (at == m().mappings.end()) return false;
        address += at->second.bytes;
    }
    return bytes != 0 && address == end;
}

// The pages are the same for all devices, so that they get the most that one of them has.
bool protect(CUdeviceptr address, const mapping &of)
{
    int most = *std::max_element(of.access, of.access + kDevicesMax);
    int protection = (most & CU_MEM_ACCESS_FLAGS_PROT_READ ? PROT_READ : 0) |
                     (most == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? PROT_WRITE : 0);

    return mprotect(pointer(address), of.bytes, protection) == 0;
}

bool is_valid(const CUmemAccessDesc &access)
{
    return access.location.type == CU_MEM_LOCATION_TYPE_DEVICE && is_device(access.location.id) &&
           (access.flags == CU_MEM_ACCESS_FLAGS_PROT_NONE ||
            access.flags == CU_MEM_ACCESS_FLAGS_PROT_READ ||
            access.flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
}

} // namespace

extern "C" {

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *wanted,
                                       CUmemAllocationGranularity_flags)
{
    if (bytes == nullptr || !is_valid(wanted)) return CUDA_ERROR_INVALID_VALUE;
    *bytes = kGranularity;
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                     const CUmemAllocationProp *wanted, unsigned long long flags)
{
    bool shareable;
    int fd;

    if (handle == nullptr || !is_valid(wanted) || !whole(bytes) || flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    shareable = wanted->requestedHandleTypes != CU_MEM_HANDLE_TYPE_NONE;
    if (shareable && !can_share(wanted->requestedHandleTypes)) return CUDA_ERROR_NOT_SUPPORTED;
    if (bytes > emulator::kDeviceBytes) return CUDA_ERROR_OUT_OF_MEMORY;
    fd = memfd_create("emulator", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) return CUDA_ERROR_OUT_OF_MEMORY;
    if (ftruncate(fd, static_cast<off_t>(bytes)) != 0 || fcntl(fd, F_ADD_SEALS, kSeals) != 0) {
        close(fd);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *handle = keep(fd, bytes, shareable);
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    std::lock_guard<std::mutex> guard(m().lock);

    return m().handles.erase(handle) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags)
{
    std::lock_guard<std::mutex> guard(m().lock);
    auto at = m().handles.find(handle);
    int fd;

    if (shareable == nullptr || at == m().handles.end() || !at->second->shareable ||
        type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    fd = fcntl(at->second->fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return CUDA_ERROR_OUT_OF_MEMORY;
    std::memcpy(shareable, &fd, sizeof fd);
    return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable,
                                        CUmemAllocationHandleType type)
{
    int given = static_cast<int>(reinterpret_cast<intptr_t>(shareable)), fd;
    int seals = fcntl(given, F_GET_SEALS);
    struct stat file;

    if (handle == nullptr || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ||
        fstat(given, &file) != 0 || !whole(static_cast<size_t>(file.st_size)) || seals < 0 ||
        (seals & kSeals) != kSeals)
        return CUDA_ERROR_INVALID_VALUE;
    fd = fcntl(given, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return CUDA_ERROR_OUT_OF_MEMORY;
    *handle = keep(fd, static_cast<size_t>(file.st_size), true);
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr,
                             unsigned long long flags)
{
    size_t align = std::max(alignment, kGranularity), all = bytes + align;
    CUdeviceptr base;
    void *got;

    if (address == nullptr || !whole(bytes) || (alignment & (alignment - 1)) != 0 || all < bytes ||
        flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    got = mmap(nullptr, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    // As much again as the alignment was asked for, of which what lies around the range goes back.
    base = (reinterpret_cast<CUdeviceptr>(got) + align - 1) / align * align;
    if (base != reinterpret_cast<CUdeviceptr>(got))
        munmap(got, base - reinterpret_cast<CUdeviceptr>(got));
    munmap(pointer(base + bytes), reinterpret_cast<CUdeviceptr>(got) + align - base);
    std::lock_guard<std::mutex> guard(m().lock);
    m().reservations[base] = bytes;
    *address = base;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes)
{
    std::lock_guard<std::mutex> guard(m().lock);
    auto at = m().reservations.find(address);

    if (at == m().reservations.end() || at->second != bytes || !is_free(address, bytes))
        return CUDA_ERROR_INVALID_VALUE;
    m().reservations.erase(at);
    munmap(pointer(address), bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    std::lock_guard<std::mutex> guard(m().lock);
    auto at = m().handles.find(handle);

    if (at == m().handles.end() || !whole(bytes) || bytes > at->second->bytes || offset != 0 ||
        address % kGranularity != 0 || !is_free(address, bytes) || flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (mmap(pointer(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, at->second->fd, 0) ==
        MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    m().mappings[address] = {bytes, {}};
    return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes)
{
    std::lock_guard<std::mutex> guard(m().lock);

    if (!is_mapped(address, bytes)) return CUDA_ERROR_INVALID_VALUE;
    if (mmap(pointer(address), bytes, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    m().mappings.erase(m().mappings.find(address), m().mappings.lower_bound(address + bytes));
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access,
                        size_t count)
{
    std::lock_guard<std::mutex> guard(m().lock);

    if (access == nullptr || count == 0 || !is_mapped(address, bytes) ||
        !std::all_of(access, access + count, [](const auto &a) { return is_valid(a); }))
        return CUDA_ERROR_INVALID_VALUE;
    for (auto at = m().mappings.find(address);
         at != m().mappings.end() && at->first < address + bytes; ++at) {
        for (size_t i = 0; i < count; i++)
            at->second.access[access[i].location.id] = access[i].flags;
        if (!protect(at->first, at->second)) return CUDA_ERROR_OUT_OF_MEMORY;
    }
    return CUDA_SUCCESS;
}

} // extern "C"
