// Loading a libmoxie: two files that an engine copies in beside abi.h (loader.h, loader.c). They
// need libc and libdl only, and compile as C99 and as C++11.
//
//     moxie_library library;
//     if (moxie_load("/opt/lib/libmoxie.so", "my-engine 1.2 (abc123)", &library, &error) !=
//     MOXIE_OK)
//         say(error.text);
//     library.api->open(...);
//     ...
//     moxie_unload(&library);  // after the last instance is closed

#ifndef MOXIE_LOADER_H
#define MOXIE_LOADER_H

#include "abi.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct moxie_library {
    void *handle;         // of dlopen
    const moxie_api *api; // valid until moxie_unload
} moxie_library;

// Opens the file, agrees on an ABI version, checks that the table is complete, and compares the
// layout that the library reports with the abi.h this file was compiled with, field by field. On
// failure *library is all NULL, nothing stays to be unloaded, and the text says which path, what
// was seen and what to do. `host_build` names the host in refusals. `path` without a slash is
// searched for by the system.
//
// The code of a libmoxie stays mapped until the process ends, refused or unloaded as it may be: its
// path gives that code again, whatever file is there since, and a file that is overwritten in place
// changes under it. A newer library takes another path or a new process.
int32_t moxie_load(const char *path, const char *host_build, moxie_library *library,
                   moxie_error *error);

// NULL and an empty library are no-ops. The code stays mapped, as above.
void moxie_unload(moxie_library *library);

// For register_runner and register_dispatcher: every slot and pointer of the table is there.
int32_t moxie_verify_runner(const moxie_runner_info *runner, moxie_error *error);
int32_t moxie_verify_dispatcher(const moxie_dispatcher_info *dispatcher, moxie_error *error);

#ifdef __cplusplus
}
#endif

#endif // MOXIE_LOADER_H
