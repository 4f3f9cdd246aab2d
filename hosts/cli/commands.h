// The commands. Each gets its own arguments, argv[0] being "moxie NAME", and returns an exit code;
// what it could not do stands in the fault, for main to print.

#ifndef MOXIE_HOSTS_CLI_COMMANDS_H
#define MOXIE_HOSTS_CLI_COMMANDS_H

#include "hosts/cli/fault.h"

int command_info(int argc, char **argv, struct fault *fault);
int command_plan(int argc, char **argv, struct fault *fault);
int command_check(int argc, char **argv, struct fault *fault);
int command_run(int argc, char **argv, struct fault *fault);
int command_bench(int argc, char **argv, struct fault *fault);
int command_conform(int argc, char **argv, struct fault *fault);

// A process that command_run or command_bench started.
int rank_process(struct fault *fault);

#endif
