/* The loop of the warm interpreter: it makes a sandbox for each submission, and the next one while one is in use.
 *
 * INVARIANT: this process never reads a submission, so no data of one can reach the processes of the next.
 *
 * It is written in C because each page that Python code touches here would be copied after every fork.
 */
#include "init.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

/* Of the interpreter that loads this library. */
extern void *PyExc_OSError;
extern void *PyErr_SetFromErrnoWithFilename(void *type, const char *filename);

/* A sandbox. It is set up at once, and in use from `begin` to the end of its submission. */
struct sandbox {
    pid_t pid;
    int orders, report; /* pipes to and from it */
    const char *failed; /* the step that failed, with errno; else NULL */
};

/* Wait until all its processes have ended. Exits if it failed. */
static void reap(const struct sandbox *sandbox) {
    int status;
    while (waitpid(sandbox->pid, &status, 0) < 0)
        if (errno != EINTR) _exit(1);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != EXIT_ENDED)
        _exit(WIFEXITED(status) && WEXITSTATUS(status) == EXIT_STREAM_CLOSED ? 0 : 1);
}

static char read_report(const struct sandbox *sandbox) {
    char report = IS_FRESH;
    ssize_t n;
    while ((n = read(sandbox->report, &report, 1)) < 0 && errno == EINTR) {
    }
    if (n != 1) reap(sandbox);
    return report;
}

/* Give it the stream once it is set up. From then on it also exits if this process is killed. */
static void begin(const struct sandbox *sandbox, char network) {
    read_report(sandbox);
    if (!write_all(sandbox->orders, &network, 1)) reap(sandbox);
    close(sandbox->orders);
}

/* Wait until it has released the stream. Its namespaces may still be shutting down. */
static char await_release(const struct sandbox *sandbox) {
    char network = read_report(sandbox);
    close(sandbox->report);
    return network;
}

static bool write_file_of(pid_t pid, const char *name, const char *text) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/%s", (int)pid, name);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    bool well = fd >= 0 && write_all(fd, text, strlen(text));
    int number = errno;
    if (fd >= 0) close(fd);
    errno = number;
    return well;
}

/* Map the users of its fresh namespaces. */
static bool admit(const struct settings *settings, pid_t pid) {
    const char *map = settings->id_map;
    return !map || (write_file_of(pid, "setgroups", "deny") && write_file_of(pid, "uid_map", map) &&
                    write_file_of(pid, "gid_map", map));
}

/* Fork into new namespaces; the child is process 1 of a new pid namespace.
 *
 * This bypasses the fork hooks of glibc and the interpreter, so the child must not call abort() or create threads.
 * Processes that the child forks are normal again. The interpreter's hooks would copy a hundred pages (0.4 ms) to reset
 * the locks of other threads. Here there is only one thread, which holds the interpreter lock before and after the fork.
 * `candidate.after_fork` does the part of the hooks that a program can observe. */
static pid_t fork_into(uint64_t namespaces) {
    return (pid_t)syscall(SYS_clone, (long)(namespaces | SIGCHLD), 0L, 0L, 0L, 0L);
}

/* Make a sandbox. Returns the assignment in a candidate's process, else NULL. */
static void *stand_by(const struct settings *settings, struct sandbox *made) {
    int orders[2], report[2];
    *made = (struct sandbox){0};
    if (pipe2(orders, O_CLOEXEC) || pipe2(report, O_CLOEXEC)) {
        made->failed = "pipe";
        return NULL;
    }
    made->pid = fork_into(settings->namespaces);
    if (made->pid == 0) {
        close(orders[1]);
        close(report[0]);
        return nouscoder_init(settings, orders[0], report[1]);
    }
    made->orders = orders[1];
    made->report = report[0];
    if (made->pid < 0)
        made->failed = "clone";
    else if (!admit(settings, made->pid))
        made->failed = "the users of new namespaces";
    close(orders[0]);
    close(report[1]);
    if (!made->failed && !write_all(made->orders, "1", 1)) reap(made);
    return NULL;
}

/* Serve until the stream closes, which ends this process. Returns the assignment in a candidate's process. Returns NULL
 * with a Python exception (OSError) when a step fails. */
void *nouscoder_serve(const struct settings *settings) {
    struct sandbox last = {0}, current, following;
    char network = IS_FRESH;
    void *assignment = stand_by(settings, &current);
    const char *failed = current.failed;
    while (!assignment && !failed) {
        begin(&current, network);
        assignment = stand_by(settings, &following);
        if (assignment || (failed = following.failed)) break;
        if (last.pid) reap(&last);
        network = await_release(&current);
        if (network == IS_USED && !settings->gvisor && !new_network()) failed = "unshare";
        last = current;
        current = following;
    }
    return assignment ? assignment : PyErr_SetFromErrnoWithFilename(PyExc_OSError, failed);
}
