/* Loopback, for programs that talk to themselves.
 *
 * INVARIANT: when a run begins, no internet socket has ever been made in its network namespace. A used namespace holds
 * counters, waiting connections, flow labels and more, by which a test could tell the next one something.
 *
 * The kernel asks init before a program makes an internet socket. Before the first one init brings the loopback device
 * up, and before the next run it moves to a new namespace. Programs without such sockets cost nothing. Where the kernel
 * does not ask (gVisor, or a filter of the host that asks already), the device stays down.
 */
#include "init.h"

#include <errno.h>
#include <linux/seccomp.h>
#include <net/if.h>
#include <sched.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
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
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, s->settings->filter, 0, 0))
        fail(s, "the filter of system calls: %s", strerror(errno));
}

/* By a socket of another family, because init would have to answer its own call. If that fails, the device is down. */
static void bring_loopback_up(void) {
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return;
    ioctl(fd, SIOCSIFFLAGS, &request);
    close(fd);
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
    if (!s->has_network) bring_loopback_up();
    s->has_network = true;
    answered.answer.id = asked.call.id;
    answered.answer.flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE;
    ioctl(s->socket_calls, SECCOMP_IOCTL_NOTIF_SEND, &answered);
}

void renew_network(struct session *s) {
    if (!s->has_network) return;
    if (unshare(CLONE_NEWNET)) fail(s, "a new network namespace: %s", strerror(errno));
    s->has_network = false;
}
