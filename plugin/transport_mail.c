// Descriptors passed between the ranks of a host.

#include "plugin/transport_mail.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define MAIL_MAGIC 0x4d584d31u

// What comes with a descriptor.
struct letter {
    uint32_t magic;
    int32_t from;
};

union control {
    struct cmsghdr header; // for its alignment
    char bytes[CMSG_SPACE(sizeof(int))];
};

// A name without a file: the first byte is zero.
static socklen_t address_of(const unsigned char token[MEETING_TOKEN_BYTES],
                            struct sockaddr_un *address)
{
    static const char digits[] = "0123456789abcdef";
    size_t length;

    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    length = strlen(strcpy(address->sun_path + 1, "moxie-")) + 1;
    for (size_t i = 0; i < MEETING_TOKEN_BYTES; i++) {
        address->sun_path[length++] = digits[token[i] >> 4];
        address->sun_path[length++] = digits[token[i] & 15];
    }
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + length);
}

int32_t mail_open(const unsigned char token[MEETING_TOKEN_BYTES], int *out, moxie_error *error)
{
    struct sockaddr_un address;
    socklen_t length = address_of(token, &address);
    int box = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int32_t st = MOXIE_OK;

    *out = -1;
    if (box < 0 || bind(box, (const struct sockaddr *)&address, length) != 0 ||
        listen(box, MOXIE_RANKS_MAX) != 0)
        TRY(fail_with(error, MOXIE_E_UNAVAILABLE, "no Unix socket to pass windows through (%s); %s",
                      strerror(errno),
                      transport_remedy(errno, "allow Unix sockets with names of their own")));
    *out = box;
    box = -1;
out:
    if (box >= 0) (void)close(box);
    return st;
}

// One letter with its descriptor; a fresh connection has room for it.
static int send_letter(int connection, int32_t from, int fd)
{
    struct letter letter = {.magic = MAIL_MAGIC, .from = from};
    struct iovec piece = {.iov_base = &letter, .iov_len = sizeof letter};
    union control control = {.bytes = {0}};
    struct msghdr message = {.msg_iov = &piece,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = sizeof control.bytes};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);

    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
    return sendmsg(connection, &message, MSG_NOSIGNAL) == (ssize_t)sizeof letter;
}

int32_t mail_post(const unsigned char token[MEETING_TOKEN_BYTES], int32_t from, int32_t to, int fd,
                  moxie_error *error)
{
    struct sockaddr_un address;
    socklen_t length = address_of(token, &address);
    int connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int32_t st = MOXIE_OK;

    if (connection < 0 || connect(connection, (const struct sockaddr *)&address, length) != 0 ||
        !send_letter(connection, from, fd))
        TRY(fail_rank(error, MOXIE_E_UNAVAILABLE, to,
                      "the window cannot be passed to rank %d (%s); %s", to, strerror(errno),
                      transport_remedy(errno, "run the ranks in one network namespace (docker: "
                                              "--network=host, or one container)")));
out:
    if (connection >= 0) (void)close(connection);
    return st;
}

// The descriptor of a message; -1 when there is none. Of several, which are nobody's letter, all
// that came are closed: there is room for more than one in what is aligned for one.
static int take_fd(const struct msghdr *message)
{
    const struct cmsghdr *header = CMSG_FIRSTHDR(message);
    int fds[sizeof(union control) / sizeof(int)];
    size_t count;

    if (header == NULL || header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS)
        return -1;
    count = (header->cmsg_len - CMSG_LEN(0)) / sizeof fds[0];
    memcpy(fds, CMSG_DATA(header), count * sizeof fds[0]);
    if (count == 1) return fds[0];
    for (size_t i = 0; i < count; i++)
        (void)close(fds[i]);
    return -1;
}

// The letter of one connection: its descriptor, and who sent it; -1 when there is none, or it comes
// from another user.
static int read_letter(int connection, int32_t ranks, int32_t *from)
{
    struct letter letter = {0};
    struct iovec piece = {.iov_base = &letter, .iov_len = sizeof letter};
    union control control;
    struct msghdr message = {.msg_iov = &piece,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = sizeof control.bytes};
    struct ucred sender;
    socklen_t length = sizeof sender;
    ssize_t bytes = recvmsg(connection, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    int fd = bytes < 0 ? -1 : take_fd(&message);

    if (fd < 0) return -1;
    *from = letter.from;
    if (bytes == (ssize_t)sizeof letter && letter.magic == MAIL_MAGIC && letter.from >= 0 &&
        letter.from < ranks &&
        getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &sender, &length) == 0 &&
        sender.uid == geteuid())
        return fd;
    (void)close(fd);
    return -1;
}

// Only ranks know the name, so what is no letter is passed over, not blamed. All letters are there
// when the first is taken, and a box holds one more than it was made for: who connects again and
// again is not waited for.
int32_t mail_take(int box, int32_t own, int32_t ranks, int fds[MOXIE_RANKS_MAX], moxie_error *error)
{
    int32_t from = -1;

    for (int32_t r = 0; r < ranks; r++)
        fds[r] = -1;
    for (int32_t taken = 0; taken <= MOXIE_RANKS_MAX; taken++) {
        int connection = accept4(box, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        int fd;

        if (connection < 0) break;
        fd = read_letter(connection, ranks, &from);
        (void)close(connection);
        if (fd < 0) continue;
        if (from == own || fds[from] >= 0)
            (void)close(fd);
        else
            fds[from] = fd;
    }
    for (int32_t r = 0; r < ranks; r++)
        if (r != own && fds[r] < 0)
            return fail_rank(error, MOXIE_E_PEER, r,
                             "rank %d's window did not come; raise the limit of open files "
                             "(ulimit -n), and run the ranks as one user",
                             r);
    return MOXIE_OK;
}
