// What every transport needs: the clock of deadlines, and checks of what it is asked for.

#include "plugin/transport.h"

#include <errno.h>
#include <inttypes.h>
#include <time.h>

int64_t clock_ns(void)
{
    struct timespec now;

    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

void clock_pause(void)
{
    const struct timespec pause = {.tv_nsec = 200000};

    (void)nanosleep(&pause, NULL);
}

int32_t transport_check_bootstrap(const struct bootstrap *bootstrap, moxie_error *error)
{
    if (bootstrap->ranks < 1 || bootstrap->ranks > MOXIE_RANKS_MAX)
        return fail_with(error, MOXIE_E_INVALID, "%d ranks; 1 to %d can be joined",
                         bootstrap->ranks, MOXIE_RANKS_MAX);
    if (bootstrap->rank < 0 || bootstrap->rank >= bootstrap->ranks)
        return fail_with(error, MOXIE_E_INVALID, "rank %d of %d ranks; it must be 0 to %d",
                         bootstrap->rank, bootstrap->ranks, bootstrap->ranks - 1);
    if (bootstrap->ranks > 1 && bootstrap->all_gather == NULL)
        return fail_with(error, MOXIE_E_INVALID, "%d ranks without the host's all_gather; set it",
                         bootstrap->ranks);
    return MOXIE_OK;
}

int32_t transport_window_bytes(uint64_t bytes, int32_t ranks, uint64_t *bytes_mapped,
                               moxie_error *error)
{
    int64_t control_bytes = TRANSPORT_CONTROL_BYTES(ranks);
    int64_t mapped;

    if (bytes < (uint64_t)control_bytes)
        return fail_with(error, MOXIE_E_INVALID,
                         "a window of %" PRIu64
                         " bytes; the control words of %d ranks take %" PRId64,
                         bytes, ranks, control_bytes);
    if (bytes > INT64_MAX || !size_align((int64_t)bytes, TRANSPORT_PAGE_BYTES, &mapped))
        return fail_with(error, MOXIE_E_MEMORY,
                         "a window of %" PRIu64 " bytes is more than can be addressed", bytes);
    *bytes_mapped = (uint64_t)mapped;
    return MOXIE_OK;
}

const char *transport_remedy(int os_error, const char *otherwise)
{
    if (os_error == EMFILE) return "raise this process's limit of open files (ulimit -n)";
    if (os_error == ENFILE) return "raise this machine's limit of open files (fs.file-max)";
    return otherwise;
}
