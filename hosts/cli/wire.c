// Whole messages over a socket, with a deadline.

#include "hosts/cli/wire.h"

#include "hosts/cli/progress.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>

// Waits until the socket is ready for `events`.
static int await(int descriptor, short events, int64_t deadline_ns, int stop)
{
    for (;;) {
        struct pollfd entries[] = {{.fd = descriptor, .events = events},
                                   {.fd = stop, .events = POLLIN}};
        int64_t left_ms = (deadline_ns - clock_ns()) / 1000000;
        int ready = 0;

        if (left_ms <= 0) return ETIMEDOUT;
        ready = poll(entries, 2, left_ms < 1000 ? (int)left_ms : 1000);
        if (ready > 0) return entries[1].revents != 0 ? EINTR : 0;
        if (ready < 0 && errno != EINTR) return errno;
    }
}

int wire_write(int descriptor, const void *data, uint64_t bytes, int64_t deadline_ns, int stop)
{
    uint64_t done = 0;

    while (done < bytes) {
        ssize_t sent =
            send(descriptor, (const char *)data + done, bytes - done, MSG_NOSIGNAL | MSG_DONTWAIT);
        int failed = 0;

        if (sent > 0) {
            done += (uint64_t)sent;
            continue;
        }
        if (errno != EAGAIN && errno != EINTR) return errno;
        failed = await(descriptor, POLLOUT, deadline_ns, stop);
        if (failed != 0) return failed;
    }
    return 0;
}

int wire_read(int descriptor, void *data, uint64_t bytes, int64_t deadline_ns)
{
    uint64_t done = 0;

    while (done < bytes) {
        ssize_t got = recv(descriptor, (char *)data + done, bytes - done, MSG_DONTWAIT);
        int failed = 0;

        if (got > 0) {
            done += (uint64_t)got;
            continue;
        }
        if (got == 0) return EPIPE;
        if (errno != EAGAIN && errno != EINTR) return errno;
        failed = await(descriptor, POLLIN, deadline_ns, -1);
        if (failed != 0) return failed;
    }
    return 0;
}
