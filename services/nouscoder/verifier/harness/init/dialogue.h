/* Runs whose input and output are pipes. */
#pragma once

#include "init.h"

bool start_dialogue(struct session *s, struct run *run, const int to[2]);
bool serve_dialogue(struct session *s, struct run *run);
void join_dialogue(struct session *s, struct run *run, const struct frame *frame, int to[2]);
void open_turns(struct session *s, struct run *run);
double free_wait_s(struct run *run);
void tell_starved(struct run *run);
double host_starved_s(struct run *run);
void leave_dialogue(struct session *s, struct run *run);
