// kernels/cuda/ll.cu while flags have come and words have not, as of a peer that dies between them:
// what this rank tells and sees meanwhile, and when it ends.

#include "host_tests/gpu/ll_scene.h"
#include "host_tests/suite.h"
#include "plugin/transport.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#define VICTIM  2
#define LONG_NS ((int64_t)TIMEOUT_NS * 10) // of what ends before, by itself

static const struct shape four = {4, 1, FORMAT_FP8_BLOCK128, 264, 4, 1};

// In the memory of the device.
static void *line_of(struct scene *scene, int32_t owner, int32_t word, int32_t source)
{
    const char *line = (const char *)scene_line(scene, owner, word, source);

    return (char *)scene->device_windows[owner] + (line - (const char *)&scene->windows[owner]);
}

static void put(void *at, uint64_t value)
{
    must(cudaMemcpy(at, &value, sizeof value, cudaMemcpyHostToDevice));
}

// All flags, and the words of all but the VICTIM.
static struct scene *open_without_words(int32_t sms, int64_t timeout_ns)
{
    struct scene *scene = scene_open(&four, sms);

    scene->timeout_ns = timeout_ns;
    scene_peers_send(scene, 2);
    memset(scene->windows[four.own].rows[scene_index(VICTIM, four.own)], 0,
           sizeof *scene->windows[0].rows);
    return scene;
}

// Whoever waits for this rank in another layer hears it, and each wait ends in its time, however
// few warps look at however many words.
START_TEST(who_waits_for_words_says_so)
{
    struct scene *scene = open_without_words(_i, TIMEOUT_NS);
    const int64_t began_ns = clock_ns();

    ck_assert_uint_eq(scene_dispatch(scene, 0, 1), VERDICT_SILENT);
    ck_assert_int_lt(clock_ns() - began_ns, 3 * (int64_t)TIMEOUT_NS);
    ck_assert_int_eq(scene->report->verdict.rank, VICTIM);
    ck_assert_uint_eq(scene->report->verdict.silent, 1u << VICTIM);
    for (int32_t r = 0; r < four.ranks; r++) {
        uint64_t told = 0;

        must(cudaMemcpy(&told, line_of(scene, r, WORD_BEAT, four.own), sizeof told,
                        cudaMemcpyDeviceToHost));
        ck_assert(r == four.own || told != 0);
    }
    scene_close(scene);
}
END_TEST

struct peer {
    struct scene *scene;
    int32_t leaves;
    _Atomic int32_t stop;
};

// The VICTIM waits itself, or goes on without this rank.
static void *act(void *arg)
{
    struct peer *peer = arg;
    const struct timespec pause = {.tv_nsec = TIMEOUT_NS / 40};

    for (uint64_t value = 1; !peer->stop; value++) {
        (void)nanosleep(&pause, NULL);
        if (!peer->leaves) {
            put(line_of(peer->scene, four.own, WORD_BEAT, VICTIM), value);
        } else if (value == 4) {
            put(line_of(peer->scene, four.own, WORD_ACTIVE, VICTIM), 12);
            put(line_of(peer->scene, four.own, WORD_GENERATION, VICTIM), GENERATION + 1);
        }
    }
    return NULL;
}

START_TEST(who_waits_for_words_looks_around)
{
    const int32_t leaves = _i % 2;
    struct scene *scene = open_without_words(_i / 2, leaves ? LONG_NS : TIMEOUT_NS);
    struct peer peer = {.scene = scene, .leaves = leaves};
    const int64_t began_ns = clock_ns();
    pthread_t thread;

    scene->memory.state.epochs[SLOT] = EPOCH;
    scene_upload(scene);
    ck_assert_int_eq(pthread_create(&thread, NULL, act, &peer), 0);
    scene_launch_dispatch(scene, 0, 1);
    ck_assert_uint_eq(scene_finish(scene), leaves ? VERDICT_LEFT_OUT : VERDICT_ALL_WAIT);
    ck_assert_int_lt(clock_ns() - began_ns, LONG_NS);
    peer.stop = 1;
    ck_assert_int_eq(pthread_join(thread, NULL), 0);
    ck_assert_int_eq(scene->report->verdict.rank, leaves ? VICTIM : -1);
    for (int32_t r = 0; r < four.ranks; r++)
        ck_assert_int_eq(scene->got.counts[r], 0);
    scene_close(scene);
}
END_TEST

static void tests(TCase *cases)
{
    tcase_add_loop_test(cases, who_waits_for_words_says_so, 0, 2);
    tcase_add_loop_test(cases, who_waits_for_words_looks_around, 0, 4);
}

int main(void)
{
    return gpu_suite("gpu_ll_waits", 1, tests);
}
