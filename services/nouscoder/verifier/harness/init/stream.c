/* The stream to the gateway. INVARIANT: nothing is read beyond END, so that the next process can take the stream. */
#include "stream.h"
#include "folder.h"
#include "process.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static const uint32_t MAX_FRAME_BYTES = 1u << 30;

static void read_exactly(int fd, void *bytes, size_t num_bytes) {
    char *at = bytes;
    while (num_bytes) {
        ssize_t n = read(fd, at, num_bytes);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) _exit(EXIT_STREAM_CLOSED);
        at += n;
        num_bytes -= (size_t)n;
    }
}

struct frame next_frame(struct session *s) {
    unsigned char header[5];
    read_exactly(s->settings->stream_in, header, sizeof header);
    uint32_t length;
    memcpy(&length, header + 1, 4);
    struct frame frame = {.kind = header[0], .num_bytes = ntohl(length)};
    if (frame.num_bytes > MAX_FRAME_BYTES) fail(s, "a frame of %u bytes", frame.num_bytes);
    frame.bytes = room_for((size_t)frame.num_bytes + 1);
    read_exactly(s->settings->stream_in, frame.bytes, frame.num_bytes);
    frame.bytes[frame.num_bytes] = 0;
    return frame;
}

void release(struct frame *frame) {
    give_back(frame->bytes, frame->num_bytes);
    *frame = (struct frame){0};
}

bool write_all(int fd, const void *bytes, size_t num_bytes) {
    const char *at = bytes;
    while (num_bytes) {
        ssize_t n = write(fd, at, num_bytes);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return false;
        at += n;
        num_bytes -= (size_t)n;
    }
    return true;
}

void send_bytes(struct session *s, const void *bytes, size_t num_bytes) {
    const char *at = bytes;
    while (num_bytes) {
        ssize_t n = write(s->settings->stream_out, at, num_bytes);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) _exit(EXIT_STREAM_CLOSED);
        at += n;
        num_bytes -= (size_t)n;
    }
}

size_t put_header(char *at, enum kind kind, size_t num_bytes) {
    uint32_t length = htonl((uint32_t)num_bytes);
    at[0] = (char)kind;
    memcpy(at + 1, &length, 4);
    return 5;
}

void send_frame(struct session *s, enum kind kind, const void *bytes, size_t num_bytes) {
    char small[4096];
    size_t head = put_header(small, kind, num_bytes);
    if (num_bytes <= sizeof small - head) { /* one write, so that the gateway wakes once */
        if (num_bytes) memcpy(small + head, bytes, num_bytes);
        send_bytes(s, small, head + num_bytes);
        explicit_bzero(small, head + num_bytes);
        return;
    }
    send_bytes(s, small, head);
    send_bytes(s, bytes, num_bytes);
}

static void put(char **at, const void *value, size_t num_bytes) {
    memcpy(*at, value, num_bytes);
    *at += num_bytes;
}

/* In network byte order ("!" of Python's struct), because the gateway may be another machine. */
void put_32(char **at, uint32_t value) {
    value = htonl(value);
    put(at, &value, 4);
}

static void put_64(char **at, uint64_t value) {
    put_32(at, (uint32_t)(value >> 32));
    put_32(at, (uint32_t)value);
}

static void put_double(char **at, double value) {
    uint64_t bits;
    memcpy(&bits, &value, 8);
    put_64(at, bits);
}

/* Append `num_bytes` of a file from `offset` to a buffer of `size` bytes that holds `used`. The buffer is sent whenever
 * it is full. Returns the number of bytes left in it. */
size_t send_file(struct session *s, int fd, uint64_t offset, uint64_t num_bytes, char *buffer, size_t used, size_t size) {
    while (num_bytes) {
        if (used == size) {
            send_bytes(s, buffer, used);
            used = 0;
        }
        size_t wanted = size - used < num_bytes ? size - used : (size_t)num_bytes;
        ssize_t n = pread(fd, buffer + used, wanted, (off_t)offset);
        if (n <= 0) fail(s, "an output cannot be read: %s", n ? strerror(errno) : "the file is shorter than before");
        used += (size_t)n;
        offset += (uint64_t)n;
        num_bytes -= (uint64_t)n;
    }
    return used;
}

void send_result(struct session *s, struct run *run) {
    static char buffer[1 << 16];
    uint64_t err_from = 0, err_bytes = run->err_bytes;
    if (err_bytes > 64 * 1024) {
        err_from = err_bytes - 64 * 1024;
        err_bytes = 64 * 1024;
    }
    uint64_t kept = run->ended == OUTPUT_LIMIT ? 64 * 1024 : run->program->output_bytes;
    uint64_t out_bytes = run->out_bytes < kept ? run->out_bytes : kept;
    uint64_t limit = run->program->output_bytes;
    uint64_t result_bytes = run->result_bytes < limit ? run->result_bytes : limit;
    bool has_result = run->result >= 0 && result_bytes > 0;
    char *at = buffer + 5;
    *at++ = (char)run->ended;
    put_32(&at, (uint32_t)run->exit_code);
    put_32(&at, (uint32_t)run->signal);
    put_double(&at, run->wall_s);
    put_double(&at, run->cpu_s);
    put_64(&at, run->memory_bytes);
    put_32(&at, (uint32_t)out_bytes);
    put_32(&at, (uint32_t)err_bytes);
    put_32(&at, has_result ? (uint32_t)result_bytes : (uint32_t)-1);
    *at++ = (char)(run->partner_ended | run->has_heard << 1);
    put_double(&at, run->starved_s);
    size_t used = (size_t)(at - buffer);
    put_header(buffer, RESULT, used - 5 + out_bytes + err_bytes + (has_result ? result_bytes : 0));
    used = send_file(s, run->out, 0, out_bytes, buffer, used, sizeof buffer);
    used = send_file(s, run->err, err_from, err_bytes, buffer, used, sizeof buffer);
    if (has_result) used = send_file(s, run->result, 0, result_bytes, buffer, used, sizeof buffer);
    send_bytes(s, buffer, used);
    uint64_t all = 64 + out_bytes + err_bytes + result_bytes; /* the header has fewer than 64 bytes */
    explicit_bzero(buffer, all < sizeof buffer ? all : sizeof buffer);
    close_files(run);
}

/* The next `num_bytes` of a payload. Fails when it is shorter. */
static const char *take(struct session *s, const char **at, const char *end, size_t num_bytes) {
    if ((size_t)(end - *at) < num_bytes) fail(s, "a frame is shorter than its lengths");
    const char *found = *at;
    *at += num_bytes;
    return found;
}

/* `num` NUL-terminated strings, as an argv. */
static char **take_strings(struct session *s, const char **at, const char *end, uint32_t num) {
    char **strings = room_for(((size_t)num + 1) * sizeof *strings);
    for (uint32_t i = 0; i < num; i++) {
        const char *stop = memchr(*at, 0, (size_t)(end - *at));
        if (!stop) fail(s, "a frame holds too few strings");
        strings[i] = (char *)take(s, at, end, (size_t)(stop - *at) + 1);
    }
    return strings;
}

static uint32_t take_32(struct session *s, const char **at, const char *end) {
    uint32_t value;
    memcpy(&value, take(s, at, end, 4), 4);
    return value;
}

static struct source_file take_file(struct session *s, const char **at, const char *end) {
    struct source_file file;
    file.name = take(s, at, end, take_32(s, at, end));
    file.num_bytes = take_32(s, at, end);
    file.bytes = take(s, at, end, file.num_bytes);
    return file;
}

void read_program(struct session *s, struct frame frame) {
    const char *at = frame.bytes, *end = frame.bytes + frame.num_bytes;
    memcpy(&s->program, take(s, &at, end, sizeof s->program), sizeof s->program);
    struct program *p = &s->program;
    s->text = frame.bytes;
    s->meta = take(s, &at, end, p->meta_bytes);
    s->name = take(s, &at, end, (size_t)p->name_bytes + 1); /* with its NUL */
    s->source = take(s, &at, end, p->source_bytes);
    if (p->num_compile) s->compile_argv = take_strings(s, &at, end, p->num_compile);
    if (p->num_run) s->run_argv = take_strings(s, &at, end, p->num_run);
    if (p->num_files) s->files = room_for(p->num_files * sizeof *s->files);
    for (uint32_t i = 0; i < p->num_files; i++) s->files[i] = take_file(s, &at, end);
    if (p->num_fetch) s->fetch = take_strings(s, &at, end, p->num_fetch);
}

/* Read the arguments of the next run, and write its files to /tmp. */
void read_arguments(struct session *s) {
    s->args = "";
    s->num_args = 0;
    s->args_bytes = 0;
    if (!s->arguments.bytes) return;
    const char *at = s->arguments.bytes, *end = at + s->arguments.num_bytes;
    s->num_args = take_32(s, &at, end);
    s->args_bytes = take_32(s, &at, end);
    s->args = take(s, &at, end, s->args_bytes);
    for (uint32_t left = take_32(s, &at, end); left; left--) {
        struct source_file file = take_file(s, &at, end);
        write_file(s, "/tmp", file.name, 0444, file.bytes, file.num_bytes);
    }
}

/* After COMPILE_FAILED the gateway sends only END. */
_Noreturn void await_end_frame(struct session *s) {
    struct frame frame = next_frame(s);
    if (frame.kind != END) fail(s, "expected END, not kind %d", frame.kind);
    leave(s);
}
