// What every check suite starts with.

#ifndef MOXIE_HOST_TESTS_SUITE_H
#define MOXIE_HOST_TESTS_SUITE_H

#ifdef NDEBUG
#error "tests need assert"
#endif

#include <check.h>
#include <dirent.h>
#include <stdint.h>
#include <stdlib.h>

// ck_assert_msg for loops of thousands: of each ck_assert that holds Check writes to a file where
// it stood, which takes longer than what is tested.
#define assert_many(condition, ...)                                                                \
    do {                                                                                           \
        if (!(condition)) ck_abort_msg(__VA_ARGS__);                                               \
    } while (0)

// How many names a folder holds, `.` and `..` among them.
static inline int32_t names_in(const char *folder)
{
    DIR *directory = opendir(folder);
    int32_t names = 0;

    ck_assert_ptr_nonnull(directory);
    while (readdir(directory) != NULL)
        names++;
    (void)closedir(directory);
    return names;
}

// Defines main() for one suite with one case that holds the tests named by ADD.
#define SUITE_MAIN(suite_name, timeout_s, ADD)                                                     \
    int main(void)                                                                                 \
    {                                                                                              \
        Suite *suite = suite_create(suite_name);                                                   \
        TCase *tests = tcase_create(suite_name);                                                   \
        SRunner *runner;                                                                           \
        int failed;                                                                                \
                                                                                                   \
        tcase_set_timeout(tests, timeout_s);                                                       \
        ADD(tests);                                                                                \
        suite_add_tcase(suite, tests);                                                             \
        runner = srunner_create(suite);                                                            \
        srunner_run_all(runner, CK_ENV);                                                           \
        failed = srunner_ntests_failed(runner);                                                    \
        srunner_free(runner);                                                                      \
        return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;                                          \
    }

#endif
