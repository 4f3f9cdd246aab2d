// Signals that end the command, held back for a while.

#include "hosts/cli/interrupts.h"

#include <stddef.h>

static const int numbers[] = {SIGINT, SIGTERM, SIGHUP};

void interrupts_hold(struct interrupts *interrupts)
{
    struct sigaction before;

    (void)sigemptyset(&interrupts->held);
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        if (sigaction(numbers[i], NULL, &before) == 0 && before.sa_handler != SIG_IGN)
            (void)sigaddset(&interrupts->held, numbers[i]);
    (void)sigprocmask(SIG_BLOCK, &interrupts->held, &interrupts->mask_before);
}

int interrupts_came(const struct interrupts *interrupts)
{
    sigset_t pending;

    (void)sigpending(&pending);
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        if (sigismember(&interrupts->held, numbers[i]) == 1 &&
            sigismember(&pending, numbers[i]) == 1)
            return 1;
    return 0;
}

void interrupts_deliver(const struct interrupts *interrupts)
{
    (void)sigprocmask(SIG_SETMASK, &interrupts->mask_before, NULL);
}
