/* A run in a conversation: its input and output are pipes, and each chunk is sent over the stream at once.
 *
 * INVARIANT: the output of a program is sent before its RESULT, which holds the output again. OUTPUT_END is sent once,
 * after the last OUTPUT. A program that exceeds its output limit is killed. From HELD until the next INPUT none of its
 * processes runs.
 */
#include "init.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { STOP_EVERY_MS = 1000 }; /* of a held program: in gVisor a fork can survive the first time */

struct relay {
    int in, out; /* init's ends of the program's input and output; -1 when closed */
    char *unsent;
    size_t num_unsent, room;
    bool input_ended, is_held;
    uint64_t num_output;
};

static void free_unsent(struct relay *m) {
    explicit_bzero(m->unsent, m->room);
    free(m->unsent);
}

static void add_unsent(struct relay *m, const char *bytes, size_t num_bytes) {
    if (m->num_unsent + num_bytes > m->room) {
        struct relay before = *m;
        m->unsent = allocated(calloc(1, m->room = 2 * (m->num_unsent + num_bytes)));
        if (before.num_unsent) memcpy(m->unsent, before.unsent, m->num_unsent);
        if (before.unsent) free_unsent(&before);
    }
    if (num_bytes) memcpy(m->unsent + m->num_unsent, bytes, num_bytes);
    m->num_unsent += num_bytes;
}

static bool relay_output(struct session *s, struct run *run, struct relay *m);

/* Stop the program. What it has printed is sent before HELD, so that its output afterwards belongs to the next input. */
static void hold(struct session *s, struct run *run, struct relay *m) {
    m->is_held = true;
    stop_all();
    while (m->out >= 0 && m->num_output <= run->program->output_bytes && relay_output(s, run, m)) {
    }
    send_frame(s, HELD, NULL, 0);
}

static void receive_input(struct session *s, struct run *run, struct relay *m) {
    struct frame frame = next_frame(s);
    if (frame.kind == END) {
        end_all();
        leave(s);
    }
    if (frame.kind == INPUT_END)
        m->input_ended = true;
    else if (frame.kind == HOLD)
        hold(s, run, m);
    else if (frame.kind != INPUT)
        fail(s, "kind %d in a conversation", frame.kind);
    else if (!m->input_ended)
        add_unsent(m, frame.bytes, frame.num_bytes);
    if (m->is_held && (frame.kind == INPUT || frame.kind == INPUT_END)) {
        m->is_held = false;
        continue_all();
    }
    release(&frame);
}

static void write_input(struct relay *m) {
    ssize_t n = write(m->in, m->unsent, m->num_unsent);
    if (n < 0 && errno == EPIPE) { /* the program has closed its input, which is no error */
        m->num_unsent = 0;
        m->input_ended = true;
    }
    if (n <= 0) return;
    m->num_unsent -= (size_t)n;
    memmove(m->unsent, m->unsent + n, m->num_unsent);
}

/* Send one chunk of the program's output. Returns false when none is available or the output has ended. */
static bool relay_output(struct session *s, struct run *run, struct relay *m) {
    static char chunk[1 << 16];
    ssize_t n = read(m->out, chunk, sizeof chunk);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (n <= 0) {
        close(m->out);
        m->out = -1;
        send_frame(s, OUTPUT_END, NULL, 0);
        return false;
    }
    m->num_output += (uint64_t)n;
    if (!write_all(run->out, chunk, (size_t)n)) fail(s, "the output of a run: %s", strerror(errno));
    send_frame(s, OUTPUT, chunk, (size_t)n);
    explicit_bzero(chunk, (size_t)n);
    return true;
}

static bool exceeds_output_limit(struct run *run, struct relay *m) {
    if (m->num_output <= run->program->output_bytes) return false;
    kill_all();
    return true;
}

/* Let the candidate, another user, open the pipe by /dev/stdin or /dev/stdout. gVisor's pipes have a fixed mode. */
static void open_to_candidate(struct session *s, int fd) {
    if (fchmod(fd, 0666) && !s->settings->gvisor) fail(s, "the pipe of a run: %s", strerror(errno));
}

/* Start the program. Returns true in the new process only. */
bool start_talk(struct session *s, struct run *run) {
    int to[2], from[2];
    pipe_up(s, to);
    pipe_up(s, from);
    open_to_candidate(s, to[0]);
    open_to_candidate(s, from[0]);
    struct run child = *run;
    child.in = to[0];
    child.out = from[1];
    bool is_child = s->program.is_command ? spawn_command(s, &child) : spawn_python(s, &child);
    if (is_child) {
        s->talks = true;
        return true;
    }
    close(to[0]);
    close(from[1]);
    fcntl(to[1], F_SETFL, O_NONBLOCK);
    fcntl(from[0], F_SETFL, O_NONBLOCK);
    run->pid = child.pid;
    run->started_s = child.started_s;
    run->children_before_s = child.children_before_s;
    run->stdin_pipe = to[1];
    run->stdout_pipe = from[0];
    return false;
}

/* Relay input and output until the program ends. Returns false when its wall time is over. */
bool talk(struct session *s, struct run *run, const struct frame *first_input) {
    struct relay m = {.in = run->stdin_pipe, .out = run->stdout_pipe};
    add_unsent(&m, first_input->bytes, first_input->num_bytes);
    double deadline_s = run->started_s + run->program->wall_time_s, next_measure_s = 0;
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
        int wake_ms = m.is_held ? STOP_EVERY_MS : MEASURE_EVERY_MS;
        int wait_ms = left_s * 1000 < wake_ms ? (int)(left_s * 1000) + 1 : wake_ms;
        int ready = poll(polled, 4, wait_ms);
        if (ready < 0 && errno != EINTR) fail(s, "poll: %s", strerror(errno));
        if (ready < 0) continue;
        if (m.is_held) stop_all();
        if (polled[1].revents) relay_output(s, run, &m);
        if (now_s() >= next_measure_s) {
            next_measure_s = now_s() + 1e-3 * MEASURE_EVERY_MS;
            measure_memory(s, run);
        }
        in_time = exceeds_output_limit(run, &m) || run->peak_bytes > run->program->memory_bytes;
        if (in_time) break;
        if (polled[0].revents) {
            while (m.out >= 0 && relay_output(s, run, &m) && !exceeds_output_limit(run, &m)) {
            } /* the rest of the output */
            in_time = true;
        } else {
            if (polled[2].revents) receive_input(s, run, &m);
            if (polled[3].revents) write_input(&m);
        }
    }
    close(fd);
    if (m.in >= 0) close(m.in);
    if (m.out >= 0) close(m.out);
    if (m.unsent) free_unsent(&m);
    return in_time;
}
