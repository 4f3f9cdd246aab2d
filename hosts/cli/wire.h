// Messages over the sockets between the command and its rank processes: a header, then the payload.

#ifndef MOXIE_HOSTS_CLI_WIRE_H
#define MOXIE_HOSTS_CLI_WIRE_H

#include <stdint.h>

#define WIRE_PAYLOAD_BYTES_MAX ((uint64_t)1 << 40)

struct wire_header {
    uint32_t message; // enum message
    uint32_t reserved;
    uint64_t bytes; // of the payload
};

// Both move everything or fail: 0, or an errno; ETIMEDOUT past `deadline_ns` (clock_ns), EPIPE when
// the other side is gone, EINTR when there is something to read from `stop` (-1: nothing ends it)
// while this has to wait.
int wire_write(int descriptor, const void *data, uint64_t bytes, int64_t deadline_ns, int stop);
int wire_read(int descriptor, void *data, uint64_t bytes, int64_t deadline_ns);

#endif
