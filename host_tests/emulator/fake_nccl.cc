// As much of NCCL as the library uses, for the emulated GPU: ranks are processes or threads of one
// machine, joined pair by pair by Unix sockets that the name of the group names. An exchange runs
// in stream order on the stream's own thread, is kept in graphs, and waits for ever for a rank that
// does not come; ncclCommAbort ends that.
//
// A communicator that does not block launches a group only when it has been asked how it is often
// enough, so that work which does not wait for that comes before its rows.
//
// FAKE_NCCL_VERSION: what ncclGetVersion says, FAKE_NCCL_VERSION_STEP more at every call.
// FAKE_NCCL_FAIL_RANK: the rank that cannot join. FAKE_NCCL_FAIL_AFTER: exchanges of a communicator
// before all others fail.

#include "host_tests/emulator/device.h"

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

enum {
    kSuccess,
    kCudaError,
    kSystemError,
    kInternalError,
    kInvalidArgument,
    kInvalidUsage,
    kRemoteError,
    kInProgress
};

struct ncclUniqueId {
    char bytes[128];
};

struct ncclConfig {
    size_t size;
    unsigned magic, version;
    int blocking;
};

namespace
{

constexpr int kRanksMax = 64;
constexpr int kPatienceMs = 5; // between two looks at whether the communicator was aborted
constexpr int kQuestions = 3;  // until a group is launched

int number_of(const char *name, int standard)
{
    const char *word = getenv(name);

    return word == nullptr ? standard : atoi(word);
}

std::mutex words_lock;
char words[160];

int fail(int result, const char *text, int rank)
{
    std::lock_guard<std::mutex> hold(words_lock);

    snprintf(words, sizeof words, text, rank);
    return result;
}

struct operation {
    bool sends;
    unsigned char *memory;
    uint64_t bytes;
    int peer;
};

// One direction of one peer: its operations in order, each after 8 bytes that say how many follow.
struct way {
    std::deque<operation> left;
    uint64_t header = 0, done = 0; // done: of header and bytes together
};

class group
{
  public:
    int rank = 0, ranks = 0;
    bool blocking = true;
    std::atomic<bool> aborted{false};
    std::atomic<int> state{kInProgress}, running{0};

    ~group()
    {
        if (joiner.joinable()) joiner.join();
        for (int fd : sockets)
            if (fd >= 0) close(fd);
    }

    // Joins in a thread of its own, or here.
    void join(const ncclUniqueId &id)
    {
        std::fill(std::begin(sockets), std::end(sockets), -1);
        joiner = std::thread([this, id] { state = connect_all(id); });
        if (blocking) end_join();
    }
    void end_join()
    {
        if (joiner.joinable()) joiner.join();
    }

    void run(const std::vector<operation> &operations)
    {
        std::vector<way> out(static_cast<size_t>(ranks)), in(static_cast<size_t>(ranks));
        int fail_after = number_of("FAKE_NCCL_FAIL_AFTER", -1);
        bool more = true;
        // Those of two streams run one after the other.
        std::lock_guard<std::mutex> hold(turn);

        running++;
        for (const operation &each : operations)
            (each.sends ? out : in)[static_cast<size_t>(each.peer)].left.push_back(each);
        if (fail_after >= 0 && exchanges++ >= fail_after)
            state = fail(kRemoteError, "rank %d was told to fail", rank);
        while (more && !aborted) {
            more = false;
            for (int peer = 0; peer < ranks && state != kRemoteError && state != kInvalidUsage;
                 peer++) {
                size_t p = static_cast<size_t>(peer);

                if (!out[p].left.empty()) move(peer, out[p], true);
                if (!in[p].left.empty()) move(peer, in[p], false);
                more = more || !out[p].left.empty() || !in[p].left.empty();
            }
            if (state == kRemoteError || state == kInvalidUsage) more = true;
            if (more) wait(out, in);
        }
        running--;
    }

  private:
    int sockets[kRanksMax];
    std::thread joiner;
    std::mutex turn;
    std::atomic<int> exchanges{0};

    sockaddr_un name_of(const ncclUniqueId &id, int of, socklen_t *bytes)
    {
        sockaddr_un name = {};

        name.sun_family = AF_UNIX;
        // The first byte is 0: a name without a file.
        *bytes = static_cast<socklen_t>(
            offsetof(sockaddr_un, sun_path) + 1 +
            static_cast<size_t>(
                snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "%.32s-%d", id.bytes, of)));
        return name;
    }

    static bool read_all(int fd, void *to, size_t bytes)
    {
        return recv(fd, to, bytes, MSG_WAITALL) == static_cast<ssize_t>(bytes);
    }

    // Ranks above come here, this one goes to those below.
    int connect_all(const ncclUniqueId &id)
    {
        socklen_t bytes = 0;
        sockaddr_un name = name_of(id, rank, &bytes);
        int box = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        int missing = ranks - 1;

        if (number_of("FAKE_NCCL_FAIL_RANK", -1) == rank) {
            close(box);
            return fail(kSystemError, "rank %d has no network", rank);
        }
        if (bind(box, reinterpret_cast<sockaddr *>(&name), bytes) != 0 ||
            listen(box, kRanksMax) != 0) {
            close(box);
            return fail(kSystemError, "rank %d is there twice", rank);
        }
        while (missing > 0 && !aborted) {
            pollfd come = {box, POLLIN, 0};

            for (int peer = 0; peer < rank; peer++)
                if (sockets[peer] < 0) missing -= go_to(id, peer);
            if (poll(&come, 1, kPatienceMs) == 1) missing -= let_in(box);
        }
        close(box);
        return missing == 0 ? kSuccess : kInternalError;
    }

    bool go_to(const ncclUniqueId &id, int peer)
    {
        socklen_t bytes = 0;
        sockaddr_un name = name_of(id, peer, &bytes);
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

        if (connect(fd, reinterpret_cast<sockaddr *>(&name), bytes) != 0 ||
            send(fd, &rank, sizeof rank, MSG_NOSIGNAL) != sizeof rank) {
            close(fd);
            return false;
        }
        sockets[peer] = fd;
        return true;
    }

    bool let_in(int box)
    {
        int fd = accept4(box, nullptr, nullptr, SOCK_CLOEXEC), peer = -1;

        if (!read_all(fd, &peer, sizeof peer) || peer <= rank || peer >= ranks) {
            close(fd);
            return false;
        }
        sockets[peer] = fd;
        return true;
    }

    // As much as the socket takes or gives now. One that is closed gives nothing, for ever.
    void move(int peer, way &way, bool out)
    {
        while (!way.left.empty()) {
            operation &now = way.left.front();
            bool head = way.done < sizeof way.header;
            uint64_t at = head ? way.done : way.done - sizeof way.header;
            uint64_t bytes = (head ? sizeof way.header : now.bytes) - at;
            ssize_t moved = 0;
            unsigned char *memory;

            if (out && way.done == 0) way.header = now.bytes;
            memory = (head ? reinterpret_cast<unsigned char *>(&way.header) : now.memory) + at;
            if (bytes > 0)
                moved = out ? send(sockets[peer], memory, bytes, MSG_NOSIGNAL | MSG_DONTWAIT)
                            : recv(sockets[peer], memory, bytes, MSG_DONTWAIT);
            if (bytes > 0 && moved <= 0) return;
            way.done += static_cast<uint64_t>(moved);
            if (way.done == sizeof way.header && way.header != now.bytes) {
                state = fail(kInvalidUsage,
                             "rank %d sends another number of bytes than is received", peer);
                return;
            }
            if (way.done < sizeof way.header + now.bytes) continue;
            way.left.pop_front();
            way.done = 0;
        }
    }

    void wait(const std::vector<way> &out, const std::vector<way> &in)
    {
        std::vector<pollfd> fds;

        for (int peer = 0; peer < ranks; peer++) {
            size_t p = static_cast<size_t>(peer);
            short events = static_cast<short>((out[p].left.empty() ? 0 : POLLOUT) |
                                              (in[p].left.empty() ? 0 : POLLIN));

            if (events != 0) fds.push_back({sockets[peer], events, 0});
        }
        if (poll(fds.data(), fds.size(), kPatienceMs) > 0)
            for (const pollfd &each : fds)
                if ((each.revents & (POLLHUP | POLLERR)) != 0 || state != kSuccess) {
                    std::this_thread::sleep_for(std::chrono::milliseconds(kPatienceMs));
                    return;
                }
    }
};

} // namespace

struct ncclComm {
    std::shared_ptr<group> peers;
    std::mutex lock;
    std::vector<operation> posted; // of a group that is not launched yet
    cudaStream_t stream = nullptr;
    int questions = 0; // until it is

    int launch()
    {
        std::shared_ptr<group> kept = peers;
        std::vector<operation> operations = std::move(posted);

        posted.clear();
        return emulator::enqueue_wait(stream, [kept, operations] { kept->run(operations); }) ==
                       cudaSuccess
                   ? kSuccess
                   : kCudaError;
    }
};

namespace
{

thread_local int depth;
thread_local ncclComm *grouped;

int post(ncclComm *comm, operation operation, cudaStream_t stream)
{
    if (comm == nullptr || depth == 0)
        return fail(kInvalidUsage, "a send or receive of rank %d outside a group", -1);
    if (operation.peer < 0 || operation.peer >= comm->peers->ranks ||
        operation.peer == comm->peers->rank || operation.memory == nullptr)
        return fail(kInvalidArgument, "a send or receive with rank %d", operation.peer);
    std::lock_guard<std::mutex> hold(comm->lock);
    if (comm->questions > 0)
        return fail(kInvalidUsage, "rank %d: the last group is in progress", comm->peers->rank);
    if (!comm->posted.empty() && comm->stream != stream)
        return fail(kInvalidUsage, "rank %d: one group on two streams", comm->peers->rank);
    comm->posted.push_back(operation);
    comm->stream = stream;
    grouped = comm;
    return kSuccess;
}

} // namespace

EXPORT int ncclGetVersion(int *version)
{
    static std::atomic<int> calls{0};

    *version =
        number_of("FAKE_NCCL_VERSION", 22809) + number_of("FAKE_NCCL_VERSION_STEP", 0) * calls++;
    return kSuccess;
}

EXPORT const char *ncclGetErrorString(int result)
{
    static const char *const texts[] = {"no error",
                                        "unhandled cuda error",
                                        "unhandled system error",
                                        "internal error",
                                        "invalid argument",
                                        "invalid usage",
                                        "remote process exited or there was a network error",
                                        "in progress"};

    return result >= 0 && result <= kInProgress ? texts[result] : "unknown result code";
}

EXPORT const char *ncclGetLastError(ncclComm *)
{
    static thread_local char text[sizeof words];
    std::lock_guard<std::mutex> hold(words_lock);

    memcpy(text, words, sizeof words);
    return text;
}

// Not NCCL's: how many names were asked for, each of which is a thread and a socket there until all
// ranks have joined.
EXPORT std::atomic<int> fake_nccl_names;
std::atomic<int> fake_nccl_names{0};

EXPORT int ncclGetUniqueId(ncclUniqueId *id)
{
    unsigned char bytes[16];

    fake_nccl_names++;
    memset(id, 0, sizeof *id);
    if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes) return kSystemError;
    for (size_t i = 0; i < sizeof bytes; i++)
        snprintf(id->bytes + 2 * i, 3, "%02x", bytes[i]);
    return kSuccess;
}

EXPORT int ncclCommInitRankConfig(ncclComm **comm, int ranks, ncclUniqueId id, int rank,
                                  ncclConfig *config)
{
    *comm = nullptr;
    if (config->size < sizeof *config || config->magic != 0xcafebeef || config->version < 21400)
        return fail(kInvalidArgument, "rank %d: not a configuration", rank);
    if (ranks < 1 || ranks > kRanksMax || rank < 0 || rank >= ranks)
        return fail(kInvalidArgument, "rank %d is none", rank);
    *comm = new ncclComm();
    (*comm)->peers = std::make_shared<group>();
    (*comm)->peers->rank = rank;
    (*comm)->peers->ranks = ranks;
    (*comm)->peers->blocking = config->blocking != 0;
    (*comm)->peers->join(id);
    return config->blocking != 0 ? (*comm)->peers->state.load() : kInProgress;
}

EXPORT int ncclCommGetAsyncError(ncclComm *comm, int *state)
{
    std::lock_guard<std::mutex> hold(comm->lock);

    *state = comm->peers->state;
    if (comm->questions == 0 || *state != kSuccess) return kSuccess;
    *state = --comm->questions == 0 ? comm->launch() : static_cast<int>(kInProgress);
    return kSuccess;
}

EXPORT int ncclCommAbort(ncclComm *comm)
{
    comm->peers->aborted = true;
    comm->peers->end_join();
    while (comm->peers->running > 0)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    delete comm;
    return kSuccess;
}

EXPORT int ncclCommFinalize(ncclComm *comm)
{
    return comm->peers->blocking ? kSuccess : kInProgress;
}

EXPORT int ncclCommDestroy(ncclComm *comm)
{
    delete comm;
    return kSuccess;
}

EXPORT int ncclGroupStart()
{
    depth++;
    return kSuccess;
}

EXPORT int ncclGroupEnd()
{
    ncclComm *comm = grouped;

    if (depth == 0) return fail(kInvalidUsage, "rank %d: no group to end", -1);
    if (--depth > 0 || comm == nullptr) return kSuccess;
    grouped = nullptr;
    std::lock_guard<std::mutex> hold(comm->lock);
    if (comm->peers->blocking) return comm->launch();
    comm->questions = kQuestions;
    return kInProgress;
}

EXPORT int ncclSend(const void *from, size_t count, int, int peer, ncclComm *comm,
                    cudaStream_t stream)
{
    return post(comm, {true, static_cast<unsigned char *>(const_cast<void *>(from)), count, peer},
                stream);
}

EXPORT int ncclRecv(void *to, size_t count, int, int peer, ncclComm *comm, cudaStream_t stream)
{
    return post(comm, {false, static_cast<unsigned char *>(to), count, peer}, stream);
}
