/* The stream to the gateway. A run must not find data of an earlier one in the memory that it shares with init. */
#pragma once

#include "init.h"

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
