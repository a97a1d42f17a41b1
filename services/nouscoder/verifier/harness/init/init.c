/* The life of process 1: settle, take over the stream, serve one submission, leave.
 *
 * INVARIANT: a run starts only when no process but this one lives in the pid namespace and /tmp holds nothing but what
 * every run of the submission finds there and what this one is given.
 */
#include "init.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/securebits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { NUM_FILES = 512 };

static struct session session;

double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Out of the low numbers, which belong to the files of a run. */
int move_up(int fd) {
    if (fd >= FIRST_OWN_FD) return fd;
    int moved = fcntl(fd, F_DUPFD_CLOEXEC, FIRST_OWN_FD);
    if (moved < 0) fail(&session, "descriptors: %s", strerror(errno));
    close(fd);
    return moved;
}

void *allocated(void *memory) {
    if (!memory) fail(&session, "no memory");
    return memory;
}

static void await_order(struct session *s) {
    char order;
    if (read(s->orders, &order, 1) != 1) _exit(EXIT_STREAM_CLOSED); /* the zygote is gone */
}

/* The zygote hands the stream over only when it has read the byte of this one: had it been killed before we asked to
 * die with it, the order would never come and the wait for it ends. */
static void await_stream(struct session *s) {
    if (!write_all(s->report, "1", 1)) _exit(EXIT_STREAM_CLOSED);
    await_order(s);
    close(s->orders);
    s->owns_stream = true;
}

static char problem[512]; /* told when the stream is ours */

_Noreturn void fail(struct session *s, const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(problem, sizeof problem, format, values);
    va_end(values);
    if (!s->owns_stream) await_stream(s);
    send_frame(s, FAILED, problem, strlen(problem));
    _exit(EXIT_FAILED);
}

/* The stream is free as soon as the byte is out; taking the namespaces down takes longer. */
_Noreturn void leave(struct session *s) {
    if (!write_all(s->report, "1", 1)) _exit(EXIT_STREAM_CLOSED);
    _exit(EXIT_ENDED);
}

static int mount_proc(struct session *s, const char *options) {
    if (mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, options))
        fail(s, "mount proc on /proc: %s", strerror(errno));
    int fd = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) fail(s, "/proc: %s", strerror(errno));
    return move_up(fd);
}

/* Mount /proc for candidates; returns a descriptor of one that shows init every process. With two users init is told
 * apart by its group; with one it has a proc of its own, hidden by the one that candidates see; gVisor has no hidepid. */
static int show_processes(struct session *s) {
    if (s->settings->gvisor) return mount_proc(s, NULL);
    if (s->settings->two_users) return mount_proc(s, "hidepid=invisible,gid=0,subset=pid");
    int own = mount_proc(s, "subset=pid");
    close(mount_proc(s, "hidepid=invisible,subset=pid"));
    return own;
}

static void limit(struct session *s, int kind, rlim_t value) {
    struct rlimit both = {value, value};
    if (setrlimit(kind, &both)) fail(s, "setrlimit: %s", strerror(errno));
}

static void control(struct session *s, int option, unsigned long value, const void *pointer) {
    if (prctl(option, value, pointer, 0, 0)) fail(s, "prctl %d: %s", option, strerror(errno));
}

/* What every process of a submission inherits, init among them. init keeps its capabilities over its own namespaces;
 * the filter allows it (and so everybody) mount and umount2, which the kernel refuses to a process without them. */
static void confine_session(struct session *s) {
    setpgid(0, 0);
    limit(s, RLIMIT_NOFILE, NUM_FILES);
    limit(s, RLIMIT_CORE, 0);
    limit(s, RLIMIT_MEMLOCK, 0);
    if (!s->settings->gvisor) { /* the sentry has no securebits, and a candidate there cannot become user 0 */
        limit(s, RLIMIT_MSGQUEUE, 0);
        control(s, PR_SET_SECUREBITS, SECBIT_NOROOT | SECBIT_NOROOT_LOCKED | SECBIT_NO_SETUID_FIXUP_LOCKED, NULL);
    }
    control(s, PR_SET_NO_NEW_PRIVS, 1, NULL);
    control(s, PR_SET_SECCOMP, 2, s->settings->filter);
}

static void settle(struct session *s) {
    sigset_t interrupt;
    sigemptyset(&interrupt);
    sigaddset(&interrupt, SIGINT);
    if (setresgid(0, 0, 0) || setresuid(0, 0, 0)) fail(s, "users: %s", strerror(errno));
    sigprocmask(SIG_BLOCK, &interrupt, NULL);
    control(s, PR_SET_PDEATHSIG, SIGKILL, NULL);
    control(s, PR_SET_DUMPABLE, 0, NULL);
    s->proc_fd = show_processes(s);
    /* Files of the runs live in a tmpfs that the candidate's /tmp then hides; only this descriptor leads there. */
    if (mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=700"))
        fail(s, "mount tmpfs on /tmp: %s", strerror(errno));
    s->files_dir = open("/tmp", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (s->files_dir < 0) fail(s, "/tmp: %s", strerror(errno));
    s->files_dir = move_up(s->files_dir);
    mount_work(s);
    confine_session(s);
}

static void send_outcome(struct session *s, struct run *run, bool in_time) {
    finish(s, run, in_time);
    send_result(s, run);
    clean(s);
    free(s->arguments.bytes);
    s->arguments = (struct frame){0};
}

/* One test. True in a candidate's process only. */
static bool run_test(struct session *s, struct frame *frame) {
    struct run run = {.program = &s->program};
    bool talks = frame->kind == TALK;
    read_arguments(s);
    if (s->go >= 0 && !talks) {
        release_first(s, &run, frame);
    } else {
        if (s->go >= 0) drop_first(s);
        open_files(s, &run);
        if (talks) {
            if (start_talk(s, &run)) return true;
        } else {
            fill_stdin(s, &run, frame);
            if (s->program.is_command ? spawn_command(s, &run) : spawn_python(s, &run)) return true;
        }
    }
    bool in_time = talks ? talk(s, &run, frame) : await_end(s, &run);
    free(frame->bytes);
    send_outcome(s, &run, in_time);
    return false;
}

static void serve(struct session *s) {
    struct frame frame = next_frame(s);
    if (frame.kind == END) leave(s);
    if (frame.kind != PROGRAM) fail(s, "expected PROGRAM, not kind %d", frame.kind);
    read_program(s, frame);
    if (s->program.is_command)
        start_command(s);
    else if (start_python(s))
        return;
    for (;;) {
        frame = next_frame(s);
        switch (frame.kind) {
        case ARGUMENTS:
            free(s->arguments.bytes);
            s->arguments = frame;
            break;
        case INPUT: /* for a conversation that has ended */
        case INPUT_END:
            free(frame.bytes);
            break;
        case END:
            end_all();
            leave(s);
        case RUN:
        case TALK:
            if (run_test(s, &frame)) return;
            break;
        default:
            fail(s, "expected RUN, not kind %d", frame.kind);
        }
    }
}

/* In a fresh fork of the zygote. At the first byte of `orders` it settles and leaves a byte in `report`; at the second
 * it takes the stream over; at the end it leaves another byte. Returns in a candidate's process only, confined, with
 * what it is told. */
void *nouscoder_init(const struct settings *settings, int orders, int report) {
    struct session *s = &session;
    *s = (struct session){.settings = settings, .report = report, .orders = orders, .go = -1, .args = ""};
    await_order(s); /* the zygote has written our id maps */
    settle(s);
    s->report = move_up(report);
    await_stream(s); /* until the submission before has ended */
    send_frame(s, READY, NULL, 0);
    serve(s);
    return assignment_of(s);
}
