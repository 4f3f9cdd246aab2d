// The faults that can be planted into the mock, one per library, or, below a FAULTS_NAME, all of
// them in the library NAME: each breaks rules that no other there does. README.md says which;
// libmoxie_mock.so itself has none.

#ifndef MOXIE_MOCK_FAULT_H
#define MOXIE_MOCK_FAULT_H

enum mock_fault {
    FAULT_NONE,
    // the tables
    FAULT_NULL_SLOT,
    FAULT_NULL_DISPATCHER_SLOT,
    FAULT_WRONG_VERSION,
    FAULT_WRONG_LAYOUT,
    FAULT_NO_NEGOTIATION,
    // structs, handles, order
    FAULT_IGNORED_TAIL,
    FAULT_SHORT_STRUCT,
    FAULT_DEAD_HANDLE,
    FAULT_CLOSE_TOO_EARLY,
    FAULT_ANY_ORDER,
    FAULT_IGNORED_THREAD,
    FAULT_INIT_AT_ONCE,
    FAULT_GARBAGE_OUT,
    // errors
    FAULT_LOST_ERROR,
    FAULT_EMPTY_TEXT,
    FAULT_UNTERMINATED_TEXT,
    FAULT_TEXT_OVERRUN,
    FAULT_WRITE_ON_REFUSAL,
    // configuration, verdict, plan
    FAULT_WRONG_TYPE_TAKEN,
    FAULT_READS_AGAIN,
    FAULT_ONE_REASON,
    FAULT_IMPURE_PLAN,
    FAULT_READS_ENVIRONMENT,
    // memory
    FAULT_ASKS_FOR_MORE,
    FAULT_LEAK,
    FAULT_DOUBLE_RELEASE,
    FAULT_WRITE_PAST_PLAN,
    FAULT_ALLOCATION_IN_FORWARD,
    // a step
    FAULT_WRONG_SUM,
    FAULT_LEAKING_ID,
    FAULT_NEGATIVE_ID,
    FAULT_IGNORED_TOKENS_VALID,
    FAULT_WRONG_ORDER_OF_HALVES,
    FAULT_EMPTY_STEP_CRASH,
    FAULT_HANG,
    FAULT_PRINTS,
    // where a host comes in: little is left for others
    FAULT_NOTHING_ACCEPTED,
    FAULT_ONE_HOST,

    FAULTS_DOOR,
    FAULT_SECOND_TABLE,
    FAULT_EMPTY_REASON,
    FAULT_ANY_VERSION_OF_AN_EXTENSION,
    FAULT_HALF_ALLOCATOR,
    FAULT_WANTS_LOG,
    FAULT_NOTHING_REQUIRED,
    FAULT_OVERFLOW_CRASH,
    FAULT_CREATES_REFUSED,
    FAULT_LOG_NEWLINE,

    FAULTS_NUMBERS,
    FAULT_ONE_SCALE_OF_CHANNELS,
    FAULT_GELU_BY_TANH,
    FAULT_BF16_AS_F16,
    FAULT_WEIGHT_TWICE,
    FAULT_SCALES_TWICE,
    FAULT_DEAF_TO_UPDATES,
    FAULT_DRIFTS,

    FAULTS_STEP,
    FAULT_BEGIN_INSIDE,
    FAULT_ONE_ROUND,
    FAULT_ONCE_EACH,
    FAULT_ANY_ID_SPACE,
    FAULT_MAP_FALLS_THROUGH,
    FAULT_IGNORED_OFFSET,
    FAULT_LOST_COMBINE,
    FAULT_LOST_HALF,
    FAULT_WEIGHTLESS_ROWS,
    FAULT_TIE_TO_HIGHER,
    FAULT_HALF_FOLD,

    FAULTS_LIFE,
    FAULT_IGNORED_ANSWER,
    FAULT_LIVES_ONCE,
    FAULT_FOREIGN_RUNNER,
    FAULT_UNCOUNTED_TOKENS,
    FAULT_LONE_RESUME,
    FAULT_CAPTURED_OVER,
    FAULT_ANOTHER_BATCH,

    FAULTS_RANKS,
    FAULT_LOST_RANK,
    FAULT_SHARED_SLOTS,
    FAULT_IGNORED_DIFFERENCE,
    FAULT_ALONE,
    FAULT_LOST_PART,
};

// The first fault that is planted, and the last.
#ifndef MOCK_FAULT
#define MOCK_FAULT FAULT_NONE
#endif
#ifndef MOCK_FAULT_LAST
#define MOCK_FAULT_LAST MOCK_FAULT
#endif

extern const enum mock_fault mock_fault, mock_fault_last;

#define HAS_FAULT(fault) ((fault) >= mock_fault && (fault) <= mock_fault_last)
// Where a constant is wanted. A library with such a fault is compiled as a whole (CMakeLists.txt).
#define TABLE_HAS_FAULT(fault) ((fault) >= MOCK_FAULT && (fault) <= MOCK_FAULT_LAST)

#endif
