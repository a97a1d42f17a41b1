/* One run: its process, its files, its memory, its end. */
#include "process.h"
#include "dialogue.h"
#include "folder.h"
#include "program.h"
#include "stream.h"
#include "zygote.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sched.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Measures the memory of a run's whole process tree while it runs, because rlimits bound one process and not the sum.
 *
 * A measurement costs a few system calls per process and happens every MEASURE_EVERY_MS, so short tests are never
 * measured. In that time two cores can fill a few hundred MiB more than the limit. Of shared mappings only the largest
 * counts. The proc mount used here shows every process of the namespace, and candidates cannot reach it.
 *
 * gVisor counts only what a process itself has touched, so a mapping whose pages a dead child has touched, or a file in
 * tmpfs, belongs to nobody. There the growth of the whole sandbox counts too: it serves one submission at a time, and a
 * runner pod that exceeds its limit is killed with the sentry. A run may hold what a control group would allow it
 * (sandbox/session.py): its limit, its output, and OWN_BYTES for what the slot does meanwhile. In a dialogue the
 * partner shares the sandbox, so the growth says nothing about one program and does not count.
 */

static const uint64_t OWN_BYTES = 48ull << 20;

void open_meminfo(struct session *s) {
    s->meminfo_fd = -1;
    if (!s->settings->gvisor) return;
    s->meminfo_fd = openat(s->proc_fd, "meminfo", O_RDONLY | O_CLOEXEC);
    if (s->meminfo_fd < 0) fail(s, "the memory of the sandbox cannot be read");
    s->meminfo_fd = move_up(s->meminfo_fd);
}

/* What all private and shared mappings and all tmpfs of this gVisor sandbox hold [bytes], each page once. Freed memory
 * leaves this sum at once, but MemFree later. Returns 0 in other kernels. */
static uint64_t sandbox_bytes(struct session *s) {
    char text[2048];
    if (s->meminfo_fd < 0) return 0;
    ssize_t n = pread(s->meminfo_fd, text, sizeof text - 1, 0);
    text[n > 0 ? n : 0] = 0;
    const char *line = strstr(text, "AnonPages:");
    if (!line) fail(s, "the memory of the sandbox cannot be read");
    return 1024 * strtoull(line + strlen("AnonPages:"), NULL, 10);
}

/* Called last before the process of a run gets to run. The input of the run is then in memory. */
void note_memory_before(struct session *s, struct run *run) { run->before_bytes = sandbox_bytes(s); }

/* By how much the sandbox has grown since the run began, if that is more than the run may hold, else 0 [bytes]. */
static uint64_t excess_growth(struct session *s, struct run *run) {
    uint64_t now = sandbox_bytes(s);
    if (now < run->before_bytes) run->before_bytes = now; /* what an earlier submission held was just freed */
    uint64_t grown = now - run->before_bytes;
    return grown > run->program->memory_bytes + run->program->output_bytes + OWN_BYTES ? grown : 0;
}

/* Private and shared memory of a process [pages]. Returns false when the process has ended. */
static bool read_memory(struct session *s, const char *pid, uint64_t *own, uint64_t *shared) {
    char path[32], text[256];
    snprintf(path, sizeof path, "%.20s/statm", pid);
    int fd = openat(s->proc_fd, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0) return false;
    text[n] = 0;
    unsigned long long size, resident, common;
    if (sscanf(text, "%llu %llu %llu", &size, &resident, &common) != 3) return false;
    *own = resident > common ? resident - common : 0;
    *shared = common;
    return true;
}

void measure_memory(struct session *s, struct run *run) {
    if (!s->is_measured) {
        s->is_measured = true; /* an executed program shares no pages with init */
        if (!s->program.is_command && !read_memory(s, "1", &s->own_private, &s->own_shared))
            fail(s, "the memory of process 1 cannot be read");
    }
    struct listing processes = list(s, s->proc_fd, ".");
    uint64_t private = 0, shared = 0;
    for (const char *name; (name = next_name(&processes));) {
        uint64_t own, common;
        if (!isdigit((unsigned char)name[0]) || !strcmp(name, "1")) continue;
        if (!read_memory(s, name, &own, &common)) continue;
        if (own > s->own_private) private += own - s->own_private;
        if (common > s->own_shared && common - s->own_shared > shared) shared = common - s->own_shared;
    }
    close(processes.fd);
    uint64_t bytes = (private + shared) * (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t grown = run->turns ? 0 : excess_growth(s, run);
    if (grown > bytes) bytes = grown;
    if (bytes > run->peak_bytes) run->peak_bytes = bytes;
}

/* The time in which others kept a run from the CPU, which its wall time does not count.
 *
 * The kernel counts for each thread how long it was ready to run and had no CPU. The waits of the living threads count
 * together, because work moves from thread to thread (Go); but of a thread that hardly works only a share, because it
 * waits beside those that do. What the threads of the run took from each other does not count. gVisor does not tell it.
 */

enum { MOST_THREADS = 256 /* that are looked at */, STARVED_TIMES = 9, MOST_STARVED_S = 120 /* as in session.py */ };

double most_starved_s(const struct program *p) { return fmin(STARVED_TIMES * p->wall_time_s, MOST_STARVED_S); }

/* How long a thread had a CPU and how long it waited for one [s]; zeros when it has ended. */
static void read_schedule(struct session *s, const char *path, double *ran, double *waited) {
    char text[96];
    unsigned long long ran_ns, waited_ns;
    *ran = *waited = 0;
    int fd = openat(s->proc_fd, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    text[n > 0 ? n : 0] = 0;
    if (sscanf(text, "%llu %llu", &ran_ns, &waited_ns) != 2) return;
    *ran = 1e-9 * (double)ran_ns;
    *waited = 1e-9 * (double)waited_ns;
}

/* Called before the first process, which has compiled the program, gets its input. */
void note_starved_before(struct session *s, struct run *run) {
    char path[32];
    double ran;
    snprintf(path, sizeof path, "%d/schedstat", run->pid);
    read_schedule(s, path, &ran, &run->starved_before_s);
}

static void note_starved(struct session *s, struct run *run) {
    cpu_set_t cpus;
    double elapsed_s = now_s() - run->started_s, ran_s = -run->cpu_before_s, longest_s = 0, together_s = 0;
    int num_threads = 0;
    struct listing processes = list(s, s->proc_fd, ".");
    for (const char *pid; (pid = next_name(&processes)) && num_threads < MOST_THREADS;) {
        char path[64];
        if (!isdigit((unsigned char)pid[0]) || !strcmp(pid, "1")) continue;
        snprintf(path, sizeof path, "%.20s/task", pid);
        struct listing threads = {.fd = openat(s->proc_fd, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC)};
        if (threads.fd < 0) continue; /* it has ended */
        for (const char *thread; (thread = next_name(&threads)) && num_threads < MOST_THREADS; num_threads++) {
            double ran, waited;
            snprintf(path, sizeof path, "%.20s/task/%.20s/schedstat", pid, thread);
            read_schedule(s, path, &ran, &waited);
            ran_s += ran;
            longest_s = fmax(longest_s, waited);
            together_s += fmin(waited, STARVED_TIMES * ran);
        }
        close(threads.fd);
    }
    close(processes.fd);
    int num_cpus = sched_getaffinity(0, sizeof cpus, &cpus) ? 1 : CPU_COUNT(&cpus);
    double waited_s = fmax(longest_s, together_s) - run->starved_before_s;
    double by_others_s = fmin(waited_s, num_cpus * elapsed_s - ran_s);
    run->starved_s = fmax(run->starved_s, fmin(fmin(by_others_s, elapsed_s), run->most_starved_s));
    if (run->turns) tell_starved(run);
}

/* The wall time that the run has left [s]. What others took from it is looked at from half of its limit on. */
double left_s(struct session *s, struct run *run) {
    double limit_s = run->program->wall_time_s;
    if (run->most_starved_s > 0 && now_s() - run->started_s > limit_s / 2) note_starved(s, run);
    return run->started_s + limit_s + run->starved_s + free_wait_s(run) + host_starved_s(run) - now_s();
}

/* One test: its files, a fresh process, the wait for its end, and its result.
 *
 * INVARIANT: `finish` returns only after every process of the run is dead and reaped.
 */

static const uint64_t COMMAND_SPACE_BYTES = 512ull << 20; /* for libraries and stacks */
static const char RESULT_FILE[] = "/tmp/output"; /* as in frames.py */
enum { CANNOT_EXEC = 127, KILL_EVERY_NS = 500000, MAX_COMMAND = 255 /* words of a command of languages.toml */ };

void open_files(struct session *s, struct run *run) {
    run->in = unlinked_file(s);
    run->out = unlinked_file(s);
    run->err = unlinked_file(s);
    run->result = run->program->result_kind == CALL_RESULT ? unlinked_file(s) : -1;
}

/* Open the file that the program has made for its caller, after its end. What is not a plain file counts as none. */
void take_result_file(struct run *run) {
    struct stat file;
    if (run->program->result_kind != FILE_RESULT) return;
    int fd = open(RESULT_FILE, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) return;
    run->result = move_up(fd);
    bool is_file = !fstat(run->result, &file) && S_ISREG(file.st_mode);
    run->result_bytes = is_file ? (uint64_t)file.st_size : 0;
}

void fill_stdin(struct session *s, struct run *run, const struct frame *frame) {
    widen_work(s, frame->num_bytes);
    if (!write_all(run->in, frame->bytes, frame->num_bytes)) fail(s, "the input of a run: %s", strerror(errno));
    lseek(run->in, 0, SEEK_SET);
}

void close_files(struct run *run) {
    close(run->in);
    close(run->out);
    close(run->err);
    if (run->result >= 0) close(run->result);
}

/* A pipe whose descriptors are above those of a run's files. */
void pipe_up(struct session *s, int ends[2]) {
    if (pipe2(ends, O_CLOEXEC)) fail(s, "pipe: %s", strerror(errno));
    ends[0] = move_up(ends[0]);
    ends[1] = move_up(ends[1]);
}

static double children_cpu_s(void) {
    struct rusage used;
    getrusage(RUSAGE_CHILDREN, &used);
    return (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
           1e-6 * (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec);
}

static int limit(int kind, uint64_t soft, uint64_t hard) {
    struct rlimit both = {soft, hard};
    return setrlimit(kind, &both);
}

/* Let the stack of a program's main thread grow as far as its memory allows. glibc takes a finite limit as the stack
 * size of every thread, and its own 2 MiB for an infinite one. */
static int widen_stack(void) {
    struct rlimit both;
    if (getrlimit(RLIMIT_STACK, &both)) return -1;
    return limit(RLIMIT_STACK, both.rlim_max, both.rlim_max);
}

static int drop_capabilities(void) {
    struct __user_cap_header_struct head = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct none[2] = {{0}};
    return (int)syscall(SYS_capset, &head, none);
}

/* The inode of a pidfd is the number of its process since the host's start, by which a run could count those of others.
 * Init needs pidfds under the first filter. In gVisor they count nothing, and a filter costs a millisecond. */
static int refuse_pidfds(const struct session *s) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_pidfd_open, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = {sizeof code / sizeof *code, code};
    return s->settings->gvisor ? 0 : prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0);
}

/* Set the limits and drop all rights. The change of user is the last step, so that init can tell whether all steps
 * succeeded (`was_confined`). CPU limits are whole seconds: SIGXCPU comes at the limit, SIGKILL a second later. The
 * first process of a Python program sets its CPU limit again after it has compiled; those of the later runs get the same,
 * so that a program does not see which run is the first. */
static int confine(struct session *s, const struct program *p, const char *folder, bool compiles_first) {
    uint64_t space = p->is_command ? 2 * p->memory_bytes + p->extra_space_bytes + COMMAND_SPACE_BYTES
                                   : p->memory_bytes + s->settings->base_vm_bytes;
    uint64_t seconds = (uint64_t)ceil(compiles_first ? compile_cpu_s(s) : s->first.cpu_before_s + p->cpu_time_s);
    sigset_t interrupt;
    sigemptyset(&interrupt);
    sigaddset(&interrupt, SIGINT);
    umask(022);
    if (limit(RLIMIT_AS, space, space) || limit(RLIMIT_FSIZE, p->output_bytes + 1, p->output_bytes + 1) ||
        limit(RLIMIT_NPROC, p->num_processes, p->num_processes) ||
        limit(RLIMIT_CPU, seconds, compiles_first ? RLIM_INFINITY : seconds + 1) || chdir(folder) ||
        (p->is_command && widen_stack()) ||
        sigprocmask(SIG_UNBLOCK, &interrupt, NULL) || refuse_pidfds(s))
        return -1;
    if (!s->settings->two_users) return drop_capabilities();
    return setresgid(CANDIDATE_ID, CANDIDATE_ID, CANDIDATE_ID) || setresuid(CANDIDATE_ID, CANDIDATE_ID, CANDIDATE_ID);
}

/* Set descriptors 0, 1 and 2, 3 (result), and 4 and 5 (report, go), and close all others. The sources are FIRST_OWN_FD
 * or above, so none is overwritten before it is copied. */
static int set_descriptors(const struct run *run, int report, int go) {
    if (dup2(run->in, 0) < 0 || dup2(run->out, 1) < 0 || dup2(run->err, 2) < 0) return -1;
    unsigned free_from = 3;
    if (run->result >= 0) {
        if (dup2(run->result, 3) < 0) return -1;
        free_from = 4;
    }
    if (report >= 0) {
        if (run->result < 0) close(3);
        if (dup2(report, REPORT) < 0 || dup2(go, GO) < 0) return -1;
        free_from = GO + 1;
    }
    return (int)syscall(SYS_close_range, free_from, ~0u, 0);
}

/* Fork a confined process. Its id is 2 in each run, so that no run can count the processes of an earlier one. Returns 0 in it; it can then run candidate code. */
pid_t spawn(struct session *s, struct run *run, const char *folder, int report, int go) {
    note_memory_before(s, run);
    run->children_before_s = children_cpu_s();
    run->started_s = now_s();
    if (s->last_pid >= 0 && pwrite(s->last_pid, "1", 1, 0) != 1) fail(s, "ns_last_pid: %s", strerror(errno));
    run->pid = fork();
    if (run->pid < 0) fail(s, "fork: %s", strerror(errno));
    if (run->pid == 0 && ((!run->program->is_command && own_image(s)) || set_descriptors(run, report, go) ||
                          confine(s, run->program, folder, report >= 0)))
        _exit(1); /* init sees by the user id of the dead process that it was not confined */
    return run->pid;
}

void exec_command(struct session *s, char **argv) {
    char *few[2 * MAX_COMMAND]; /* on the stack, because a write to the heap would copy much of it in gVisor */
    char **all = s->num_args < MAX_COMMAND ? few : allocated(calloc((size_t)s->num_args + MAX_COMMAND + 1, sizeof *all));
    uint32_t n = 0;
    for (; argv[n] && n < MAX_COMMAND; n++) all[n] = argv[n];
    const char *at = s->args;
    for (uint32_t i = 0; i < s->num_args; i++, at += strlen(at) + 1) all[n++] = (char *)at;
    all[n] = NULL;
    signal(SIGPIPE, SIG_DFL); /* the interpreter ignores it, and the program would inherit that */
    signal(SIGXFSZ, SIG_DFL);
    execvp(all[0], all);
    dprintf(2, "%s: %s\n", all[0], strerror(errno));
    _exit(CANNOT_EXEC);
}

void kill_all(void) { kill(-1, SIGKILL); }

/* Stop every other process of this pid namespace, or let them all continue. No process can refuse either. */
void stop_all(void) { kill(-1, SIGSTOP); }

void continue_all(void) { kill(-1, SIGCONT); }

/* Kill and reap every other process of this pid namespace. Returns the largest resident size among them [KiB].
 * All of them descend from this process, so none is left when it has no child. A kill of all looks at each process of the
 * host. It is repeated while any is left, because in gVisor it is not atomic and a concurrent fork can survive it. */
long end_all(void) {
    long peak_kib = 0;
    for (bool is_killed = false;; is_killed = true) {
        int status;
        struct rusage used;
        pid_t pid = wait4(-1, &status, WNOHANG, &used);
        if (pid < 0 && errno == ECHILD) return peak_kib;
        if (pid > 0) {
            if (used.ru_maxrss > peak_kib) peak_kib = used.ru_maxrss;
            continue;
        }
        if (is_killed) nanosleep(&(struct timespec){0, KILL_EVERY_NS}, NULL);
        kill_all();
    }
}

/* Wait until the process ends or holds too much memory (true), or its wall time is over (false). Does not return when
 * the gateway sends END. */
bool await_end(struct session *s, struct run *run) {
    int fd = (int)syscall(SYS_pidfd_open, run->pid, 0);
    if (fd < 0) fail(s, "pidfd_open: %s", strerror(errno));
    struct pollfd polled[] = {{fd, POLLIN, 0}, {s->settings->stream_in, POLLIN, 0}, {s->socket_calls, POLLIN, 0}};
    bool in_time = false;
    for (double left; (left = left_s(s, run)) > 0;) {
        int wait_ms = left * 1000 < MEASURE_EVERY_MS ? (int)(left * 1000) + 1 : MEASURE_EVERY_MS;
        int ready = poll(polled, 3, wait_ms);
        if (ready < 0 && errno != EINTR) fail(s, "poll: %s", strerror(errno));
        if (ready > 0 && polled[2].revents) answer_socket_call(s);
        if (ready > 0 && polled[0].revents) {
            in_time = true;
            break;
        }
        if (ready > 0 && polled[1].revents) {
            struct frame frame = next_frame(s);
            if (frame.kind != END) fail(s, "kind %d while a run is in progress", frame.kind);
            end_all();
            leave(s);
        }
        measure_memory(s, run);
        if (run->peak_bytes > run->program->memory_bytes) {
            in_time = true;
            break;
        }
    }
    close(fd);
    return in_time;
}

/* Whether the dead process had changed its user, the last step before candidate code. */
static bool was_confined(struct session *s, pid_t pid) {
    siginfo_t info;
    if (!s->settings->two_users) return true;
    return !waitid(P_PID, (id_t)pid, &info, WEXITED | WNOWAIT) && info.si_uid == CANDIDATE_ID;
}

/* Whether a text holds one of the words, which end with NULL. */
static bool holds(const char *text, size_t n, const char *const *words) {
    for (; *words; words++)
        if (memmem(text, n, *words, strlen(*words))) return true;
    return false;
}

/* Whether stderr says that there was no memory: in its last line, or in a line that only a runtime prints. */
static bool reports_no_memory(int fd, uint64_t size) {
    static const char *const in_last_line[] = {"MemoryError", "std::bad_alloc", "Cannot allocate memory",
                                               "out of memory", "OutOfMemoryError", "Memory allocation still failed",
                                               NULL};
    static const char *const anywhere[] = {"Exception in thread \"main\" java.lang.OutOfMemoryError",
                                           "JavaScript heap out of memory", "fatal error: runtime: out of memory",
                                           "Out of memory!\n", NULL};
    static char tail[64 * 1024 + 1];
    uint64_t from = size > 64 * 1024 ? size - 64 * 1024 : 0;
    ssize_t n = pread(fd, tail, 64 * 1024, (off_t)from);
    if (n <= 0) return false;
    size_t num_read = (size_t)n;
    while (n > 0 && strchr(" \t\n\r\v\f", tail[n - 1])) n--;
    char *line = n ? memrchr(tail, '\n', (size_t)n) : NULL;
    line = line ? line + 1 : tail;
    bool found = holds(line, (size_t)(tail + n - line), in_last_line) || holds(tail, num_read, anywhere);
    explicit_bzero(tail, num_read);
    return found;
}

static void classify(struct run *run, int status) {
    const struct program *p = run->program;
    struct stat out, err, result = {0};
    fstat(run->out, &out);
    fstat(run->err, &err);
    if (run->result >= 0) fstat(run->result, &result);
    run->out_bytes = (uint64_t)out.st_size;
    run->err_bytes = (uint64_t)err.st_size;
    run->result_bytes = (uint64_t)result.st_size;
    run->exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 0;
    run->signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    bool well = WIFEXITED(status) && run->exit_code == 0;
    uint64_t most = run->out_bytes > run->err_bytes ? run->out_bytes : run->err_bytes;
    if (most > p->output_bytes || run->signal == SIGXFSZ)
        run->ended = OUTPUT_LIMIT;
    else if (run->ended == TIME_LIMIT || run->signal == SIGXCPU || run->cpu_s > p->cpu_time_s)
        run->ended = TIME_LIMIT;
    else if (run->memory_bytes > p->memory_bytes || (!well && reports_no_memory(run->err, run->err_bytes)))
        run->ended = MEMORY_LIMIT;
    else
        run->ended = run->signal ? SIGNALLED : EXITED;
}

/* Kill all processes of the run and fill in its result. */
void finish(struct session *s, struct run *run, bool in_time) {
    bool too_big = run->peak_bytes > run->program->memory_bytes;
    double left = left_s(s, run); /* before the end is taken, so that no free time is after it */
    run->wall_s = fmax(0, run->program->wall_time_s - left);
    if (!in_time || too_big) kill_all();
    bool confined = was_confined(s, run->pid);
    int status;
    struct rusage used;
    while (wait4(run->pid, &status, 0, &used) < 0)
        if (errno != EINTR) fail(s, "wait4: %s", strerror(errno));
    long others_kib = end_all();
    uint64_t peak_bytes = 1024 * (uint64_t)(used.ru_maxrss > others_kib ? used.ru_maxrss : others_kib);
    if (!run->program->is_command) peak_bytes -= peak_bytes < own_file_bytes() ? peak_bytes : own_file_bytes();
    run->memory_bytes = peak_bytes > run->peak_bytes ? peak_bytes : run->peak_bytes;
    if (!confined && in_time && !too_big) fail(s, "a test's process could not be confined");
    double cpu_s = children_cpu_s() - run->children_before_s - run->cpu_before_s;
    run->cpu_s = cpu_s > 0 ? cpu_s : 0;
    run->ended = in_time ? EXITED : TIME_LIMIT;
    classify(run, status);
}
