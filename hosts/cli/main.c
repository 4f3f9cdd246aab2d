// The command `moxie`: an engine small enough to read, and the way to try the library by hand.

#include "hosts/cli/bootstrap.h"
#include "hosts/cli/commands.h"

#include "abi.h"

#include <argp.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct command {
    const char *name;
    char *full_name; // argv[0] of its parser and the start of its messages
    int (*run)(int argc, char **argv, struct fault *fault);
};

static const struct command commands[] = {
    {"info", (char[]){"moxie info"}, command_info},
    {"check", (char[]){"moxie check"}, command_check},
    {"plan", (char[]){"moxie plan"}, command_plan},
    {"run", (char[]){"moxie run"}, command_run},
    {"bench", (char[]){"moxie bench"}, command_bench},
    {"conform", (char[]){"moxie conform"}, command_conform},
};

static const char doc[] =
    "Mixture-of-Experts layers through libmoxie.\n"
    "\nCommands:\n"
    "  info     what the library is, and what it can do on this machine\n"
    "  check    whether a configuration can work, and if not, every reason\n"
    "  plan     every buffer of a configuration, and the token bounds behind it\n"
    "  run      one layer of a checkpoint, over R processes, beside its reference\n"
    "  bench    how fast a layer runs, as a share of what this machine allows\n"
    "  conform  whether a library keeps the contract, rule by rule\n"
    "\vEvery command has --help. Exit codes: 0 done, 1 usage or file error, 2 refused (or a rule "
    "of conform is broken), 3 result outside --tolerance.";

// Which command, and where its arguments start.
struct choice {
    const struct command *command;
    int first;
};

static error_t parse(int key, char *text, struct argp_state *state)
{
    struct choice *choice = state->input;

    switch (key) {
    case ARGP_KEY_ARG:
        for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++)
            if (strcmp(commands[i].name, text) == 0) choice->command = &commands[i];
        if (choice->command == NULL)
            argp_error(state,
                       "no command \"%s\"; there are info, check, plan, run, bench and conform",
                       text);
        choice->first = state->next - 1;
        state->next = state->argc;
        return 0;
    case ARGP_KEY_NO_ARGS:
        argp_error(state, "a command is wanted: info, check, plan, run, bench or conform");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

// Prints what could not be done. A command that has explained itself leaves the text empty.
static void explain(const struct fault *fault)
{
    if (fault->text[0] != '\0')
        (void)fprintf(stderr, "%s: %s\n", program_invocation_name, fault->text);
}

static void print_version(FILE *stream, struct argp_state *state)
{
    (void)state;
    (void)fprintf(stream, "moxie %d.%d.%d\n", MOXIE_VERSION_MAJOR, MOXIE_VERSION_MINOR,
                  MOXIE_VERSION_PATCH);
}

// At the very end, whoever ended the program, argp's --help too: a result that nobody received is
// no success.
static void check_output(void)
{
    int lost = ferror(stdout);
    int flushed = fflush(stdout);

    if (flushed != 0)
        (void)fprintf(stderr, "%s: cannot write the output: %s\n", program_invocation_name,
                      strerror(errno));
    else if (lost)
        (void)fprintf(stderr, "%s: the output could not be written whole\n",
                      program_invocation_name);
    if (flushed != 0 || lost) _exit(EXIT_TROUBLE);
}

int main(int argc, char **argv)
{
    const struct argp argp = {.parser = parse, .args_doc = "COMMAND [ARGUMENT...]", .doc = doc};
    struct choice choice = {NULL, 0};
    struct fault fault = {.code = EXIT_OK};
    int code = EXIT_OK;

    if (argc == 2 && strcmp(argv[1], BOOTSTRAP_ARGUMENT) == 0) {
        code = rank_process(&fault);
        explain(&fault);
        return code;
    }
    (void)signal(SIGXFSZ, SIG_IGN); // a file that may not grow fails as one that is full
    (void)signal(SIGCHLD, SIG_DFL); // or how a rank died is lost, and its number may be another's
    (void)atexit(check_output);
    argp_program_version_hook = print_version;
    argp_err_exit_status = EXIT_TROUBLE;
    (void)argp_parse(&argp, argc, argv, ARGP_IN_ORDER, NULL, &choice);
    program_invocation_name = choice.command->full_name;
    argv[choice.first] = choice.command->full_name;
    code = choice.command->run(argc - choice.first, argv + choice.first, &fault);
    explain(&fault);
    return code;
}
