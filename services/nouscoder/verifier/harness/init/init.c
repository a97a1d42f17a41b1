/* The steps of process 1: set up, take over the stream, serve one submission, exit.
 *
 * INVARIANT: a run starts only when this is the only process in the pid namespace, and /tmp holds only the files that
 * every run of the submission starts with and the files sent for this run.
 */
#include "init.h"
#include "dialogue.h"
#include "folder.h"
#include "process.h"
#include "program.h"
#include "stream.h"
#include "zygote.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/seccomp.h>
#include <linux/securebits.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void install_filter(struct session *s);
static void renew_network(struct session *s);

enum { NUM_FILES = 512 };

static struct session session;

double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Move a descriptor away from the low numbers, which the files of a run use. */
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

static char await_order(struct session *s) {
    char order;
    if (read(s->orders, &order, 1) != 1) _exit(EXIT_STREAM_CLOSED); /* the zygote has exited */
    return order;
}

/* The zygote gives the stream only to a sandbox whose byte it has read. If it was killed before PR_SET_PDEATHSIG took
 * effect, the order never comes, and this process exits when the pipe closes. */
static void await_stream(struct session *s) {
    if (!write_all(s->report, "1", 1)) _exit(EXIT_STREAM_CLOSED);
    bool is_used = await_order(s) == IS_USED;
    close(s->orders);
    s->owns_stream = true;
    s->network_is_used = is_used && !s->has_own_network;
}

static char problem[512]; /* sent once this process owns the stream */

_Noreturn void fail(struct session *s, const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(problem, sizeof problem, format, values);
    va_end(values);
    if (!s->owns_stream) await_stream(s);
    send_frame(s, FAILED, problem, strlen(problem));
    _exit(EXIT_FAILED);
}

/* The byte releases the stream at once. The kernel takes longer to remove the namespaces. */
_Noreturn void leave(struct session *s) {
    char report = s->used_shared ? IS_USED : IS_FRESH;
    if (!write_all(s->report, &report, 1)) _exit(EXIT_STREAM_CLOSED);
    _exit(EXIT_ENDED);
}

static int mount_proc(struct session *s, const char *options) {
    if (mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, options))
        fail(s, "mount proc on /proc: %s", strerror(errno));
    int fd = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) fail(s, "/proc: %s", strerror(errno));
    return move_up(fd);
}

/* Mount /proc with an empty folder as that of init. */
static void mount_proc_without_init(struct session *s) {
    close(mount_proc(s, NULL));
    if (mount("tmpfs", "/proc/1", "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=555"))
        fail(s, "mount tmpfs on /proc/1: %s", strerror(errno));
}

/* Mount /proc for candidates. Returns a descriptor of a proc mount that shows every process to init.
 *
 * With two users, hidepid exempts init by its group. With one user, and in gVisor, which has no hidepid and shows the
 * namespaces of others, init has a separate mount, which the mount for candidates hides. */
static int show_processes(struct session *s) {
    if (s->settings->two_users && !s->settings->gvisor) return mount_proc(s, "hidepid=invisible,gid=0,subset=pid");
    int own = mount_proc(s, s->settings->gvisor ? NULL : "subset=pid");
    if (s->settings->gvisor)
        mount_proc_without_init(s);
    else
        close(mount_proc(s, "hidepid=invisible,subset=pid"));
    return own;
}

/* The file that sets the next process id in the writer's namespace. Only a complete proc mount has it: that of the
 * zygote, or one of this process where a container's is read-only. */
static int open_last_pid(struct session *s) {
    if (s->settings->gvisor || s->settings->last_pid >= 0) return s->settings->last_pid;
    close(mount_proc(s, NULL));
    int fd = open("/proc/sys/kernel/ns_last_pid", O_WRONLY | O_CLOEXEC);
    if (umount2("/proc", MNT_DETACH)) fail(s, "umount /proc: %s", strerror(errno));
    return fd < 0 ? -1 : move_up(fd);
}

static void limit(struct session *s, int kind, rlim_t value) {
    struct rlimit both = {value, value};
    if (setrlimit(kind, &both)) fail(s, "setrlimit: %s", strerror(errno));
}

static void control(struct session *s, int option, unsigned long value, const void *pointer) {
    if (prctl(option, value, pointer, 0, 0)) fail(s, "prctl %d: %s", option, strerror(errno));
}

/* Confine this process and all its children, that is, every process of the submission. init keeps the capabilities in
 * its own namespaces. The filter allows mount and umount2, because init needs them; the kernel refuses both calls to a
 * process without capabilities. */
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
    install_filter(s);
}

static void set_up(struct session *s) {
    sigset_t interrupt;
    sigemptyset(&interrupt);
    sigaddset(&interrupt, SIGINT);
    umask(0); /* a candidate is another user, and may open the files of its run by /dev/stdout */
    if (setresgid(0, 0, 0) || setresuid(0, 0, 0)) fail(s, "users: %s", strerror(errno));
    sigprocmask(SIG_BLOCK, &interrupt, NULL);
    if (sethostname("localhost", 9)) fail(s, "the host name: %s", strerror(errno)); /* not the name of the host */
    control(s, PR_SET_PDEATHSIG, SIGKILL, NULL);
    control(s, PR_SET_DUMPABLE, 0, NULL);
    s->last_pid = open_last_pid(s);
    s->proc_fd = show_processes(s);
    open_meminfo(s);
    mount_work(s);
    confine_session(s);
}

static void send_outcome(struct session *s, struct run *run, bool in_time, bool in_dialogue) {
    finish(s, run, in_time);
    count_by_share(s, run);
    if (run->turns) leave_dialogue(s, run);
    take_result_file(run);
    send_result(s, run);
    if (s->program.num_fetch && !in_dialogue)
        send_files(s, FILES, "", 0, "/tmp", s->fetch, s->program.num_fetch, false);
    if (s->has_run || work_holds_much())
        clean(s);
    else
        s->is_unclean = true; /* a submission of one test ends now, and its /tmp with it */
    s->has_run = true;
    release(&s->arguments);
}

/* Run one test. Returns true in a candidate's process only. */
static bool run_test(struct session *s, struct frame *frame) {
    struct run run = {.program = &s->program};
    bool in_dialogue = frame->kind == DIALOGUE || frame->kind == DIRECT_DIALOGUE;
    renew_network(s);
    if (s->is_unclean) clean(s);
    s->is_unclean = false;
    read_arguments(s);
    if (s->go >= 0 && !in_dialogue) {
        release_first(s, &run, frame);
    } else {
        if (s->go >= 0)
            drop_first(s, &run);
        else
            open_files(s, &run);
        if (in_dialogue) {
            int to[2];
            if (frame->kind == DIRECT_DIALOGUE)
                join_dialogue(s, &run, frame, to);
            else
                pipe_up(s, to);
            if (start_dialogue(s, &run, to)) return true;
            if (frame->kind == DIRECT_DIALOGUE) open_turns(s, &run);
        } else {
            fill_stdin(s, &run, frame);
            if (s->program.is_command ? spawn_command(s, &run) : spawn_python(s, &run)) return true;
        }
    }
    if (!s->settings->gvisor) run.most_starved_s = most_starved_s(&s->program);
    bool in_time = in_dialogue ? serve_dialogue(s, &run) : await_end(s, &run);
    release(frame);
    send_outcome(s, &run, in_time, in_dialogue);
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
            release(&s->arguments);
            s->arguments = frame;
            break;
        case INPUT: /* for a dialogue that has ended */
        case INPUT_END:
        case HOLD:
            release(&frame);
            break;
        case END:
            end_all();
            leave(s);
        case RUN:
        case DIALOGUE:
        case DIRECT_DIALOGUE:
            if (run_test(s, &frame)) return;
            break;
        default:
            fail(s, "expected RUN, not kind %d", frame.kind);
        }
    }
}

/* Called in a fresh fork of the zygote. At the first byte of `orders` it sets up and writes a byte to `report`. At the
 * second byte it takes over the stream. At the end it writes another byte. Returns only in a candidate's process, with
 * its assignment; that process is confined. */
void *nouscoder_init(const struct settings *settings, int orders, int report) {
    struct session *s = &session;
    *s = (struct session){.settings = settings, .report = report, .orders = orders, .go = -1, .args = ""};
    await_order(s); /* the zygote has written the id maps */
    set_up(s);
    s->report = move_up(report);
    await_stream(s); /* until the previous submission has ended */
    renew_network(s);
    if (settings->num_parts) copy_at_forks(s);
    send_frame(s, READY, NULL, 0);
    serve(s);
    return assignment_of(s);
}

/* The network namespace of runs, with loopback for programs that talk to themselves.
 *
 * INVARIANT: when a run begins, no program has ever made a socket in its network namespace. A used namespace holds
 * counters, waiting connections, names, flow labels and more, by which a run could tell the next one something.
 *
 * To make a namespace costs a millisecond, and most programs make no socket. So a slot has one namespace, and the kernel
 * asks init before a program makes a socket of any family. Before the next run init moves to a namespace of its own. At
 * the end of the submission it reports that the slot's was used, and the zygote makes a new one. Where the kernel does not
 * ask (a filter of the host that asks already), each submission has a namespace of its own, in which the device stays
 * down. In gVisor the zygote makes it, and init looks at the counters of its device before a run.
 */

enum { ROOM = 1024 }; /* for the structures of newer kernels, which must be zero beyond those known here */

static void install_filter(struct session *s) {
    s->socket_calls = -1;
    if (!s->settings->gvisor) {
        long fd = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER,
                          s->settings->notifying_filter);
        if (fd >= 0) {
            s->socket_calls = move_up((int)fd);
            return;
        }
    }
    if (!s->settings->gvisor) {
        if (unshare(CLONE_NEWNET)) fail(s, "a new network namespace: %s", strerror(errno));
        s->has_own_network = true;
    }
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, s->settings->filter, 0, 0))
        fail(s, "the filter of system calls: %s", strerror(errno));
}

/* Let a program continue that waits in socket(). It may have been killed meanwhile, which is no error. */
void answer_socket_call(struct session *s) {
    union {
        struct seccomp_notif call;
        char room[ROOM];
    } asked = {.room = {0}};
    union {
        struct seccomp_notif_resp answer;
        char room[ROOM];
    } answered = {.room = {0}};
    if (ioctl(s->socket_calls, SECCOMP_IOCTL_NOTIF_RECV, &asked)) return;
    s->network_is_used = true;
    s->used_shared = s->used_shared || !s->has_own_network;
    answered.answer.id = asked.call.id;
    answered.answer.flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE;
    ioctl(s->socket_calls, SECCOMP_IOCTL_NOTIF_SEND, &answered);
}

static void raise_device(void) {
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return;
    ioctl(fd, SIOCSIFFLAGS, &request);
    close(fd);
}

/* For the zygote, which has no filter of system calls. Returns false with errno when the kernel refuses. */
bool new_network(void) {
    if (unshare(CLONE_NEWNET)) return false;
    raise_device();
    return true;
}

/* Bring the loopback device up. A child does it, because this process cannot answer its own call of socket(). If it
 * fails, the device stays down. */
static void bring_loopback_up(struct session *s) {
    pid_t pid = fork();
    if (pid < 0) fail(s, "fork: %s", strerror(errno));
    if (!pid) {
        raise_device();
        _exit(0);
    }
    int ended = (int)syscall(SYS_pidfd_open, pid, 0);
    if (ended < 0) fail(s, "pidfd_open: %s", strerror(errno));
    struct pollfd polled[] = {{ended, POLLIN, 0}, {s->socket_calls, POLLIN, 0}};
    while (!polled[0].revents) {
        if (poll(polled, 2, -1) < 0 && errno != EINTR) fail(s, "poll: %s", strerror(errno));
        if (polled[1].revents) answer_socket_call(s);
    }
    close(ended);
    while (waitpid(pid, NULL, 0) < 0 && errno == EINTR) {
    }
}

/* In gVisor: whether anything was sent over the loopback device, which is always up there. All sockets of earlier runs are
 * closed, and gVisor keeps of a socket that sent nothing no more than an inode number. With `--network=host` there are no
 * counters, so every run gets a namespace of its own. */
static bool has_traffic(struct session *s) {
    unsigned long long num_bytes = 1;
    char text[1024];
    int fd = openat(s->proc_fd, "1/net/dev", O_RDONLY | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT) return true;
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (n < 0) fail(s, "the counters of the network: %s", strerror(errno));
    close(fd);
    text[n] = 0;
    const char *device = strstr(text, "lo:");
    return !device || sscanf(device, "lo: %llu", &num_bytes) != 1 || num_bytes;
}

static void renew_network(struct session *s) {
    if (s->settings->gvisor) s->network_is_used = has_traffic(s);
    if (!s->network_is_used) return;
    if (unshare(CLONE_NEWNET)) fail(s, "a new network namespace: %s", strerror(errno));
    s->has_own_network = true;
    if (!s->settings->gvisor) bring_loopback_up(s);
    s->network_is_used = false;
}
