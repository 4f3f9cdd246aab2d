// A library of NVTX's functions that writes down what is pushed and popped.

#ifndef MOXIE_HOST_TESTS_FAKE_NVTX_H
#define MOXIE_HOST_TESTS_FAKE_NVTX_H

struct fake_nvtx {
    // Ranges that are open.
    int (*depth)(void);
    // The `index`-th thing since the last reset: "+name" when pushed, "-name" when popped; "" past
    // the last.
    const char *(*event)(int index);
    void (*reset)(void);
};

// 1 when the library of that file name that is loaded first is this one.
int fake_nvtx_find(struct fake_nvtx *fake, const char *file);

#endif
