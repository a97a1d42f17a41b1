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
    int last_pid;  /* the file that sets the next process id; -1 where init opens it, or the kernel has none */
    uint64_t tmp_bytes, tmp_inodes, base_vm_bytes;
    const void *filter, *notifying_filter; /* struct sock_fprog */
    int image;          /* the file for the parts of the interpreter's memory; see zygote.c */
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
    uint32_t num_made;      /* the last ones of the files were made by a compiler before */
};

/* Init's ends of the pipes of a program in a dialogue. */
struct relay {
    int in;   /* the program's input, to see what it has not read; -1 when closed */
    int out;  /* the program's output; -1 when closed */
    int sink; /* where the waiting bytes go: to the program's input, or in a dialogue to its partner's; -1 when closed */
    char *waiting;
    size_t first, num_waiting, room; /* of `waiting`: the index of the first byte, the number of bytes, the size */
    bool is_ending, is_held;         /* the sink is closed after the waiting bytes */
    double end_by_s;                 /* when the end of the output is passed on at the latest */
    uint64_t num_output, num_input; /* bytes that it has printed, and that the sink has taken */
    double next_measure_s;
};

/* One run of one program. */
struct run {
    const struct program *program;
    int in, out, err, result; /* result is -1 when there is none */
    pid_t pid;
    double started_s, cpu_before_s, children_before_s;
    double starved_s, starved_before_s, most_starved_s; /* kept from the CPU by others: in the run, before it, what counts */
    uint64_t peak_bytes;
    uint64_t before_bytes; /* what the whole gVisor sandbox held just before the run; see process.c */
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
    bool has_heard;        /* it has read something of its partner, or nothing was left before the end */
};

struct session {
    const struct settings *settings;
    int orders, report;     /* pipes from and to the zygote */
    bool owns_stream;       /* the previous submission has ended */
    int files_dir, proc_fd; /* candidates can reach neither; the first in gVisor only */
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
    struct source_file *files; /* [num_files], read-only beside the source when it is compiled and run; then those made */
    char *code; /* compiled Python, marshalled */
    uint64_t code_bytes;
    struct frame arguments; /* for the next run */
    const char *args;       /* for the next run: NUL-terminated strings */
    uint64_t args_bytes;
    uint32_t num_args;
    struct run first; /* the process of a Python program that has compiled and waits at `go` */
    bool in_dialogue; /* in a candidate's process: descriptors 0 and 1 are pipes */
    int go;           /* pipe to the waiting process; -1 when there is none */
    uint64_t own_private, own_shared; /* pages of init, which candidates share; 0 before the first measurement */
    bool is_measured;
    bool has_run, is_unclean; /* a run has ended; /tmp is still that of the first one */
};

_Noreturn void fail(struct session *s, const char *format, ...) __attribute__((format(printf, 2, 3)));
_Noreturn void leave(struct session *s);
double now_s(void);
int move_up(int fd);
void *allocated(void *memory);
void *nouscoder_init(const struct settings *settings, int orders, int report);
void answer_socket_call(struct session *s);
bool new_network(void);
