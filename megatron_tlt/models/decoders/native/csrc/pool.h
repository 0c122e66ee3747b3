/* A team of threads for one forward: the caller drives, helpers take units of whatever stage is current. */
#ifndef TLT_POOL_H
#define TLT_POOL_H

typedef void (*TltUnit)(void *arg, long unit);

/* Opens the team: the caller plus at most threads - 1 helpers (fewer if they cannot be started). One team is open at
 * a time; a second caller waits. */
void tlt_team_open(int threads);

/* Runs unit(arg, 0 .. count-1), in any order, on any thread of the team; returns when all are done. */
void tlt_parallel(long count, TltUnit unit, void *arg);

void tlt_team_close(void);

#endif
