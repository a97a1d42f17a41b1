/* How programs are made ready and started: Python in a fork of the interpreter, other languages by a compiler and exec. */
#include "program.h"
#include "folder.h"
#include "process.h"
#include "stream.h"
#include "zygote.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The time of a compiler. */
struct compile_time {
    double limit_s, used_s; /* used: the time in which it could have a CPU */
    double from_s, until_s; /* the current step */
    double end_s;           /* no step ends later */
};

static bool is_used_up(const struct compile_time *t);

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

static struct compile_time compile_time_from(const struct program *p, double begun_s) {
    double limit_s = p->compile_time_s;
    return (struct compile_time){limit_s, 0, begun_s, begun_s + limit_s / NUM_STEPS, begun_s + MOST_TIMES * limit_s};
}

/* At the end of a step: whether there is another one. */
static bool may_go_on(struct compile_time *t) {
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
static bool is_used_up(const struct compile_time *t) { return t->used_s > 0.999 * t->limit_s; }

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

/* Python programs. The process of the first test compiles the program, reports, and waits for its input. A submission
 * of one test thus needs one process, and the compiler is confined like a candidate. Later processes get compiled code.
 */

static const char OUT_OF_LIMITS[] = "the compiler ran out of time or memory";

/* A function of the interpreter that loads this library. One bytes object is cheaper there than twelve fields. */
extern void *PyBytes_FromStringAndSize(const char *bytes, ssize_t num_bytes);

void *assignment_of(struct session *s) {
    bool is_first = !s->code;
    const char *body = is_first ? s->source : s->code;
    struct assignment head = {
        .cpu_time_s = s->program.cpu_time_s, .is_first = is_first, .in_dialogue = s->in_dialogue,
        .meta_bytes = s->program.meta_bytes, .args_bytes = (uint32_t)s->args_bytes,
        .body_bytes = is_first ? s->program.source_bytes : (uint32_t)s->code_bytes,
    };
    size_t num_bytes = sizeof head + head.meta_bytes + head.args_bytes + head.body_bytes;
    char *text = malloc(num_bytes), *at = text;
    if (!text) _exit(1);
    at = mempcpy(at, &head, sizeof head);
    at = mempcpy(at, s->meta, head.meta_bytes);
    at = mempcpy(at, s->args, head.args_bytes);
    memcpy(at, body, head.body_bytes);
    void *object = PyBytes_FromStringAndSize(text, (ssize_t)num_bytes);
    free(text);
    return object;
}

/* Read what the first process reports until it closes its end. Returns NULL when its time is over. */
static char *read_report(int fd, struct compile_time *time, size_t *num_bytes) {
    size_t room = 1 << 13, used = 0;
    char *report = room_for(room);
    do {
        double left_s = fmax(0, time->until_s - now_s());
        struct pollfd polled = {fd, POLLIN, 0};
        int ready = poll(&polled, 1, (int)ceil(left_s * 1000));
        if (ready <= 0) continue;
        if (used == room) {
            report = doubled(report, room);
            room *= 2;
        }
        ssize_t n = read(fd, report + used, room - used);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) {
            *num_bytes = used;
            return report;
        }
        used += (size_t)n;
    } while (now_s() < time->until_s || may_go_on(time));
    give_back(report, used);
    return NULL;
}

bool start_python(struct session *s) {
    int report[2], go[2];
    place_script(s);
    s->first.program = &s->program;
    open_files(s, &s->first);
    pipe_up(s, report);
    pipe_up(s, go);
    if (spawn(s, &s->first, "/tmp", report[1], go[0]) == 0) return true;
    close(report[1]);
    close(go[0]);
    size_t num_bytes = 0;
    struct compile_time time = compile_time_from(&s->program, s->first.started_s);
    char *received = read_report(report[0], &time, &num_bytes);
    close(report[0]);
    if (!received && !is_used_up(&time)) refuse(s, COMPILE_STARVED, NULL, 0);
    if (!received || !num_bytes) refuse(s, COMPILE_FAILED, OUT_OF_LIMITS, sizeof OUT_OF_LIMITS - 1);
    if (received[0] != 'C' || num_bytes < 1 + sizeof(double)) {
        bool has_text = received[0] == 'E' && num_bytes > 1;
        refuse(s, COMPILE_FAILED, has_text ? received + 1 : OUT_OF_LIMITS,
               has_text ? num_bytes - 1 : sizeof OUT_OF_LIMITS - 1);
    }
    memcpy(&s->first.cpu_before_s, received + 1, sizeof(double));
    s->code = received + 1 + sizeof(double);
    s->code_bytes = num_bytes - 1 - sizeof(double);
    s->go = go[1];
    send_frame(s, COMPILED, NULL, 0);
    return false;
}

void release_first(struct session *s, struct run *run, struct frame *given) {
    *run = s->first;
    fill_stdin(s, run, given);
    note_memory_before(s, run);
    note_starved_before(s, run);
    run->started_s = now_s();
    /* A process that died while it waited, for example for its memory, ends the test like one that dies in it. */
    if (write_all(s->go, "G", 1)) write_all(s->go, s->args, s->args_bytes);
    close(s->go);
    s->go = -1;
}

void drop_first(struct session *s, struct run *run) {
    close(s->go);
    s->go = -1;
    end_all();
    run->in = s->first.in;
    run->out = s->first.out;
    run->err = s->first.err;
    run->result = s->first.result;
}

bool spawn_python(struct session *s, struct run *run) {
    return spawn(s, run, "/tmp", -1, -1) == 0;
}

/* Programs of other languages: a confined process compiles them once per submission, then each test is one exec.
 *
 * INVARIANT: after `start_command` no process of the compiler runs, and the compiled program is read-only.
 */

enum { MAX_DETAIL_BYTES = 1900 };
static const char TOO_MANY_FILES[] = "the compiler leaves more than 1000 files, or folders more than 16 deep";

/* The compiler runs under the same isolation and kinds of limits as a candidate. */
static struct program compiler_of(const struct session *s) {
    struct program compiler = s->program;
    compiler.result_kind = NO_RESULT;
    compiler.cpu_time_s = compile_cpu_s(s);
    compiler.memory_bytes = 2ull << 30;
    compiler.extra_space_bytes = 1ull << 40;
    compiler.output_bytes = 128ull << 20; /* of each file that it writes, including its messages */
    compiler.num_processes = 256;
    return compiler;
}

static bool is_installed(const char *program) {
    static const char *folders[] = {"/usr/local/bin", "/usr/bin", "/bin"};
    char path[512];
    if (strchr(program, '/')) return !access(program, X_OK);
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) {
        snprintf(path, sizeof path, "%s/%.255s", folders[i], program);
        if (!access(path, X_OK)) return true;
    }
    return false;
}

/* The beginning of the last 64 KiB of `fd`, without surrounding white space. Returns its length. */
static size_t message_of(int fd, uint64_t size, char *text) {
    static char buffer[64 * 1024];
    uint64_t from = size > sizeof buffer ? size - sizeof buffer : 0;
    ssize_t n = pread(fd, buffer, sizeof buffer, (off_t)from);
    char *at = buffer;
    for (; n > 0 && strchr(" \t\n\r\v\f", *at); n--) at++;
    while (n > 0 && strchr(" \t\n\r\v\f", at[n - 1])) n--;
    size_t kept = n <= 0 ? 0 : n > MAX_DETAIL_BYTES ? MAX_DETAIL_BYTES : (size_t)n;
    memcpy(text, at, kept);
    return kept;
}

/* Why compiling failed, as text. Returns its length; 0 when it succeeded. */
static size_t problem_of(struct run *run, char *text) {
    const char *reason = run->ended == TIME_LIMIT     ? "the compiler took too long"
                         : run->ended == MEMORY_LIMIT ? "the compiler needs too much memory"
                         : run->ended == OUTPUT_LIMIT ? "the compiler writes too much"
                                                      : NULL;
    if (!reason) {
        if (run->ended == EXITED && run->exit_code == 0) return 0;
        size_t n = message_of(run->err, run->err_bytes, text);
        if (!n) n = message_of(run->out, run->out_bytes, text);
        if (n) return n;
        reason = "the compiler failed without a message";
    }
    size_t n = strlen(reason);
    memcpy(text, reason, n);
    return n;
}

/* Wait for the end of the compiler. Returns whether others kept it from the CPU until the longest wall time. */
static bool was_starved(struct session *s, struct program *compiler, struct run *run) {
    struct compile_time time = compile_time_from(&s->program, run->started_s);
    bool in_time;
    do {
        compiler->wall_time_s = time.until_s - run->started_s;
        in_time = await_end(s, run);
    } while (!in_time && may_go_on(&time));
    finish(s, run, in_time);
    return !in_time && !is_used_up(&time) && run->ended == TIME_LIMIT && run->cpu_s <= compiler->cpu_time_s;
}

/* Returns the length of what the compiler says about a program that it compiles, which is put into `said`. */
static size_t compile(struct session *s, char *said) {
    static char problem[MAX_DETAIL_BYTES];
    struct program compiler = compiler_of(s);
    struct run run = {.program = &compiler};
    if (!is_installed(s->compile_argv[0])) fail(s, "there is no %s inside the sandbox", s->compile_argv[0]);
    open_files(s, &run);
    if (spawn(s, &run, SOURCES, -1, -1) == 0) exec_command(s, s->compile_argv);
    if (was_starved(s, &compiler, &run)) refuse(s, COMPILE_STARVED, NULL, 0);
    size_t num_bytes = problem_of(&run, problem);
    size_t num_said = num_bytes ? 0 : message_of(run.err, run.err_bytes, said);
    if (!num_bytes && !num_said) num_said = message_of(run.out, run.out_bytes, said);
    close_files(&run);
    if (!num_bytes) return num_said;
    if (program_is_full()) refuse(s, COMPILE_FAILED, TOO_MANY_FILES, sizeof TOO_MANY_FILES - 1);
    refuse(s, COMPILE_FAILED, problem, num_bytes);
}

/* Send what the compiler has said and, if the gateway wants it, what it has made. */
static void send_compiled(struct session *s, const char *said, size_t num_said) {
    char *made[MAX_SENT_FILES + 1]; /* with more, none is sent */
    uint32_t num_made = 0;
    struct listing files = list(s, AT_FDCWD, MADE);
    for (const char *name; num_made <= MAX_SENT_FILES && (name = next_name(&files));)
        made[num_made++] = allocated(strdup(name));
    close(files.fd);
    send_files(s, COMPILED, said, num_said, MADE, made, num_made, true);
    while (num_made) free(made[--num_made]);
}

void start_command(struct session *s) {
    static char said[MAX_DETAIL_BYTES];
    size_t num_said = 0;
    drop_interpreter(); /* the kernel counts what a process held before its exec as memory of the program */
    open_program(s);
    s->args = "";
    if (s->program.has_compiler) num_said = compile(s, said);
    if (!seal_program(s)) refuse(s, COMPILE_FAILED, TOO_MANY_FILES, sizeof TOO_MANY_FILES - 1);
    if (s->program.wants_program)
        send_compiled(s, said, num_said);
    else if (num_said)
        send_files(s, COMPILED, said, num_said, MADE, NULL, 0, false);
    else
        send_frame(s, COMPILED, NULL, 0);
}

bool spawn_command(struct session *s, struct run *run) {
    if (spawn(s, run, "/tmp", -1, -1) == 0) exec_command(s, s->run_argv);
    return false;
}
