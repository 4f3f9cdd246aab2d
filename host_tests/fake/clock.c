// A time of day that is set all the time: an hour forward at each time(), and an hour back for
// clock_gettime(). A deadline that is counted by it has passed when it is looked at.

#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define HOUR_S 3600

EXPORT time_t time(time_t *seconds)
{
    static _Atomic time_t forward;
    struct timespec now;
    time_t set;

    (void)syscall(SYS_clock_gettime, CLOCK_REALTIME, &now);
    set = now.tv_sec + atomic_fetch_add(&forward, HOUR_S);
    if (seconds != NULL) *seconds = set;
    return set;
}

EXPORT int clock_gettime(clockid_t clock, struct timespec *now)
{
    const int answer = (int)syscall(SYS_clock_gettime, clock, now);

    if (answer == 0 && clock == CLOCK_REALTIME) now->tv_sec -= HOUR_S;
    return answer;
}
