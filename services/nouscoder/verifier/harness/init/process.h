/* The process of a run. */
#pragma once

#include "init.h"

void open_files(struct session *s, struct run *run);
void fill_stdin(struct session *s, struct run *run, const struct frame *frame);
void take_result_file(struct run *run);
void close_files(struct run *run);
void pipe_up(struct session *s, int ends[2]);
pid_t spawn(struct session *s, struct run *run, const char *folder, int report, int go);
double most_starved_s(const struct program *p);
double left_s(struct session *s, struct run *run);
void note_starved_before(struct session *s, struct run *run);
bool await_end(struct session *s, struct run *run);
void finish(struct session *s, struct run *run, bool in_time);
long end_all(void);
void kill_all(void);
void stop_all(void);
void continue_all(void);
_Noreturn void exec_command(struct session *s, char **argv);
void open_meminfo(struct session *s);
void note_memory_before(struct session *s, struct run *run);
void measure_memory(struct session *s, struct run *run);
