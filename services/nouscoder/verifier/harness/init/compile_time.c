/* The time that counts, where CPU clocks do not tell it: wall or CPU time, times the share of a CPU that a program can
 * have.
 *
 * INVARIANT: the work of a program is never taken for that of others, because the share is measured while all of its
 * processes are stopped or dead.
 *
 * CPU clocks cannot tell a compiler that waits from one that is kept from the CPU, and those of gVisor go on while the
 * host runs something else. So init uses a CPU for a moment, and sees how often it loses it: after each step of a
 * compiler, and in gVisor after a run that has reached a time limit.
 */
#include "init.h"

#include <math.h>

enum { NUM_STEPS = 10, MOST_TIMES = 4 /* the limit, in wall time; as in session.py */ };
static const double MOMENT_S = 0.1, OWN_S = 0.003, GAP_S = 0.0002, NEARLY_ALL = 0.9;

/* The share of a CPU that this process gets. Two looks at the clock are less than 1 us apart, or others had the CPU. They
 * may be processes that gVisor has not stopped: there a process can be forked or continued meanwhile. */
static double share_of_cpu(void) {
    double own_s = 0, all_s = 0;
    for (double at_s, last_s = now_s(); all_s < MOMENT_S || own_s < OWN_S; last_s = at_s) {
        at_s = now_s();
        all_s += at_s - last_s;
        if (at_s - last_s < GAP_S) {
            own_s += at_s - last_s;
        } else {
            stop_all();
            at_s = now_s();
        }
    }
    return own_s > NEARLY_ALL * all_s ? 1 : own_s / all_s;
}

struct compile_time compile_time_from(const struct program *p, double begun_s) {
    double limit_s = p->compile_time_s;
    return (struct compile_time){limit_s, 0, begun_s, begun_s + limit_s / NUM_STEPS, begun_s + MOST_TIMES * limit_s};
}

/* At the end of a step: whether there is another one. */
bool may_go_on(struct compile_time *t) {
    stop_all();
    double share = share_of_cpu();
    continue_all();
    double at_s = now_s();
    t->used_s += share * (at_s - t->from_s); /* with the measurement, which a program of gVisor could make long */
    t->from_s = at_s;
    t->until_s = fmin(at_s + t->limit_s / NUM_STEPS, t->end_s);
    return !is_used_up(t) && at_s < t->end_s;
}

/* False after a compiler was stopped: others had the CPU. */
bool is_used_up(const struct compile_time *t) { return t->used_s > 0.999 * t->limit_s; }

/* The limit of a compiler's CPU time [s]. In gVisor it only bounds one that `compile_time` does not. */
double compile_cpu_s(const struct session *s) {
    return s->program.compile_time_s * (s->settings->gvisor ? MOST_TIMES : 1);
}

/* After the end of a run: in gVisor, count the CPU time of one that reached a time limit by the share that it could have.
 * The gateway repeats a run that reached its limit with little CPU time (time_limits.py). */
void count_by_share(const struct session *s, struct run *run) {
    if (s->settings->gvisor && run->ended == TIME_LIMIT) run->cpu_s *= share_of_cpu();
}

/* Answer that there is no program, and end the session. */
void refuse(struct session *s, enum kind kind, const char *why, size_t num_bytes) {
    end_all();
    send_frame(s, kind, why, num_bytes);
    await_end_frame(s);
}
