// The signals by which a user ends the command, held back while something must not be left half
// done.

#ifndef MOXIE_HOSTS_CLI_INTERRUPTS_H
#define MOXIE_HOSTS_CLI_INTERRUPTS_H

#include <signal.h>

struct interrupts {
    sigset_t held, mask_before;
};

// Holds back SIGINT, SIGTERM and SIGHUP. One that this process was started to ignore, as by nohup,
// stays ignored: held back, it would be kept.
void interrupts_hold(struct interrupts *interrupts);
// 1 when one has come.
int interrupts_came(const struct interrupts *interrupts);
// Gives them back; one that came meanwhile now takes its usual course.
void interrupts_deliver(const struct interrupts *interrupts);

#endif
