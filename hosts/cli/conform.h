// What the rules of `moxie conform` share. A rule is one function that plays an engine against the
// plugin and judges one thing only: what else it sees go wrong belongs to another rule.
//
// Every function that returns an int here returns an enum verdict, VERDICT_PASS being 0, and has
// said why otherwise; TRY of fault.h passes it up.

#ifndef MOXIE_HOSTS_CLI_CONFORM_H
#define MOXIE_HOSTS_CLI_CONFORM_H

#include "abi.h"

#include <stdint.h>

enum verdict { VERDICT_PASS, VERDICT_FAIL, VERDICT_SKIP };

#define CHECK_WHERE_BYTES   128
#define CHECK_MESSAGE_BYTES 768

// One rule while it runs, or one rank of it.
struct check {
    const char *plugin; // path
    int trace;          // write every place to standard error, so that a crash has one
    int verdict;        // enum verdict
    char where[CHECK_WHERE_BYTES];
    char message[CHECK_MESSAGE_BYTES];
};

struct rule {
    const char *name;
    const char *holds; // what is true of a plugin that passes
    int (*run)(struct check *check);
    int needs_forward; // says nothing of a plugin that fails rule RULE_FORWARD: skipped in a walk
};

#define RULE_FORWARD "plain-forward"

extern const struct rule conform_rules[];
extern const int conform_rules_count;

const struct rule *rule_find(const char *name);

// A verdict as JSON and tables name it.
const char *verdict_name(int verdict);

// What precedes a place in a trace, and that of the thread which a signal ends.
#define TRACE_MARK "at: "
#define CRASH_MARK "crashed at: "

// From here on a fatal signal first writes the place of its thread. Ranks are threads, and the last
// place in the trace may be another rank's.
void trace_crashes(void);

// Names what is done next: the place of the verdict, should it go wrong.
void check_at(struct check *check, const char *format, ...) __attribute__((format(printf, 2, 3)));

// The verdicts. The first one stands.
int broken(struct check *check, const char *format, ...) __attribute__((format(printf, 2, 3)));
int skipped(struct check *check, const char *format, ...) __attribute__((format(printf, 2, 3)));

// A status in words, "INVALID".
const char *status_name(int32_t status);

// Fails unless `status` is `wanted`; `text` is what the plugin said.
int expect_status(struct check *check, int32_t status, int32_t wanted, const char *text);

// Whether a refusal's text holds `wanted`. A text that is empty or has no end is not judged here:
// rule error-text does.
int text_says(const char *text, uint64_t capacity, const char *wanted);

// The rules, by theme.
int rule_entry(struct check *check);
int rule_negotiation(struct check *check);
int rule_version_stamp(struct check *check);
int rule_tables(struct check *check);
int rule_layout_report(struct check *check);
int rule_probe(struct check *check);
int rule_error_text(struct check *check);
int rule_out_pointers(struct check *check);
int rule_extension_names(struct check *check);

int rule_struct_sizes_in(struct check *check);
int rule_struct_sizes_out(struct check *check);

int rule_base_accepted(struct check *check);
int rule_callbacks_required(struct check *check);
int rule_callbacks_optional(struct check *check);
int rule_config_absent(struct check *check);
int rule_config_wrong_type(struct check *check);
int rule_config_garbage(struct check *check);
int rule_config_snapshot(struct check *check);
int rule_validate_all_reasons(struct check *check);
int rule_plan_agrees(struct check *check);
int rule_plan_pure(struct check *check);
int rule_log_lines(struct check *check);

int rule_memory_planned(struct check *check);
int rule_memory_fences(struct check *check);
int rule_memory_freed(struct check *check);
int rule_memory_failure(struct check *check);
int rule_forward_allocates_nothing(struct check *check);
int rule_silence(struct check *check);

int rule_plain_forward(struct check *check);
int rule_weight_formats(struct check *check);
int rule_weight_layouts(struct check *check);
int rule_activations(struct check *check);
int rule_number_formats(struct check *check);
int rule_router_weight_on_input(struct check *check);
int rule_scaling_factor(struct check *check);
int rule_weights_updated(struct check *check);
int rule_deterministic(struct check *check);

int rule_no_expert_ids(struct check *check);
int rule_duplicate_ids(struct check *check);
int rule_id_spaces(struct check *check);
int rule_expert_map(struct check *check);
int rule_strided_tensors(struct check *check);
int rule_bad_tensors(struct check *check);
int rule_zero_tokens(struct check *check);
int rule_tokens_valid(struct check *check);
int rule_capacity(struct check *check);
int rule_call_order(struct check *check);
int rule_halves(struct check *check);
int rule_receive_layouts(struct check *check);

int rule_dead_handles(struct check *check);
int rule_close_refused(struct check *check);
int rule_close_and_reload(struct check *check);
int rule_thread_tags(struct check *check);
int rule_creates_at_once(struct check *check);
int rule_two_instances(struct check *check);
int rule_stats(struct check *check);
int rule_suspend(struct check *check);
int rule_capture(struct check *check);

int rule_ranks_forward(struct check *check);
int rule_ranks_idle(struct check *check);
int rule_ranks_halves(struct check *check);
int rule_ranks_in_flight(struct check *check);
int rule_ranks_differ(struct check *check);
int rule_ranks_bootstrap(struct check *check);
int rule_host_reduces(struct check *check);

int rule_routing(struct check *check);
int rule_expand(struct check *check);

#define PLAN_TEXT_BYTES 16384
// The plan of the base configuration in text, for rule plan-pure in another process.
int conform_plan(struct check *check, char text[PLAN_TEXT_BYTES]);

#endif
