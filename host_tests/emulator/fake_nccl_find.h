// What the library finds when it looks for NCCL: the fake one (fake_nccl.cc), part of it, or
// nothing. For programs linked with --wrap=dlopen and --wrap=dlsym.

#ifndef MOXIE_EMULATOR_FAKE_NCCL_FIND_H
#define MOXIE_EMULATOR_FAKE_NCCL_FIND_H

// 1: there is no library. Set before ranks run, as the next.
extern int nccl_missing;
// A function that the library does not have; NULL: none.
extern const char *nccl_lacks;
// How often a library was loaded that the process did not have yet.
extern int nccl_loads;

#endif
