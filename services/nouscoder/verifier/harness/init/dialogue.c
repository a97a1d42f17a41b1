/* Runs whose input and output are pipes: dialogues with the gateway, and of two programs with each other. */
#include "dialogue.h"
#include "folder.h"
#include "process.h"
#include "program.h"
#include "stream.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static void pass_turn(struct run *run);
static void note_work(struct session *s, struct run *run);
static void note_said(struct run *run, uint64_t num_bytes);
static void note_closed(struct run *run);
static void note_heard(struct run *run);
static void note_end(struct run *run);

/* A run in a dialogue: its input and output are pipes, and each chunk is passed on at once, over the stream
 * to the gateway (DIALOGUE) or to the partner's input (DIRECT_DIALOGUE, see below).
 *
 * INVARIANT: the output of a program is sent before its RESULT, which holds the output again. OUTPUT_END is sent once,
 * after the last OUTPUT. A program that exceeds its output limit is killed. From HELD until the next INPUT none of its
 * processes runs.
 */

enum { STOP_EVERY_MS = 1000 }; /* of a held program: in gVisor a fork can survive the first time */
static const double END_GRACE_S = 0.25; /* from the end of the output to the end of the program */

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
static void write_waiting(struct run *run) {
    struct relay *m = &run->relay;
    if (m->sink >= 0 && m->num_waiting) {
        if (run->turns) pass_turn(run);
        note_said(run, m->num_input + m->num_waiting); /* before the partner can have read it */
        ssize_t n = write(m->sink, m->waiting + m->first, m->num_waiting);
        if (n < 0 && errno == EPIPE) { /* the reader has closed its input, which is no error */
            m->num_waiting = 0;
            m->is_ending = true;
        } else if (n > 0) {
            m->first += (size_t)n;
            m->num_waiting -= (size_t)n;
            m->num_input += (uint64_t)n;
        }
        note_said(run, m->num_input);
        if (!m->num_waiting) m->first = 0;
    }
    if (m->sink >= 0 && m->is_ending && !m->num_waiting) {
        note_closed(run);
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
static void receive_input(struct session *s, struct run *run) {
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
        m->end_by_s = now_s() + END_GRACE_S;
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
static void let_candidate_open(struct session *s, int fd) {
    if (fchmod(fd, 0666) && !s->settings->gvisor) fail(s, "the pipe of a run: %s", strerror(errno));
}

/* Start the program with to[0] as its input, and to[1] as its sink. Returns true in the new process only. */
bool start_dialogue(struct session *s, struct run *run, const int to[2]) {
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
    close(from[1]);
    fcntl(to[1], F_SETFL, O_NONBLOCK);
    fcntl(from[0], F_SETFL, O_NONBLOCK);
    run->pid = child.pid;
    run->started_s = child.started_s;
    run->children_before_s = child.children_before_s;
    run->before_bytes = child.before_bytes;
    run->relay = (struct relay){.in = to[0], .sink = to[1], .out = from[0]};
    return false;
}

static void close_relay(struct relay *m) {
    if (m->sink >= 0) close(m->sink);
    if (m->waiting) explicit_bzero(m->waiting, m->room);
    free(m->waiting);
    *m = (struct relay){.in = -1, .sink = -1, .out = -1};
}

/* Wait for something to do, and do it. Returns true when the program has ended or has exceeded a limit. */
static bool relay_once(struct session *s, struct run *run, int pidfd, double left) {
    struct relay *m = &run->relay;
    struct pollfd polled[] = {{pidfd, POLLIN, 0},
                              {m->out, POLLIN, 0},
                              {s->settings->stream_in, POLLIN, 0},
                              {m->num_waiting ? m->sink : -1, POLLOUT, 0},
                              {s->socket_calls, POLLIN, 0}};
    int wake_ms = m->is_held ? STOP_EVERY_MS : MEASURE_EVERY_MS;
    int wait_ms = left * 1000 < wake_ms ? (int)(left * 1000) + 1 : wake_ms;
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
    if (run->turns && m->out < 0 && now_s() >= m->end_by_s) m->is_ending = true; /* it closed its output, and lives */
    write_waiting(run);
    return false;
}

/* Relay input and output until the program ends. Returns false when its wall time is over. */
bool serve_dialogue(struct session *s, struct run *run) {
    int fd = (int)syscall(SYS_pidfd_open, run->pid, 0);
    if (fd < 0) fail(s, "pidfd_open: %s", strerror(errno));
    bool in_time = false;
    for (double left; !in_time && (left = left_s(s, run)) > 0;) in_time = relay_once(s, run, fd, left);
    close(fd);
    if (run->relay.out >= 0) close(run->relay.out);
    run->relay.out = -1;
    note_heard(run);
    if (run->turns)
        note_end(run);
    else
        close_relay(&run->relay);
    return in_time;
}

/* A dialogue: two programs in two sandboxes, connected by pipes between their inits. No byte passes
 * through the gateway.
 *
 * The host (the first sandbox) makes both pipes and sends the guest its ends over the socket `peer`. Each init reads its
 * program's output from a pipe of its own, counts and keeps it, and writes it to the pipe that is the partner's input.
 *
 * INVARIANT: no pipe connects two programs, and no open file description is shared by two processes. A program can thus
 * change only its own end of a pipe, and what it prints is counted before its partner can read it.
 *
 * The end of a program is noted before its partner can see it, so that of two programs the one that left first is known.
 *
 * `turns` is memory that the two inits share, and no program. A program is charged for the time from its last output to
 * the first byte of the answer only when no answer comes, and then not for the time in which its partner is at work.
 */

enum { NUM_ENDS = 3, NONCE_BYTES = 16, INVITATION_MS = 30000 };
static const double PART_S = 1.0; /* after the limits of both: for a partner that reads slowly */

/* The payload of a DIRECT_DIALOGUE frame. */
struct terms {
    double spare_s;
    char nonce[NONCE_BYTES];
    uint8_t side; /* 0: host, 1: guest */
} __attribute__((packed));

struct side {
    _Atomic uint64_t started_ns;     /* 0 before its start; a wait counts from then on */
    _Atomic uint64_t waits_since_ns; /* the time of its last output; 0 when it has been answered */
    _Atomic uint64_t answered_ns;    /* the sum of the waits that ended with an answer */
    _Atomic uint64_t worked_ns;      /* the time in which it used the CPU, or was ready to */
    _Atomic uint64_t partner_had_worked_ns; /* of its partner, when the wait began */
    _Atomic uint64_t sampled_ns, cpu_ns;    /* at the last sample */
    _Atomic uint64_t starved_ns; /* the time in which others kept it from the CPU */
    _Atomic uint64_t num_said; /* bytes that its partner could read */
    _Atomic uint64_t has_closed, has_ended; /* its partner's input has ended; it has ended itself */
};
struct turns {
    struct side sides[2];
};

static uint64_t now_ns(void) { return (uint64_t)(now_s() * 1e9); }

static void invite(struct session *s, const struct terms *terms, const int ends[NUM_ENDS]) {
    char space[CMSG_SPACE(sizeof(int) * NUM_ENDS)] = {0};
    struct iovec text = {(void *)terms->nonce, NONCE_BYTES};
    struct msghdr message = {.msg_iov = &text, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int) * NUM_ENDS);
    memcpy(CMSG_DATA(head), ends, sizeof(int) * NUM_ENDS);
    if (sendmsg(s->settings->peer, &message, MSG_DONTWAIT | MSG_NOSIGNAL) != NONCE_BYTES)
        fail(s, "the partner cannot be invited: %s", strerror(errno));
}

/* Take one message from the host. Returns false when it belongs to an earlier dialogue. */
static bool accept_invitation(struct session *s, const struct terms *terms, int ends[NUM_ENDS]) {
    char nonce[NONCE_BYTES], space[CMSG_SPACE(sizeof(int) * NUM_ENDS)];
    struct iovec text = {nonce, sizeof nonce};
    struct msghdr message = {.msg_iov = &text, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    ssize_t n = recvmsg(s->settings->peer, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    struct cmsghdr *head = n == NONCE_BYTES ? CMSG_FIRSTHDR(&message) : NULL;
    if (!head || head->cmsg_type != SCM_RIGHTS || head->cmsg_len != CMSG_LEN(sizeof(int) * NUM_ENDS))
        fail(s, "the invitation is not valid");
    memcpy(ends, CMSG_DATA(head), sizeof(int) * NUM_ENDS);
    if (!memcmp(nonce, terms->nonce, NONCE_BYTES)) return true;
    for (int i = 0; i < NUM_ENDS; i++) close(ends[i]);
    return false;
}

static void await_invitation(struct session *s, const struct terms *terms, int ends[NUM_ENDS]) {
    for (double end_s = now_s() + 1e-3 * INVITATION_MS; now_s() < end_s;) {
        struct pollfd polled[] = {{s->settings->peer, POLLIN, 0}, {s->settings->stream_in, POLLIN, 0}};
        if (poll(polled, 2, INVITATION_MS) < 0 && errno != EINTR) fail(s, "poll: %s", strerror(errno));
        if (polled[1].revents) {
            struct frame frame = next_frame(s);
            if (frame.kind != END) fail(s, "kind %d before a dialogue", frame.kind);
            end_all();
            leave(s);
        }
        if (polled[0].revents && accept_invitation(s, terms, ends)) return;
    }
    fail(s, "the partner of the dialogue did not come");
}

/* Make or receive the pipes: to[0] is the program's input, to[1] leads to its partner's. */
void join_dialogue(struct session *s, struct run *run, const struct frame *frame, int to[2]) {
    struct terms terms;
    if (frame->num_bytes != sizeof terms || s->settings->peer < 0) fail(s, "a dialogue without terms or socket");
    memcpy(&terms, frame->bytes, sizeof terms);
    run->side = terms.side != 0;
    run->spare_s = terms.spare_s;
    int ends[NUM_ENDS]; /* of the guest: its input, its sink, the file of `turns` */
    if (run->side) {
        await_invitation(s, &terms, ends);
        to[0] = move_up(ends[0]);
        to[1] = move_up(ends[1]);
        run->turns_fd = move_up(ends[2]);
        return;
    }
    int to_host[2], to_guest[2];
    pipe_up(s, to_host);
    pipe_up(s, to_guest);
    let_candidate_open(s, to_host[0]);
    let_candidate_open(s, to_guest[0]);
    run->turns_fd = unlinked_file(s);
    struct turns turns = {{{.waits_since_ns = now_ns()}, {.waits_since_ns = now_ns()}}}; /* each for the first word */
    if (!write_all(run->turns_fd, &turns, sizeof turns)) fail(s, "the file of a dialogue: %s", strerror(errno));
    invite(s, &terms, (int[]){to_guest[0], to_host[1], run->turns_fd});
    close(to_guest[0]);
    close(to_host[1]);
    to[0] = to_host[0];
    to[1] = to_guest[1];
}

/* Called after the program has been forked, so that it does not have the memory. */
void open_turns(struct session *s, struct run *run) {
    void *memory = mmap(NULL, sizeof(struct turns), PROT_READ | PROT_WRITE, MAP_SHARED, run->turns_fd, 0);
    if (memory == MAP_FAILED) fail(s, "the memory of a dialogue: %s", strerror(errno));
    close(run->turns_fd);
    run->turns = memory;
    atomic_store(&run->turns->sides[run->side].started_ns, (uint64_t)(run->started_s * 1e9));
}

/* How long a side has waited that waits since `since` [ns]. Its partner may speak before it is started: that is no wait
 * of the program, whose time begins with its start. */
static uint64_t waited_ns(struct side *side, uint64_t since, uint64_t now) {
    uint64_t started = atomic_load(&side->started_ns);
    uint64_t from = since > started ? since : started;
    return since && started && from < now ? now - from : 0;
}

/* The program's output is about to be written: it waits for its partner from now on, and its partner's wait is over.
 * Called before the write, because an answer to it may come before the write returns. */
static void pass_turn(struct run *run) {
    struct side *own = &run->turns->sides[run->side], *partner = &run->turns->sides[!run->side];
    uint64_t now = now_ns(), since = atomic_exchange(&partner->waits_since_ns, 0);
    atomic_fetch_add(&partner->answered_ns, waited_ns(partner, since, now));
    atomic_store(&own->partner_had_worked_ns, atomic_load(&partner->worked_ns));
    atomic_store(&own->waits_since_ns, now);
}

/* The time for which the program is not charged [s]. */
double free_wait_s(struct run *run) {
    if (!run->turns) return 0;
    struct side *own = &run->turns->sides[run->side], *partner = &run->turns->sides[!run->side];
    uint64_t waits = waited_ns(own, atomic_load(&own->waits_since_ns), now_ns());
    uint64_t worked = atomic_load(&partner->worked_ns) - atomic_load(&own->partner_had_worked_ns);
    if (worked < waits) waits = worked;
    double free_s = 1e-9 * (double)(atomic_load(&own->answered_ns) + waits);
    return free_s < run->spare_s ? free_s : run->spare_s;
}

void tell_starved(struct run *run) {
    atomic_store(&run->turns->sides[run->side].starved_ns, (uint64_t)(1e9 * run->starved_s));
}

/* The time [s] by which an interactor, the guest, may last longer: its candidate was kept from the CPU for so long. */
double host_starved_s(struct run *run) {
    return run->turns && run->side ? 1e-9 * (double)atomic_load(&run->turns->sides[0].starved_ns) : 0;
}

/* Whether the main thread runs, or would if it had a CPU. */
static bool is_ready(struct session *s, pid_t pid) {
    char path[32], text[128];
    snprintf(path, sizeof path, "%d/stat", pid);
    int fd = openat(s->proc_fd, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    text[n > 0 ? n : 0] = 0;
    char *end = strrchr(text, ')'); /* of the name */
    return end && !strncmp(end, ") R", 3);
}

/* Sample what the program does, for the other init. A program at work on a busy machine may get little CPU time. */
static void note_work(struct session *s, struct run *run) {
    enum { ALL_THREADS = 2, SHARE = 10 };
    struct side *own = &run->turns->sides[run->side];
    struct timespec used;
    if (clock_gettime((clockid_t)(~(unsigned)run->pid << 3 | ALL_THREADS), &used)) return; /* it has ended */
    uint64_t cpu = (uint64_t)used.tv_sec * 1000000000u + (uint64_t)used.tv_nsec, now = now_ns();
    uint64_t before = atomic_exchange(&own->sampled_ns, now), cpu_before = atomic_exchange(&own->cpu_ns, cpu);
    if (!before || now < before) return;
    bool works = cpu > cpu_before && SHARE * (cpu - cpu_before) > now - before;
    if (works || is_ready(s, run->pid)) atomic_fetch_add(&own->worked_ns, now - before);
}

static void note_said(struct run *run, uint64_t num_bytes) {
    if (run->turns) atomic_store(&run->turns->sides[run->side].num_said, num_bytes);
}

static void note_closed(struct run *run) {
    if (run->turns) atomic_store(&run->turns->sides[run->side].has_closed, 1);
}

/* Called when the program has ended: what it has not read is still in its pipe. The end of its input is heard too, if
 * nothing that comes before it is unread. */
static void note_heard(struct run *run) {
    struct relay *m = &run->relay;
    struct side *partner = run->turns ? &run->turns->sides[!run->side] : NULL;
    uint64_t num_given = partner ? atomic_load(&partner->num_said) : m->num_input;
    bool has_input_ended = partner ? atomic_load(&partner->has_closed) : m->sink < 0;
    int num_unread = 0;
    ioctl(m->in, FIONREAD, &num_unread);
    run->has_heard = num_given > (uint64_t)num_unread || (has_input_ended && !num_unread);
    close(m->in);
    m->in = -1;
}

static void note_end(struct run *run) {
    run->partner_ended = atomic_load(&run->turns->sides[!run->side].has_ended);
    atomic_store(&run->turns->sides[run->side].has_ended, 1);
}

/* Pass on the rest of the output of a program that has ended, as far as its partner reads it. */
void leave_dialogue(struct session *s, struct run *run) {
    struct relay *m = &run->relay;
    double end_s = run->started_s + run->program->wall_time_s + run->spare_s + run->starved_s + PART_S;
    m->is_ending = true;
    for (write_waiting(run); m->sink >= 0 && now_s() < end_s; write_waiting(run)) {
        struct pollfd polled[] = {{m->sink, POLLOUT, 0}, {s->settings->stream_in, POLLIN, 0}};
        if (poll(polled, 2, MEASURE_EVERY_MS) < 0 && errno != EINTR) fail(s, "poll: %s", strerror(errno));
        if (polled[1].revents) receive_input(s, run);
    }
    close_relay(m);
    munmap(run->turns, sizeof(struct turns));
    run->turns = NULL;
}
