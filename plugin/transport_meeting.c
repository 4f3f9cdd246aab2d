// Meetings of the ranks.

#include "plugin/transport_meeting.h"

#include "plugin/device.h"
#include "plugin/memory_available.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#define STAGE_MAGIC 0x4d580500u // raised with every change of struct meeting_message

void meeting_init(struct meeting *meeting, const struct bootstrap *bootstrap,
                  const struct meeting_identity *identity, uint64_t windows)
{
    memset(meeting, 0, sizeof *meeting);
    meeting->bootstrap = bootstrap;
    meeting->mine.rank = bootstrap->rank;
    meeting->mine.window = windows;
    meeting->mine.identity = *identity;
    meeting->local.struct_size = sizeof meeting->local;
    meeting->local.text = meeting->mine.text;
    meeting->local.text_bytes = FAILURE_TEXT_BYTES;
}

// The verdict on rank r's message; the same on every rank, since all read the same messages.
static int32_t judge(struct meeting *meeting, enum meeting_stage stage, int32_t r,
                     moxie_error *error)
{
    struct meeting_message *message = &meeting->all[r];
    int32_t blame = message->blame;

    if (message->stage != STAGE_MAGIC + (uint32_t)stage || message->window != meeting->mine.window)
        return fail_rank(error, MOXIE_E_COLLECTIVE_MISMATCH, r,
                         "rank %d is at another point of its bootstrap, or of another build; every "
                         "rank must make the same calls in the same order",
                         r);
    if (message->rank != r)
        return fail_rank(error, MOXIE_E_COLLECTIVE_MISMATCH, r,
                         "all_gather put the bytes of rank %d in the place of rank %d; it must "
                         "keep the order of ranks",
                         message->rank, r);
    if (message->status == MOXIE_OK) return MOXIE_OK;
    if (message->status < 0 || message->status > MOXIE_E_INTERNAL)
        return fail_rank(error, MOXIE_E_COLLECTIVE_MISMATCH, r,
                         "rank %d failed with code %d, which is none", r, message->status);
    if (blame < 0 || blame >= meeting->bootstrap->ranks) blame = r;
    text_clean(message->text, sizeof message->text);
    return fail_rank(error, message->status, blame, "rank %d: %s", r, message->text);
}

int32_t meeting_meet(struct meeting *meeting, enum meeting_stage stage, int32_t step,
                     moxie_error *error)
{
    const struct bootstrap *bootstrap = meeting->bootstrap;
    struct meeting_message *mine = &meeting->mine;
    int32_t answer = 0;
    int32_t st = MOXIE_OK;

    mine->stage = STAGE_MAGIC + (uint32_t)stage;
    mine->status = step;
    mine->blame = step == MOXIE_OK ? -1 : meeting->local.rank;
    memset(meeting->all, 0, sizeof meeting->all);
    if (bootstrap->ranks == 1)
        meeting->all[0] = *mine;
    else
        answer = bootstrap->all_gather(bootstrap->ctx, mine, meeting->all, sizeof *mine);
    if (answer != 0 && step != MOXIE_OK && (mine->blame < 0 || mine->blame == mine->rank))
        TRY(fail_rank(error, step, mine->blame, "rank %d: %s", mine->rank, mine->text));
    // A step that failed at another rank did so because ranks leave: that one is not to blame.
    if (answer != 0)
        TRY(fail_with(error, MOXIE_E_PEER,
                      "the host's all_gather failed (%d) between %d ranks: one has died, or left "
                      "after an error of its own%s%s",
                      answer, bootstrap->ranks, step == MOXIE_OK ? "" : "; before that: ",
                      step == MOXIE_OK ? "" : mine->text));
    for (int32_t r = 0; r < bootstrap->ranks; r++)
        TRY(judge(meeting, stage, r, error));
out:
    return st;
}

// Who this process is.
static int32_t identify(struct meeting_identity *identity, moxie_error *error)
{
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? -1 : read(fd, identity->boot_id, MEETING_BOOT_ID_BYTES - 1);
    int os_error = length < 0 ? errno : ENODATA;
    struct stat pid_namespace;

    if (fd >= 0) (void)close(fd);
    if (length <= 0)
        return fail_with(error, MOXIE_E_UNAVAILABLE,
                         "/proc/sys/kernel/random/boot_id cannot be read (%s), so ranks of this "
                         "host cannot be told from others; %s",
                         strerror(os_error), transport_remedy(os_error, "mount /proc"));
    if (stat("/proc/self/ns/pid", &pid_namespace) != 0)
        return fail_with(
            error, MOXIE_E_UNAVAILABLE,
            "/proc/self/ns/pid cannot be read (%s), so threads of this process cannot be told from "
            "others; %s",
            strerror(errno), transport_remedy(errno, "mount /proc"));
    identity->pid_namespace[0] = pid_namespace.st_dev;
    identity->pid_namespace[1] = pid_namespace.st_ino;
    identity->pid = getpid();
    return MOXIE_OK;
}

// After STAGE_JOIN: names the first rank that is on another host than rank 0.
static int32_t same_host(const struct meeting *meeting, moxie_error *error)
{
    const struct meeting_message *all = meeting->all;

    // Every rank is compared with rank 0, so that all come to the same verdict.
    for (int32_t r = 0; r < meeting->bootstrap->ranks; r++)
        if (memcmp(all[r].identity.boot_id, all[0].identity.boot_id, MEETING_BOOT_ID_BYTES) != 0)
            return fail_rank(error, MOXIE_E_UNAVAILABLE, r,
                             "rank %d is on another host than rank 0, and shared memory joins "
                             "ranks of one host only; keep the ranks on one host%s",
                             r,
                             meeting->bootstrap->device != NULL &&
                                     meeting->bootstrap->device->windows != NULL
                                 ? ", or set transport to nccl"
                                 : "");
    return MOXIE_OK;
}

int32_t meeting_join(struct meeting *meeting, const struct bootstrap *bootstrap,
                     const struct transport *transport, moxie_error *error)
{
    const struct meeting_identity nobody = {.pid = 0};
    int32_t st = MOXIE_OK;
    int32_t step;

    meeting_init(meeting, bootstrap, &nobody, 0);
    step = identify(&meeting->mine.identity, &meeting->local);
    meeting->mine.group = memory_available().group_id;
    if (transport == NULL)
        step = fail_with(&meeting->local, MOXIE_E_MEMORY, "a transport: out of memory");
    TRY(meeting_meet(meeting, STAGE_JOIN, step, error));
    TRY(same_host(meeting, error));
out:
    return st;
}

int32_t meeting_token(unsigned char token[MEETING_TOKEN_BYTES], moxie_error *error)
{
    if (getrandom(token, MEETING_TOKEN_BYTES, 0) != MEETING_TOKEN_BYTES)
        return fail_with(error, MOXIE_E_UNAVAILABLE, "no random bytes for a name (getrandom: %s)",
                         strerror(errno));
    return MOXIE_OK;
}

int32_t meeting_take_offers(struct meeting *meeting, moxie_error *error)
{
    const struct meeting_message *all = meeting->all;

    for (int32_t r = 0; r < meeting->bootstrap->ranks; r++) {
        if (all[r].bytes != all[0].bytes)
            return fail_rank(error, MOXIE_E_COLLECTIVE_MISMATCH, r,
                             "rank %d opens a window of %" PRIu64 " bytes, rank 0 one of %" PRIu64
                             "; the ranks' configurations differ",
                             r, all[r].bytes, all[0].bytes);
        memcpy(meeting->tokens[r], all[r].token, MEETING_TOKEN_BYTES);
    }
    memcpy(meeting->tokens[meeting->mine.rank], meeting->mine.token, MEETING_TOKEN_BYTES);
    return MOXIE_OK;
}
