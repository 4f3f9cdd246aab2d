// moxie conform: whether a plugin keeps the contract.

#include "hosts/cli/commands.h"
#include "hosts/cli/conform.h"
#include "hosts/cli/conform_walk.h"
#include "hosts/cli/json_file.h"
#include "hosts/cli/options.h"
#include "hosts/cli/plugin.h"
#include "hosts/cli/progress.h"
#include "hosts/cli/table.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#define DEADLINE_DEFAULT_S 60

struct conform_options {
    struct common_options common;
    const char *rule; // NULL: all, each in a process of its own
    int64_t deadline_s;
    int list, trace, print_plan;
};

enum option_key {
    OPTION_RULE = 0x2000,
    OPTION_LIST,
    OPTION_DEADLINE,
    OPTION_TRACE,
    OPTION_PRINT_PLAN,
};

static const struct argp_option table[] = {
    {"rule", OPTION_RULE, "NAME", 0,
     "check only this rule, in this process: for a debugger, or after a crash", 0},
    {"list", OPTION_LIST, NULL, 0, "print every rule and what has to hold", 0},
    {"deadline", OPTION_DEADLINE, "SECONDS", 0, "how long one rule may take (default 60)", 0},
    {"trace", OPTION_TRACE, NULL, 0, "with --rule: print each of its steps before it is taken", 0},
    {"print-plan", OPTION_PRINT_PLAN, NULL, OPTION_HIDDEN, NULL, 0},
    {0},
};

static const char doc[] =
    "Walks a plugin through the whole contract of abi.h and gives a verdict per rule. A rule "
    "judges one thing, in a process of its own, so that a plugin that crashes or hangs breaks that "
    "rule and no other. The exit code is 2 if a rule is broken."
    "\vWhat a plugin does not offer (a format, a dispatcher, an extension) is skipped.\n\n"
    "Example:\n"
    "  moxie conform --plugin PATH/libother.so";

static error_t parse(int key, char *text, struct argp_state *state)
{
    struct conform_options *options = state->input;

    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &options->common;
        return 0;
    case OPTION_RULE:
        if (options->rule != NULL) argp_error(state, "--rule: one at a time");
        options->rule = text;
        if (rule_find(text) == NULL) argp_error(state, "no rule \"%s\"; --list prints them", text);
        return 0;
    case OPTION_LIST:
        options->list = 1;
        return 0;
    case OPTION_DEADLINE:
        options->deadline_s = option_integer(state, "--deadline", text, 1, 86400);
        return 0;
    case OPTION_TRACE:
        options->trace = 1;
        return 0;
    case OPTION_PRINT_PLAN:
        options->print_plan = 1;
        return 0;
    case ARGP_KEY_END:
        if (options->trace && options->rule == NULL)
            argp_error(state, "--trace is of one rule: say which with --rule NAME");
        return 0;
    case ARGP_KEY_ARG:
        argp_error(state, "\"%s\": no argument is wanted; the plugin is --plugin PATH", text);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_child children[] = {{&common_argp, 0, NULL, 0}, {0}};
static const struct argp argp = {
    .options = table, .parser = parse, .doc = doc, .children = children};

static int list_rules(const struct conform_options *options, struct fault *fault)
{
    json_t *rows = options->common.json ? json_array() : NULL;
    struct table listed;

    if (options->common.json) {
        for (int i = 0; i < conform_rules_count; i++)
            (void)json_array_append_new(rows, json_pack("{s:s, s:s}", "name", conform_rules[i].name,
                                                        "holds", conform_rules[i].holds));
        return json_print(json_pack("{s:o}", "rules", rows), fault);
    }
    table_init(&listed, 2, 0, NULL);
    for (int i = 0; i < conform_rules_count; i++)
        table_row(&listed, (const char *const[]){conform_rules[i].name, conform_rules[i].holds});
    table_print(&listed, 0);
    table_fini(&listed);
    return EXIT_OK;
}

// Turns standard output to standard error while the plugin runs: only the verdict may stand there,
// and a plugin that prints is judged by a rule of its own. Returns what turn_back takes, or -1.
static int turn_output(struct fault *fault)
{
    int kept = -1;

    (void)fflush(stdout);
    kept = dup(STDOUT_FILENO);
    if (kept >= 0 && dup2(STDERR_FILENO, STDOUT_FILENO) >= 0) return kept;
    (void)fault_set(fault, EXIT_TROUBLE, "standard output: %s", strerror(errno));
    if (kept >= 0) (void)close(kept);
    return -1;
}

static void turn_back(int kept)
{
    (void)fflush(stdout);
    (void)dup2(kept, STDOUT_FILENO);
    (void)close(kept);
}

// What was seen so far.
struct result {
    json_t *rows;
    struct table table;
    int counts[VERDICT_SKIP + 1];
};

static void add(struct result *result, const struct rule *rule, struct check *check)
{
    if (check->verdict == VERDICT_PASS) check->where[0] = '\0';
    result->counts[check->verdict]++;
    (void)json_array_append_new(result->rows, walk_row(rule, check));
    table_cell(&result->table, 0, "%s", rule->name);
    table_cell(&result->table, 1, "%s", verdict_name(check->verdict));
    table_cell(&result->table, 2, "%s%s%s", check->where, check->where[0] != '\0' ? ": " : "",
               check->message);
}

static int run_one(const struct conform_options *options, const char *plugin, struct result *result,
                   struct fault *fault)
{
    const struct rule *rule = rule_find(options->rule);
    struct check check = {.plugin = plugin, .trace = options->trace};
    int kept = -1;

    if (options->trace) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        trace_crashes();
    }
    kept = turn_output(fault);
    if (kept < 0) return EXIT_TROUBLE;
    (void)rule->run(&check);
    turn_back(kept);
    add(result, rule, &check);
    return EXIT_OK;
}

static int run_all(const struct conform_options *options, const char *plugin, struct result *result,
                   struct fault *fault)
{
    const struct walk walk = {plugin, options->deadline_s, options->common.verbose};
    struct progress progress;
    struct check check;
    int forward_works = 1;
    int st = EXIT_OK;

    progress_init(&progress);
    for (int i = 0; i < conform_rules_count; i++) {
        const struct rule *rule = &conform_rules[i];

        progress_show(&progress, rule->name, (double)i / conform_rules_count);
        check = (struct check){.plugin = plugin};
        if (rule->needs_forward && !forward_works)
            (void)skipped(&check, "a plain forward does not work (rule " RULE_FORWARD ")");
        else
            TRY(walk_rule(&walk, rule, &check, fault));
        if (strcmp(rule->name, RULE_FORWARD) == 0) forward_works = check.verdict != VERDICT_FAIL;
        add(result, rule, &check);
    }
out:
    progress_clear(&progress);
    return st;
}

static int show(const struct conform_options *options, const char *plugin,
                const struct result *result, struct fault *fault)
{
    const int *counts = result->counts;
    int ok = counts[VERDICT_FAIL] == 0;
    int st = EXIT_OK;

    if (options->common.json) {
        st = json_print(json_pack("{s:b, s:o, s:O}", "ok", ok, "plugin", json_text(plugin), "rules",
                                  result->rows),
                        fault);
    } else {
        table_print(&result->table, 0);
        (void)printf("%s: %d rule%s hold%s, %d broken, %d skipped\n", plugin, counts[VERDICT_PASS],
                     counts[VERDICT_PASS] == 1 ? "" : "s", counts[VERDICT_PASS] == 1 ? "s" : "",
                     counts[VERDICT_FAIL], counts[VERDICT_SKIP]);
    }
    return st != EXIT_OK || ok ? st : EXIT_REFUSED;
}

static int print_plan(const char *plugin, struct fault *fault)
{
    static char text[PLAN_TEXT_BYTES];
    struct check check = {.plugin = plugin};
    int kept = turn_output(fault);

    if (kept < 0) return EXIT_TROUBLE;
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    (void)conform_plan(&check, text);
    turn_back(kept);
    if (check.verdict != VERDICT_PASS)
        return fault_set(fault, EXIT_REFUSED, "%s: %s", check.where, check.message);
    (void)fputs(text, stdout);
    return EXIT_OK;
}

int command_conform(int argc, char **argv, struct fault *fault)
{
    static const char *const heading[] = {"rule", "verdict", "what was seen"};
    struct conform_options options = {.deadline_s = DEADLINE_DEFAULT_S};
    struct plugin plugin = {0};
    struct result result = {0};
    int st = EXIT_OK;

    (void)argp_parse(&argp, argc, argv, 0, NULL, &options);
    if (options.list) return list_rules(&options, fault);
    TRY(plugin_find(&plugin, options.common.plugin, fault));
    TRY(plugin_check_file(&plugin, options.common.plugin, fault));
    TRY(plugin_check_name(&plugin, options.common.plugin, options.deadline_s, fault));
    if (options.print_plan) return print_plan(plugin.path, fault);
    result.rows = json_array();
    table_init(&result.table, 3, 0, heading);
    TRY(options.rule != NULL ? run_one(&options, plugin.path, &result, fault)
                             : run_all(&options, plugin.path, &result, fault));
    st = show(&options, plugin.path, &result, fault);
out:
    if (result.rows != NULL) table_fini(&result.table);
    json_decref(result.rows);
    return st;
}
