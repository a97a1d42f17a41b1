/* Process 1 of a submission's namespaces. It is a fork of a warm interpreter. It is written in C because each page that
 * Python code would touch between two tests would be copied again after each fork (3 us per page).
 *
 * The numbers sent over the stream must equal those of frames.py, and the structures shared with Python those of
 * init_library.py.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

enum kind {
    PROGRAM = 1, RUN, END, ARGUMENTS, DIALOGUE, INPUT, INPUT_END, HOLD, DIRECT_DIALOGUE,
    READY = 17, COMPILED, COMPILE_FAILED, RESULT, FAILED, OUTPUT, HELD, OUTPUT_END, FILES, COMPILE_STARVED,
};
enum ended { EXITED, SIGNALLED, TIME_LIMIT, MEMORY_LIMIT, OUTPUT_LIMIT };
enum result_kind { NO_RESULT, CALL_RESULT, FILE_RESULT }; /* FILE_RESULT: of the file that the program has made */

/* The second byte of the zygote's orders, and of the reports to it: whether a program has made a socket in the network
 * namespace of the zygote since it is new. */
enum { IS_FRESH = '1', IS_USED = 'u' };

/* Exit statuses of init, which the zygote reads. */
enum { EXIT_ENDED = 0, EXIT_STREAM_CLOSED = 3, EXIT_FAILED = 4 };

enum { CANDIDATE_ID = 1000, FIRST_OWN_FD = 64, MEASURE_EVERY_MS = 50 };

/* The settings of the slot. The zygote makes them once. */
struct settings {
    int stream_in, stream_out;
    int peer;      /* a socket to the slot of the partner; -1 when there is none */
    int two_users; /* init and candidates are different users */
    int gvisor;    /* the kernel below is gVisor's sentry */
    uint64_t tmp_bytes, tmp_inodes, base_vm_bytes;
    const void *filter, *notifying_filter; /* struct sock_fprog */
    int image;          /* the file for the parts of the interpreter's memory; see image.c */
    uint32_t num_parts; /* 0 where candidates get their memory by copying at writes */
    const struct iovec *parts;
    uint64_t namespaces; /* new ones for every submission (CLONE_NEW*) */
    const char *id_map;  /* of their users; NULL in gVisor */
};

/* The input of the process of a Python candidate: this header, then the three texts. */
struct assignment {
    double cpu_time_s;
    uint32_t is_first; /* this process compiles, and has descriptors REPORT and GO */
    uint32_t in_dialogue; /* descriptors 0 and 1 are pipes */
    uint32_t meta_bytes, args_bytes, body_bytes; /* the body is source in the first process, later marshalled code */
} __attribute__((packed));
enum { REPORT = 4, GO = 5 };

struct frame {
    enum kind kind;
    uint32_t num_bytes;
    char *bytes;
};

/* A file beside the program's source. */
struct source_file {
    const char *name, *bytes;
    uint32_t num_bytes;
};

/* The fixed part of a PROGRAM frame. */
struct program {
    double compile_time_s, cpu_time_s, wall_time_s;
    uint64_t memory_bytes, extra_space_bytes, output_bytes, num_processes;
    uint32_t result_kind, is_command, has_compiler, meta_bytes, name_bytes, source_bytes, num_compile, num_run, num_files;
    uint32_t num_fetch;     /* files of /tmp that the gateway wants after each run */
    uint32_t wants_program; /* the gateway wants what the compiler makes */
};

/* Init's ends of the pipes of a program in a dialogue. */
struct relay {
    int out;  /* the program's output; -1 when closed */
    int sink; /* where the waiting bytes go: to the program's input, or in a dialogue to its partner's; -1 when closed */
    char *waiting;
    size_t first, num_waiting, room; /* of `waiting`: the index of the first byte, the number of bytes, the size */
    bool is_ending, is_held;         /* the sink is closed after the waiting bytes */
    uint64_t num_output;
    double next_measure_s;
};

/* One run of one program. */
struct run {
    const struct program *program;
    int in, out, err, result; /* result is -1 when there is none */
    pid_t pid;
    double started_s, cpu_before_s, children_before_s;
    uint64_t peak_bytes;
    uint64_t before_bytes; /* what the whole gVisor sandbox held just before the run; see memory.c */
    /* set when the run has ended */
    enum ended ended;
    int exit_code, signal;
    double wall_s, cpu_s;
    uint64_t memory_bytes, out_bytes, err_bytes, result_bytes;
    struct relay relay;
    struct turns *turns;   /* of a dialogue, else NULL */
    int turns_fd;          /* the file of `turns`, before it is mapped */
    int side;              /* in `turns` */
    double spare_s;        /* the most time that it may wait for its partner without being charged for it */
    bool partner_ended;    /* when this program ended, its partner had already ended */
};

struct session {
    const struct settings *settings;
    int orders, report;     /* pipes from and to the zygote */
    bool owns_stream;       /* the previous submission has ended */
    int files_dir, proc_fd; /* candidates can reach neither */
    int meminfo_fd;         /* /proc/meminfo of gVisor, which tells of this sandbox only; -1 in other kernels */
    int last_pid;           /* the file that sets the next process id; -1 when the kernel has none */
    int socket_calls;       /* says when a program makes a socket; -1 when the kernel does not */
    bool has_own_network;   /* this process has left the network namespace of the zygote */
    bool network_is_used;   /* a socket has been made in the current network namespace */
    bool used_shared;       /* a socket has been made in the network namespace of the zygote */
    struct program program;
    char *text; /* the payload of the PROGRAM frame; the pointers below point into it */
    const char *meta, *name, *source;
    char **compile_argv, **run_argv;
    char **fetch;               /* [num_fetch] names */
    struct source_file *files; /* [num_files], read-only beside the source when it is compiled and run */
    char *code; /* compiled Python, marshalled */
    uint64_t code_bytes;
    struct frame arguments; /* for the next run */
    const char *args;       /* for the next run: NUL-terminated strings */
    uint64_t args_bytes;
    uint32_t num_args;
    char **names; /* the files in /tmp at the start of every run */
    int num_names;
    uint64_t last_inode; /* the last inode number of /tmp that init has seen */
    struct run first; /* the process of a Python program that has compiled and waits at `go` */
    bool in_dialogue; /* in a candidate's process: descriptors 0 and 1 are pipes */
    int go;           /* pipe to the waiting process; -1 when there is none */
    uint64_t own_private, own_shared; /* pages of init, which candidates share; 0 before the first measurement */
    bool is_measured;
};

/* The time of a compiler; see compile_time.c. */
struct compile_time {
    double limit_s, used_s; /* used: the time in which it could have a CPU */
    double from_s, until_s; /* the current step */
    double end_s;           /* no step ends later */
};

/* A folder that is being listed. */
struct listing {
    int fd;
    long num_bytes, at;
    char bytes[4096];
};

/* init.c */
_Noreturn void fail(struct session *s, const char *format, ...) __attribute__((format(printf, 2, 3)));
_Noreturn void leave(struct session *s);
double now_s(void);
int move_up(int fd);
void *allocated(void *memory);
void *nouscoder_init(const struct settings *settings, int orders, int report);

/* stream.c: a run must not find data of an earlier one in the memory that it shares with init */
void release(struct frame *frame);
struct frame next_frame(struct session *s);
void send_frame(struct session *s, enum kind kind, const void *bytes, size_t num_bytes);
void send_result(struct session *s, struct run *run);
bool write_all(int fd, const void *bytes, size_t num_bytes);
void send_bytes(struct session *s, const void *bytes, size_t num_bytes);
size_t put_header(char *at, enum kind kind, size_t num_bytes);
void put_32(char **at, uint32_t value);
size_t send_file(struct session *s, int fd, uint64_t offset, uint64_t num_bytes, char *buffer, size_t used, size_t size);
void read_program(struct session *s, struct frame frame);
void read_arguments(struct session *s);
_Noreturn void await_end_frame(struct session *s);

/* storage.c */
void *room_for(size_t num_bytes);
void give_back(void *memory, size_t num_bytes);
void *doubled(void *memory, size_t num_bytes);

/* files.c */
void send_files(struct session *s, enum kind kind, const char *text, size_t num_text, const char *folder, char **names,
                uint32_t num_names, bool whole);

/* process.c */
int unlinked_file(struct session *s);
void open_files(struct session *s, struct run *run);
void fill_stdin(struct session *s, struct run *run, const struct frame *frame);
void take_result_file(struct run *run);
void close_files(struct run *run);
void pipe_up(struct session *s, int ends[2]);
pid_t spawn(struct session *s, struct run *run, const char *folder, int report, int go);
bool await_end(struct session *s, struct run *run);
void finish(struct session *s, struct run *run, bool in_time);
long end_all(void);
void kill_all(void);
void stop_all(void);
void continue_all(void);
_Noreturn void exec_command(struct session *s, char **argv);

/* image.c */
int own_image(struct session *s);
void copy_at_forks(struct session *s);

/* large_pages.c */
uint64_t own_file_bytes(void); /* the pages of files that forks of the zygote hold as their own, which do not count */
void drop_interpreter(void);   /* no Python can run afterwards */

/* memory.c */
void open_meminfo(struct session *s);
void note_memory_before(struct session *s, struct run *run);
void measure_memory(struct session *s, struct run *run);

/* folder.c */
void mount_work(struct session *s);
void place_script(struct session *s);
void open_program(struct session *s);
void seal_program(struct session *s);
void clean(struct session *s);
struct listing list(struct session *s, int at, const char *folder);
const char *next_name(struct listing *l);
void write_file(struct session *s, const char *folder, const char *name, mode_t mode, const void *bytes,
                size_t num_bytes);
bool is_source(struct session *s, const char *name);

/* dialogue.c */
void let_candidate_open(struct session *s, int fd);
bool start_talk(struct session *s, struct run *run, const int to[2]);
bool serve_dialogue(struct session *s, struct run *run);
void write_waiting(struct run *run);
void receive_input(struct session *s, struct run *run);
void close_relay(struct relay *m);

/* direct_dialogue.c */
void join_dialogue(struct session *s, struct run *run, const struct frame *frame, int to[2]);
void open_turns(struct session *s, struct run *run);
void pass_turn(struct run *run);
double free_wait_s(struct run *run);
void note_work(struct session *s, struct run *run);
void note_end(struct run *run);
void leave_dialogue(struct session *s, struct run *run);

/* network.c */
void install_filter(struct session *s);
void answer_socket_call(struct session *s);
void renew_network(struct session *s);
bool new_network(void);

/* python.c: start_python and spawn_python return true in a candidate's process only */
bool start_python(struct session *s);
void *assignment_of(struct session *s); /* for the interpreter, in a candidate's process */
void release_first(struct session *s, struct run *run, struct frame *stdin_frame);
void drop_first(struct session *s);
bool spawn_python(struct session *s, struct run *run);

/* compile_time.c */
struct compile_time compile_time_from(const struct program *p, double begun_s);
bool may_go_on(struct compile_time *t);
bool is_used_up(const struct compile_time *t);
double compile_cpu_s(const struct session *s);
void count_by_share(const struct session *s, struct run *run);
_Noreturn void refuse(struct session *s, enum kind kind, const char *why, size_t num_bytes);

/* command.c */
void start_command(struct session *s);
bool spawn_command(struct session *s, struct run *run); /* always returns false */
