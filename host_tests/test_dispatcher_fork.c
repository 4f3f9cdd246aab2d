// plugin/dispatcher.c in a child that a rank forks: refused, and the ranks compute as before.

#include "plugin/dispatcher.h"

#include "host_tests/crew.h"
#include "host_tests/suite.h"
#include "plugin/forward.h"
#include "plugin/runner.h"

#include <sys/wait.h>
#include <unistd.h>

// Where rank 0's layer is when it forks.
enum moment { BEFORE_LAYER, INSIDE_LAYER };

struct halves {
    const moxie_rows *in, *out;
};

// Every call that a child could make. A check that fails ends it with another code than 0.
static void use_copy(struct crew_member *member, const struct halves *halves)
{
    static const char words[] = "forked from it; create a dispatcher here";
    moxie_dispatcher *dispatcher = member->rank.dispatcher;
    const moxie_batch *batch = &member->batch.batch;
    moxie_error *error = &member->rank.mock.error;
    const uint8_t active[] = {1, 1};
    moxie_call call = {.struct_size = sizeof call};
    const moxie_rows *in, *out;

#define REFUSED(answer) crew_expect(member, answer, MOXIE_E_INVALID, words)
    REFUSED(dispatcher_begin_forward(dispatcher, &member->step, error));
    REFUSED(forward_run(dispatcher, member->rank.runner, batch, error));
    REFUSED(dispatcher_dispatch_send(dispatcher, batch, error));
    REFUSED(dispatcher_dispatch_recv(dispatcher, batch, &in, &out, error));
    REFUSED(dispatcher_combine_send(dispatcher, batch, error));
    REFUSED(dispatcher_combine_recv(dispatcher, batch, error));
    REFUSED(dispatcher_set_active_ranks(dispatcher, active, error));
    REFUSED(dispatcher_poll_error(dispatcher, error));
    if (halves->in != NULL)
        REFUSED(runner_run(member->rank.runner, &call, halves->in, halves->out, error));
#undef REFUSED
    dispatcher_destroy(dispatcher);
}

static void fork_and_wait(struct crew_member *member, const struct halves *halves)
{
    int status;
    pid_t child = fork();

    ck_assert_int_ge(child, 0);
    if (child == 0) {
        use_copy(member, halves);
        _exit(EXIT_SUCCESS);
    }
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    ck_assert_msg(WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SUCCESS,
                  "the child ended with wait status 0x%x", (unsigned)status);
}

// A child's forward would send what the next one of its parent is to send, and take what it awaits.
static void fork_scenario(struct crew_member *member)
{
    const enum moment *moment = member->crew->arg;
    moxie_dispatcher *dispatcher = member->rank.dispatcher;
    const moxie_batch *batch = &member->batch.batch;
    moxie_error *error = &member->rank.mock.error;
    const moxie_host *host = &member->rank.mock.host;
    moxie_call call = {.struct_size = sizeof call};
    struct halves halves = {NULL, NULL};
    int32_t failed;

    crew_forward(member);
    crew_begin(member);
    if (*moment == INSIDE_LAYER) {
        crew_expect(member, dispatcher_dispatch_send(dispatcher, batch, error), MOXIE_OK, NULL);
        crew_expect(member,
                    dispatcher_dispatch_recv(dispatcher, batch, &halves.in, &halves.out, error),
                    MOXIE_OK, NULL);
    }
    // The other thread rests, and checks nothing: a child inherits its locks, the one of checks
    // too.
    failed = host->barrier(host->ctx);
    if (member->index == 0) fork_and_wait(member, &halves);
    failed |= host->barrier(host->ctx);
    ck_assert_int_eq(failed, 0);
    if (*moment == INSIDE_LAYER) {
        crew_expect(member, runner_run(member->rank.runner, &call, halves.in, halves.out, error),
                    MOXIE_OK, NULL);
        crew_expect(member, dispatcher_combine_send(dispatcher, batch, error), MOXIE_OK, NULL);
        crew_expect(member, dispatcher_combine_recv(dispatcher, batch, error), MOXIE_OK, NULL);
    }
    crew_forward(member);
}

START_TEST(a_forked_child_is_refused)
{
    static const char *const dispatchers[] = {"alltoall", "allgather"};
    enum moment moment = _i % 2 == 0 ? BEFORE_LAYER : INSIDE_LAYER;
    struct crew crew = {.layer_name = "qwen3_moe_a",
                        .ranks = 2,
                        .dispatcher = dispatchers[_i / 2],
                        .scenario = fork_scenario,
                        .arg = &moment};

    crew_run(&crew);
    ck_assert_double_le(golden_error(crew.y, &crew.layer.want), 2e-6);
    crew_fini(&crew);
}
END_TEST

// Without peers a copy of the dispatcher is as good as the dispatcher.
static void local_scenario(struct crew_member *member)
{
    int status;
    pid_t child = fork();

    ck_assert_int_ge(child, 0);
    if (child == 0) {
        crew_forward(member);
        _exit(EXIT_SUCCESS);
    }
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    ck_assert_int_eq(status, 0);
    crew_forward(member);
}

START_TEST(a_forked_child_uses_local)
{
    struct crew crew = {
        .layer_name = "qwen3_moe_a", .ranks = 1, .dispatcher = "local", .scenario = local_scenario};

    crew_run(&crew);
    ck_assert_double_le(golden_error(crew.y, &crew.layer.want), 2e-6);
    crew_fini(&crew);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_loop_test(tests, a_forked_child_is_refused, 0, 4);
    tcase_add_test(tests, a_forked_child_uses_local);
}

SUITE_MAIN("dispatcher_fork", 120, add)
