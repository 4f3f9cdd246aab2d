#include "host_tests/emulator/fake_nccl_find.h"

#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

int nccl_missing;
const char *nccl_lacks;
int nccl_loads;

void *__real_dlopen(const char *name, int flags);
void *__real_dlsym(void *handle, const char *name);
void *__wrap_dlopen(const char *name, int flags);
void *__wrap_dlsym(void *handle, const char *name);

void *__wrap_dlopen(const char *name, int flags)
{
    if (name == NULL || strcmp(name, "libnccl.so.2") != 0) return __real_dlopen(name, flags);
    if (nccl_missing) return NULL;
    if ((flags & RTLD_NOLOAD) == 0) (void)__atomic_add_fetch(&nccl_loads, 1, __ATOMIC_RELAXED);
    return __real_dlopen(FAKE_NCCL, flags);
}

void *__wrap_dlsym(void *handle, const char *name)
{
    if (nccl_lacks != NULL && strcmp(name, nccl_lacks) == 0) return NULL;
    return __real_dlsym(handle, name);
}
