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
#include "init.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/seccomp.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ROOM = 1024 }; /* for the structures of newer kernels, which must be zero beyond those known here */

void install_filter(struct session *s) {
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

void renew_network(struct session *s) {
    if (s->settings->gvisor) s->network_is_used = has_traffic(s);
    if (!s->network_is_used) return;
    if (unshare(CLONE_NEWNET)) fail(s, "a new network namespace: %s", strerror(errno));
    s->has_own_network = true;
    if (!s->settings->gvisor) bring_loopback_up(s);
    s->network_is_used = false;
}
