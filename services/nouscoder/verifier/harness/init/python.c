/* Python programs. The process of the first test compiles the program, reports, and waits for its input. A submission
 * of one test thus needs one process, and the compiler is confined like a candidate. Later processes get compiled code.
 */
#include "init.h"

#include <errno.h>
#include <math.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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
    run->started_s = now_s();
    /* A process that died while it waited, for example for its memory, ends the test like one that dies in it. */
    if (write_all(s->go, "G", 1)) write_all(s->go, s->args, s->args_bytes);
    close(s->go);
    s->go = -1;
}

void drop_first(struct session *s) {
    close(s->go);
    s->go = -1;
    end_all();
    close_files(&s->first);
}

bool spawn_python(struct session *s, struct run *run) {
    return spawn(s, run, "/tmp", -1, -1) == 0;
}
