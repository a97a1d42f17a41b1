/* A run in a conversation: its input and output are pipes, and each piece crosses the stream as soon as it is there.
 *
 * INVARIANT: what a program has said before it ended is sent before its RESULT; what it says beyond its output limit
 * ends it. All of it is in its RESULT too.
 */
#include "init.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

struct mouth {
    int in, out; /* our ends: what it hears, what it says; -1 when closed */
    char *unsent;
    size_t num_unsent;
    bool input_ended;
    uint64_t num_said;
};

static void hear(struct session *s, struct mouth *m) {
    struct frame frame = next_frame(s);
    if (frame.kind == END) {
        end_all();
        leave(s);
    }
    if (frame.kind == INPUT_END)
        m->input_ended = true;
    else if (frame.kind != INPUT)
        fail(s, "kind %d in a conversation", frame.kind);
    else if (!m->input_ended) {
        m->unsent = allocated(realloc(m->unsent, m->num_unsent + frame.num_bytes + 1));
        memcpy(m->unsent + m->num_unsent, frame.bytes, frame.num_bytes);
        m->num_unsent += frame.num_bytes;
    }
    free(frame.bytes);
}

static void feed(struct mouth *m) {
    ssize_t n = write(m->in, m->unsent, m->num_unsent);
    if (n < 0 && errno == EPIPE) { /* it hears no more; that is no fault */
        m->num_unsent = 0;
        m->input_ended = true;
    }
    if (n <= 0) return;
    m->num_unsent -= (size_t)n;
    memmove(m->unsent, m->unsent + n, m->num_unsent);
}

/* One piece of what it says; false when there is none, now or ever. */
static bool pass_on(struct session *s, struct run *run, struct mouth *m) {
    static char said[1 << 16];
    ssize_t n = read(m->out, said, sizeof said);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (n <= 0) {
        close(m->out);
        m->out = -1;
        return false;
    }
    m->num_said += (uint64_t)n;
    if (!write_all(run->out, said, (size_t)n)) fail(s, "the output of a run: %s", strerror(errno));
    send_frame(s, OUTPUT, said, (size_t)n);
    return true;
}

static bool said_too_much(struct run *run, struct mouth *m) {
    if (m->num_said <= run->program->output_bytes) return false;
    kill_all();
    return true;
}

/* True in the new process only. */
bool start_talk(struct session *s, struct run *run) {
    int to[2], from[2];
    pipe_up(s, to);
    pipe_up(s, from);
    struct run wired = *run;
    wired.in = to[0];
    wired.out = from[1];
    bool is_child = s->program.is_command ? spawn_command(s, &wired) : spawn_python(s, &wired);
    if (is_child) {
        s->talks = true;
        return true;
    }
    close(to[0]);
    close(from[1]);
    fcntl(to[1], F_SETFL, O_NONBLOCK);
    fcntl(from[0], F_SETFL, O_NONBLOCK);
    run->pid = wired.pid;
    run->started_s = wired.started_s;
    run->children_before_s = wired.children_before_s;
    run->mouth = to[1];
    run->ear = from[0];
    return false;
}

/* True when it ended in time. */
bool talk(struct session *s, struct run *run, const struct frame *first_words) {
    struct mouth m = {.in = run->mouth, .out = run->ear};
    m.unsent = allocated(malloc(first_words->num_bytes + 1));
    memcpy(m.unsent, first_words->bytes, m.num_unsent = first_words->num_bytes);
    double deadline_s = run->started_s + run->program->wall_time_s, next_look_s = 0;
    int fd = (int)syscall(SYS_pidfd_open, run->pid, 0);
    bool in_time = false;
    if (fd < 0) fail(s, "pidfd_open: %s", strerror(errno));
    for (double left_s; !in_time && (left_s = deadline_s - now_s()) > 0;) {
        if (m.in >= 0 && m.input_ended && !m.num_unsent) {
            close(m.in);
            m.in = -1;
        }
        struct pollfd polled[] = {{fd, POLLIN, 0},
                                  {m.out, POLLIN, 0},
                                  {s->settings->stream_in, POLLIN, 0},
                                  {m.num_unsent ? m.in : -1, POLLOUT, 0}};
        int wait_ms = left_s * 1000 < LOOK_EVERY_MS ? (int)(left_s * 1000) + 1 : LOOK_EVERY_MS;
        int ready = poll(polled, 4, wait_ms);
        if (ready < 0 && errno != EINTR) fail(s, "poll: %s", strerror(errno));
        if (ready < 0) continue;
        if (polled[1].revents) pass_on(s, run, &m);
        if (now_s() >= next_look_s) {
            next_look_s = now_s() + 1e-3 * LOOK_EVERY_MS;
            look_at_memory(s, run);
        }
        in_time = said_too_much(run, &m) || run->peak_bytes > run->program->memory_bytes;
        if (in_time) break;
        if (polled[0].revents) {
            while (m.out >= 0 && pass_on(s, run, &m) && !said_too_much(run, &m)) {
            } /* what was said last */
            in_time = true;
        } else {
            if (polled[2].revents) hear(s, &m);
            if (polled[3].revents) feed(&m);
        }
    }
    close(fd);
    if (m.in >= 0) close(m.in);
    if (m.out >= 0) close(m.out);
    free(m.unsent);
    return in_time;
}
