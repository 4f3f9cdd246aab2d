// What all commands share on the command line.

#ifndef MOXIE_HOSTS_CLI_OPTIONS_H
#define MOXIE_HOSTS_CLI_OPTIONS_H

#include <argp.h>
#include <jansson.h>
#include <stdint.h>

// Options of every command. A command whose parser has common_argp as its child hands this over as
// the child's input.
struct common_options {
    const char *plugin; // NULL: look for it
    int json;
    int verbose;
};

extern const struct argp common_argp;

// Options of the commands that start ranks, common ones included; rank_argp in the same way.
struct rank_options {
    struct common_options common;
    int64_t ranks;
    int64_t threads; // per rank; 0: cores / ranks
    int64_t timeout_s;
    const char *runner;          // NULL: auto
    const char *dispatcher;      // NULL: auto
    const char *dispatch_format; // NULL: input
    int64_t dispatch_sms;        // 0: all
    const char *device;          // NULL: that of the runner
};

extern const struct argp rank_argp;

// Defaults of rank_options.
void rank_options_init(struct rank_options *options);

// Puts what the options say about runner, dispatcher, device and waiting into a configuration.
void rank_options_configure(const struct rank_options *options, json_t *config);

// How long the command hears nothing from a rank before it ends the run. That is longer than the
// library waits (timeout_ms): of a rank that hangs, the ranks that wait for it know better which
// one it is, and get the time to say so.
int64_t rank_silence_ms(const struct rank_options *options);

// Threads of one rank.
int64_t rank_threads(const struct rank_options *options);

// An integer in least..most; anything else is a usage error, which ends the program.
int64_t option_integer(const struct argp_state *state, const char *option, const char *text,
                       int64_t least, int64_t most);
// As option_integer, for a finite number from 0 up.
double option_number(const struct argp_state *state, const char *option, const char *text);
// As option_integer, for a path: any text but none.
const char *option_path(const struct argp_state *state, const char *option, const char *text);

#endif
