/* LD_PRELOAD: the wall clock of a process jumps by up to ten years, forth and back, every 50 looks at it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/time.h>
#include <time.h>

static long jump(void) {
    static atomic_uint looks;
    static const long day = 86400, jumps[] = {0, 1, -1, 3600, -3600, 86400, -86400, 3650 * day, -3650 * day};
    unsigned era = atomic_fetch_add(&looks, 1) / 50;
    return jumps[(era * 2654435761u >> 7) % (sizeof jumps / sizeof *jumps)];
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(clock, now);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += jump();
    return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec fine;
    (void)zone;
    int status = clock_gettime(CLOCK_REALTIME, &fine);
    now->tv_sec = fine.tv_sec;
    now->tv_usec = fine.tv_nsec / 1000;
    return status;
}

time_t time(time_t *now) {
    struct timespec fine;
    clock_gettime(CLOCK_REALTIME, &fine);
    if (now) *now = fine.tv_sec;
    return fine.tv_sec;
}
