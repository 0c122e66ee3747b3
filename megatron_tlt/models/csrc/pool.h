/* A team of threads that run one function together, with barriers and a shared work counter. */
#ifndef TLT_POOL_H
#define TLT_POOL_H

typedef void (*TltTask)(void *arg, int thread, int threads);

/* Runs task on `threads` threads (the caller is thread 0) and returns when all are done. One team at a time;
 * a second caller waits. If threads cannot be started, fewer run. */
void tlt_pool_run(TltTask task, void *arg, int threads);

/* Inside a task: waits for the whole team, then restarts the work counter. */
void tlt_barrier(void);

/* Inside a task: the next unit of work, 0, 1, 2, ...; each number is given once between two barriers. */
long tlt_next_unit(void);

#define FOR_UNITS(i, count) for (long i = tlt_next_unit(); i < (long)(count); i = tlt_next_unit())

#endif
