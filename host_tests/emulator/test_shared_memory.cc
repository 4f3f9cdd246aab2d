// Memory by handles: what a program may do with it, and that everything else is refused.

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

namespace
{

constexpr size_t kUnit = size_t{2} << 20;

int failures;

void check(bool fine, const char *what)
{
    printf("%s %s\n", fine ? "ok  " : "FAIL", what);
    failures += !fine;
}

void refused(CUresult answer, const char *what)
{
    check(answer == CUDA_ERROR_INVALID_VALUE, what);
}

void must(CUresult answer)
{
    if (answer == CUDA_SUCCESS) return;
    printf("FAIL: the driver answers %d\n", answer);
    exit(2);
}

CUmemAllocationProp on_device(int ordinal, CUmemAllocationHandleType type)
{
    CUmemAllocationProp wanted = {};

    wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.location = {CU_MEM_LOCATION_TYPE_DEVICE, ordinal};
    wanted.requestedHandleTypes = type;
    return wanted;
}

CUmemGenericAllocationHandle create(size_t bytes)
{
    CUmemAllocationProp wanted = on_device(0, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    CUmemGenericAllocationHandle handle;

    must(cuMemCreate(&handle, bytes, &wanted, 0));
    return handle;
}

CUdeviceptr reserve(size_t bytes)
{
    CUdeviceptr address;

    must(cuMemAddressReserve(&address, bytes, 0, 0, 0));
    return address;
}

CUresult allow(CUdeviceptr address, size_t bytes, CUmemAccess_flags flags, int device = 0)
{
    CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, device}, flags};

    return cuMemSetAccess(address, bytes, &access, 1);
}

volatile int *words(CUdeviceptr address)
{
    return reinterpret_cast<volatile int *>(address);
}

// Whether a process that reads or writes there lives on.
bool can(bool write, CUdeviceptr address)
{
    int status = 0;
    pid_t child;

    fflush(stdout);
    child = fork();
    if (child < 0) exit(2);
    if (child == 0) {
        (void)freopen("/dev/null", "w", stderr);
        if (write)
            *words(address) = 1;
        else
            (void)*words(address);
        _exit(0);
    }
    waitpid(child, &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

int open_descriptors()
{
    DIR *all = opendir("/proc/self/fd");
    int count = 0;

    if (all == nullptr) exit(2);
    while (readdir(all) != nullptr)
        count++;
    closedir(all);
    return count;
}

int export_from(CUmemGenericAllocationHandle handle)
{
    int fd = -1;

    must(cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    return fd;
}

CUresult import_from(int fd, CUmemGenericAllocationHandle *handle)
{
    return cuMemImportFromShareableHandle(handle, reinterpret_cast<void *>(intptr_t{fd}),
                                          CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
}

// The pages live while anything refers to them: here, each way in turn is the last.
void try_lifetime()
{
    int before = open_descriptors(), fd;
    CUmemGenericAllocationHandle handle = create(kUnit);
    CUdeviceptr address = reserve(kUnit);

    must(cuMemMap(address, kUnit, 0, handle, 0));
    must(allow(address, kUnit, CU_MEM_ACCESS_FLAGS_PROT_READWRITE));
    *words(address) = 7;
    fd = export_from(handle);
    must(cuMemRelease(handle));
    check(*words(address) == 7, "memory lives by its mapping");
    must(cuMemUnmap(address, kUnit));
    check(!can(false, address), "nothing is there once unmapped");
    must(import_from(fd, &handle));
    close(fd);
    must(cuMemMap(address, kUnit, 0, handle, 0));
    must(allow(address, kUnit, CU_MEM_ACCESS_FLAGS_PROT_READ));
    check(*words(address) == 7, "memory lives by its descriptor");
    must(cuMemUnmap(address, kUnit));
    must(cuMemRelease(handle));
    must(cuMemAddressFree(address, kUnit));
    check(open_descriptors() == before, "no descriptor is left");
}

void try_access()
{
    CUmemGenericAllocationHandle handle = create(kUnit);
    CUdeviceptr address = reserve(2 * kUnit), again = address + kUnit;

    must(cuMemMap(address, kUnit, 0, handle, 0));
    must(cuMemMap(again, kUnit, 0, handle, 0));
    check(!can(false, address), "no access before it is given");
    must(allow(address, kUnit, CU_MEM_ACCESS_FLAGS_PROT_READ));
    check(can(false, address) && !can(true, address), "access to read");
    check(!can(false, again), "access to one mapping only");
    must(allow(address, 2 * kUnit, CU_MEM_ACCESS_FLAGS_PROT_READWRITE));
    check(can(true, address) && *words(again) == 1, "two mappings of the same memory");
    must(allow(address, kUnit, CU_MEM_ACCESS_FLAGS_PROT_READ, 1));
    check(can(true, address), "another device's access takes none away");
    must(allow(address, kUnit, CU_MEM_ACCESS_FLAGS_PROT_NONE, 1));
    must(allow(address, kUnit, CU_MEM_ACCESS_FLAGS_PROT_NONE));
    check(!can(false, address), "access is taken back");

    refused(allow(address, kUnit / 2, CU_MEM_ACCESS_FLAGS_PROT_READ), "access to half a mapping");
    refused(allow(address, 3 * kUnit, CU_MEM_ACCESS_FLAGS_PROT_READ), "access past the mappings");
    refused(allow(address, kUnit, CU_MEM_ACCESS_FLAGS_PROT_READ, 2), "access of no device");
    refused(allow(address, kUnit, static_cast<CUmemAccess_flags>(2)), "access that is none");
    refused(cuMemSetAccess(address, kUnit, nullptr, 0), "access of nobody");
    must(cuMemUnmap(address, 2 * kUnit));
    refused(allow(address, kUnit, CU_MEM_ACCESS_FLAGS_PROT_READ), "access to nothing");
    must(cuMemAddressFree(address, 2 * kUnit));
    must(cuMemRelease(handle));
}

void try_creations()
{
    CUmemAllocationProp wanted = on_device(1, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    CUmemAllocationProp nowhere = on_device(2, CU_MEM_HANDLE_TYPE_NONE);
    CUmemAllocationProp fabric = on_device(0, CU_MEM_HANDLE_TYPE_FABRIC);
    CUmemGenericAllocationHandle handle;
    size_t unit = 0;

    must(cuMemGetAllocationGranularity(&unit, &wanted, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    check(unit == kUnit, "a granularity of 2 MiB");
    must(cuMemCreate(&handle, kUnit, &wanted, 0));
    must(cuMemRelease(handle));
    refused(cuMemRelease(handle), "a handle released twice");
    refused(cuMemCreate(&handle, kUnit + 4096, &wanted, 0), "a size that is no multiple");
    refused(cuMemCreate(&handle, 0, &wanted, 0), "no size");
    refused(cuMemCreate(&handle, kUnit, &nowhere, 0), "memory of no device");
    refused(cuMemGetAllocationGranularity(&unit, &nowhere, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
            "granularity of no device");
    check(cuMemCreate(&handle, size_t{1} << 40, &wanted, 0) == CUDA_ERROR_OUT_OF_MEMORY,
          "more than the device has");
    check(cuMemCreate(&handle, kUnit, &fabric, 0) == CUDA_ERROR_NOT_SUPPORTED,
          "sharing that the device does not know");
    setenv("MOXIE_EMULATOR_SHARING", "0", 1);
    check(cuMemCreate(&handle, kUnit, &wanted, 0) == CUDA_ERROR_NOT_SUPPORTED,
          "sharing is switched off");
    wanted.requestedHandleTypes = CU_MEM_HANDLE_TYPE_NONE;
    must(cuMemCreate(&handle, kUnit, &wanted, 0));
    must(cuMemRelease(handle));
    unsetenv("MOXIE_EMULATOR_SHARING");
}

int file_of(size_t bytes, bool sealed)
{
    int fd = memfd_create("a file", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) exit(2);
    if (sealed && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) exit(2);
    return fd;
}

void try_handles()
{
    CUmemAllocationProp own = on_device(0, CU_MEM_HANDLE_TYPE_NONE);
    CUmemGenericAllocationHandle handle;
    int fd = -1, other = file_of(kUnit, false), small = file_of(kUnit + 4096, true);

    must(cuMemCreate(&handle, kUnit, &own, 0));
    refused(cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
            "an export of memory that is not for sharing");
    must(cuMemRelease(handle));
    refused(cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
            "an export of a handle released");
    refused(import_from(-1, &handle), "an import of no descriptor");
    refused(import_from(other, &handle), "an import of a file");
    refused(import_from(small, &handle), "an import of a size that is no multiple");
    close(small);
    close(other);
    refused(import_from(other, &handle), "an import of a descriptor closed");
}

void try_mappings()
{
    CUmemGenericAllocationHandle handle = create(2 * kUnit);
    CUdeviceptr address = reserve(4 * kUnit), unused;

    check(address % kUnit == 0, "a reservation is aligned");
    must(cuMemAddressReserve(&unused, kUnit, 64 * kUnit, 0, 0));
    check(unused % (64 * kUnit) == 0, "a reservation is aligned as asked");
    must(cuMemAddressFree(unused, kUnit));
    refused(cuMemAddressReserve(&unused, kUnit / 2, 0, 0, 0), "half a unit reserved");
    refused(cuMemAddressReserve(&unused, kUnit, 3 * kUnit, 0, 0), "an alignment that is none");
    refused(cuMemMap(unused, kUnit, 0, handle, 0), "a mapping outside any reservation");
    refused(cuMemMap(address + 3 * kUnit, 2 * kUnit, 0, handle, 0), "a mapping past the end");
    refused(cuMemMap(address, 4 * kUnit, 0, handle, 0), "a mapping of more than there is");
    refused(cuMemMap(address, kUnit, kUnit, handle, 0), "a mapping from an offset");
    refused(cuMemMap(address + 4096, kUnit, 0, handle, 0), "a mapping between units");
    refused(cuMemMap(address, 2 * kUnit, 0, handle + 100, 0), "a mapping of no handle");
    must(cuMemMap(address + kUnit, 2 * kUnit, 0, handle, 0));
    refused(cuMemMap(address, 2 * kUnit, 0, handle, 0), "a mapping over the next one's begin");
    refused(cuMemMap(address + 2 * kUnit, 2 * kUnit, 0, handle, 0), "a mapping over another's end");
    refused(cuMemUnmap(address + kUnit, kUnit), "the first half of a mapping unmapped");
    refused(cuMemUnmap(address + 2 * kUnit, kUnit), "the second half of a mapping unmapped");
    refused(cuMemUnmap(address, 3 * kUnit), "a gap unmapped");
    refused(cuMemUnmap(address + kUnit, 0), "nothing unmapped");
    refused(cuMemAddressFree(address, 4 * kUnit), "a reservation freed with a mapping in it");
    must(cuMemUnmap(address + kUnit, 2 * kUnit));
    refused(cuMemUnmap(address + kUnit, 2 * kUnit), "a mapping unmapped twice");
    refused(cuMemAddressFree(address, 2 * kUnit), "half a reservation freed");
    must(cuMemAddressFree(address, 4 * kUnit));
    refused(cuMemAddressFree(address, 4 * kUnit), "a reservation freed twice");
    must(cuMemRelease(handle));
}

void try_names()
{
    static const char *const names[] = {"cuMemGetAllocationGranularity",
                                        "cuMemCreate",
                                        "cuMemRelease",
                                        "cuMemExportToShareableHandle",
                                        "cuMemImportFromShareableHandle",
                                        "cuMemAddressReserve",
                                        "cuMemAddressFree",
                                        "cuMemMap",
                                        "cuMemUnmap",
                                        "cuMemSetAccess"};
    cudaDriverEntryPointQueryResult found;
    void *function;
    bool all = true;

    for (const char *name : names)
        all = all &&
              cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found) ==
                  cudaSuccess &&
              found == cudaDriverEntryPointSuccess && function != nullptr;
    check(all && function == reinterpret_cast<void *>(cuMemSetAccess), "found by name");
    (void)cudaGetDriverEntryPointByVersion("cuNothing", &function, 12000, cudaEnableDefault,
                                           &found);
    check(found == cudaDriverEntryPointSymbolNotFound, "a name that is none");
}

} // namespace

int main()
{
    setenv("MOXIE_EMULATOR_DEVICES", "2", 1);
    try_lifetime();
    try_access();
    try_creations();
    try_handles();
    try_mappings();
    try_names();
    return failures != 0;
}
