/* How programs are made ready and started. */
#pragma once

#include "init.h"

/* start_python and spawn_python return true in a candidate's process only. */
bool start_python(struct session *s);
void *assignment_of(struct session *s); /* for the interpreter, in a candidate's process */
void release_first(struct session *s, struct run *run, struct frame *stdin_frame);
void drop_first(struct session *s, struct run *run); /* `run` gets its files */
bool spawn_python(struct session *s, struct run *run);
double compile_cpu_s(const struct session *s);
void count_by_share(const struct session *s, struct run *run);
_Noreturn void refuse(struct session *s, enum kind kind, const char *why, size_t num_bytes);
void start_command(struct session *s);
bool spawn_command(struct session *s, struct run *run); /* always returns false */
