/* A run in a dialogue: its input and output are pipes, and each chunk is passed on at once, over the stream
 * to the gateway (DIALOGUE) or to the partner's input (DIRECT_DIALOGUE, see direct_dialogue.c).
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

static void add_waiting(struct relay *m, const char *bytes, size_t num_bytes) {
    if (m->first + m->num_waiting + num_bytes > m->room) {
        size_t needed = m->num_waiting + num_bytes;
        size_t room = needed > m->room / 2 ? 2 * needed : m->room;
        char *next = allocated(calloc(1, room));
        if (m->num_waiting) memcpy(next, m->waiting + m->first, m->num_waiting);
        if (m->waiting) explicit_bzero(m->waiting, m->room);
        free(m->waiting);
        m->waiting = next;
        m->room = room;
        m->first = 0;
    }
    if (num_bytes) memcpy(m->waiting + m->first + m->num_waiting, bytes, num_bytes);
    m->num_waiting += num_bytes;
}

/* Write as much as the sink takes now. The sink is closed after its last byte. */
void write_waiting(struct run *run) {
    struct relay *m = &run->relay;
    if (m->sink >= 0 && m->num_waiting) {
        if (run->turns) pass_turn(run);
        ssize_t n = write(m->sink, m->waiting + m->first, m->num_waiting);
        if (n < 0 && errno == EPIPE) { /* the reader has closed its input, which is no error */
            m->num_waiting = 0;
            m->is_ending = true;
        } else if (n > 0) {
            m->first += (size_t)n;
            m->num_waiting -= (size_t)n;
        }
        if (!m->num_waiting) m->first = 0;
    }
    if (m->sink >= 0 && m->is_ending && !m->num_waiting) {
        close(m->sink);
        m->sink = -1;
    }
}

static bool relay_output(struct session *s, struct run *run);

/* Stop the program. What it has printed is sent before HELD, so that its output afterwards belongs to the next input. */
static void hold(struct session *s, struct run *run) {
    struct relay *m = &run->relay;
    m->is_held = true;
    stop_all();
    while (m->out >= 0 && m->num_output <= run->program->output_bytes && relay_output(s, run)) {
    }
    send_frame(s, HELD, NULL, 0);
}

/* Read a frame from the gateway. Does not return when it is END. */
void receive_input(struct session *s, struct run *run) {
    struct relay *m = &run->relay;
    struct frame frame = next_frame(s);
    if (frame.kind == END) {
        end_all();
        leave(s);
    }
    bool is_input = frame.kind == INPUT || frame.kind == INPUT_END;
    if (run->turns || (!is_input && frame.kind != HOLD)) fail(s, "kind %d in a dialogue", frame.kind);
    if (frame.kind == INPUT_END)
        m->is_ending = true;
    else if (frame.kind == HOLD)
        hold(s, run);
    else if (!m->is_ending)
        add_waiting(m, frame.bytes, frame.num_bytes);
    if (m->is_held && is_input) {
        m->is_held = false;
        continue_all();
    }
    release(&frame);
    write_waiting(run);
}

/* Pass on one chunk of the program's output. Returns false when none is available or the output has ended. */
static bool relay_output(struct session *s, struct run *run) {
    static char chunk[1 << 16];
    struct relay *m = &run->relay;
    ssize_t n = read(m->out, chunk, sizeof chunk);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (n <= 0) {
        close(m->out);
        m->out = -1;
        m->is_ending = m->is_ending || run->turns;
        if (!run->turns) send_frame(s, OUTPUT_END, NULL, 0);
        return false;
    }
    m->num_output += (uint64_t)n;
    if (!write_all(run->out, chunk, (size_t)n)) fail(s, "the output of a run: %s", strerror(errno));
    if (!run->turns)
        send_frame(s, OUTPUT, chunk, (size_t)n);
    else if (!m->is_ending)
        add_waiting(m, chunk, (size_t)n);
    explicit_bzero(chunk, (size_t)n);
    return true;
}

static bool exceeds_output_limit(struct run *run) {
    if (run->relay.num_output <= run->program->output_bytes) return false;
    kill_all();
    return true;
}

/* Let the candidate, another user, open the pipe by /dev/stdin or /dev/stdout. gVisor's pipes have a fixed mode. */
void let_candidate_open(struct session *s, int fd) {
    if (fchmod(fd, 0666) && !s->settings->gvisor) fail(s, "the pipe of a run: %s", strerror(errno));
}

/* Start the program with to[0] as its input, and to[1] as its sink. Returns true in the new process only. */
bool start_talk(struct session *s, struct run *run, const int to[2]) {
    int from[2];
    pipe_up(s, from);
    let_candidate_open(s, from[0]);
    struct run child = *run;
    child.in = to[0];
    child.out = from[1];
    bool is_child = s->program.is_command ? spawn_command(s, &child) : spawn_python(s, &child);
    if (is_child) {
        s->in_dialogue = true;
        return true;
    }
    close(to[0]);
    close(from[1]);
    fcntl(to[1], F_SETFL, O_NONBLOCK);
    fcntl(from[0], F_SETFL, O_NONBLOCK);
    run->pid = child.pid;
    run->started_s = child.started_s;
    run->children_before_s = child.children_before_s;
    run->before_bytes = child.before_bytes;
    run->relay = (struct relay){.sink = to[1], .out = from[0]};
    return false;
}

void close_relay(struct relay *m) {
    if (m->sink >= 0) close(m->sink);
    if (m->waiting) explicit_bzero(m->waiting, m->room);
    free(m->waiting);
    *m = (struct relay){.sink = -1, .out = -1};
}

/* Wait for something to do, and do it. Returns true when the program has ended or has exceeded a limit. */
static bool relay_once(struct session *s, struct run *run, int pidfd, double left_s) {
    struct relay *m = &run->relay;
    struct pollfd polled[] = {{pidfd, POLLIN, 0},
                              {m->out, POLLIN, 0},
                              {s->settings->stream_in, POLLIN, 0},
                              {m->num_waiting ? m->sink : -1, POLLOUT, 0},
                              {s->socket_calls, POLLIN, 0}};
    int wake_ms = m->is_held ? STOP_EVERY_MS : MEASURE_EVERY_MS;
    int wait_ms = left_s * 1000 < wake_ms ? (int)(left_s * 1000) + 1 : wake_ms;
    int ready = poll(polled, 5, wait_ms);
    if (ready < 0 && errno != EINTR) fail(s, "poll: %s", strerror(errno));
    if (ready < 0) return false;
    if (m->is_held) stop_all();
    if (polled[4].revents) answer_socket_call(s);
    if (polled[1].revents) relay_output(s, run);
    if (now_s() >= m->next_measure_s) {
        m->next_measure_s = now_s() + 1e-3 * MEASURE_EVERY_MS;
        measure_memory(s, run);
        if (run->turns) note_work(s, run);
    }
    if (exceeds_output_limit(run) || run->peak_bytes > run->program->memory_bytes) return true;
    if (polled[0].revents) {
        while (m->out >= 0 && relay_output(s, run) && !exceeds_output_limit(run)) {
        } /* the rest of the output */
        return true;
    }
    if (polled[2].revents) receive_input(s, run);
    write_waiting(run);
    return false;
}

/* Relay input and output until the program ends. Returns false when its wall time is over. */
bool serve_dialogue(struct session *s, struct run *run) {
    int fd = (int)syscall(SYS_pidfd_open, run->pid, 0);
    if (fd < 0) fail(s, "pidfd_open: %s", strerror(errno));
    bool in_time = false;
    for (double left_s; !in_time;) {
        left_s = run->started_s + run->program->wall_time_s + free_wait_s(run) - now_s();
        if (left_s <= 0) break;
        in_time = relay_once(s, run, fd, left_s);
    }
    close(fd);
    if (run->relay.out >= 0) close(run->relay.out);
    run->relay.out = -1;
    if (run->turns)
        note_end(run);
    else
        close_relay(&run->relay);
    return in_time;
}
