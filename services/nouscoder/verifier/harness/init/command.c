/* Programs of other languages: a confined process compiles them once per submission, then each test is one exec.
 *
 * INVARIANT: after `start_command` no process of the compiler runs, and the compiled program is read-only.
 */
#include "init.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_DETAIL_BYTES = 1900 };

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
    if (spawn(s, &run, "/program", -1, -1) == 0) exec_command(s, s->compile_argv);
    if (was_starved(s, &compiler, &run)) refuse(s, COMPILE_STARVED, NULL, 0);
    size_t num_bytes = problem_of(&run, problem);
    size_t num_said = num_bytes ? 0 : message_of(run.err, run.err_bytes, said);
    if (!num_bytes && !num_said) num_said = message_of(run.out, run.out_bytes, said);
    close_files(&run);
    if (!num_bytes) return num_said;
    refuse(s, COMPILE_FAILED, problem, num_bytes);
}

/* Send what the compiler has said and, if the gateway wants it, what it has made. */
static void send_compiled(struct session *s, const char *said, size_t num_said) {
    size_t num_bytes = ((size_t)s->num_names + 1) * sizeof(char *);
    char **made = room_for(num_bytes);
    uint32_t num_made = 0;
    for (int i = 0; i < s->num_names; i++)
        if (!is_source(s, s->names[i])) made[num_made++] = s->names[i];
    send_files(s, COMPILED, said, num_said, "/program", made, num_made, true);
    give_back(made, num_bytes);
}

void start_command(struct session *s) {
    static char said[MAX_DETAIL_BYTES];
    size_t num_said = 0;
    drop_interpreter(); /* the kernel counts what a process held before its exec as memory of the program */
    open_program(s);
    s->args = "";
    if (s->program.has_compiler) num_said = compile(s, said);
    seal_program(s);
    if (s->program.wants_program)
        send_compiled(s, said, num_said);
    else if (num_said)
        send_files(s, COMPILED, said, num_said, "/program", NULL, 0, false);
    else
        send_frame(s, COMPILED, NULL, 0);
}

bool spawn_command(struct session *s, struct run *run) {
    if (spawn(s, run, "/tmp", -1, -1) == 0) exec_command(s, s->run_argv);
    return false;
}
