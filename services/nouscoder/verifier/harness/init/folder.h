/* The buffers of init, the folders of a submission, and files for the gateway. */
#pragma once

#include "init.h"

/* A folder that is being listed. */
struct listing {
    int fd;
    long num_bytes, at;
    char bytes[4096];
};

void *room_for(size_t num_bytes);
void give_back(void *memory, size_t num_bytes);
void *doubled(void *memory, size_t num_bytes);
void send_files(struct session *s, enum kind kind, const char *text, size_t num_text, const char *folder, char **names,
                uint32_t num_names, bool whole);
void mount_work(struct session *s);
void widen_work(struct session *s, uint32_t num_input_bytes);
int unlinked_file(struct session *s);
void place_script(struct session *s);
void open_program(struct session *s);
bool work_holds_much(void);
bool program_is_full(void);
bool seal_program(struct session *s);
void clean(struct session *s);
struct listing list(struct session *s, int at, const char *folder);
const char *next_name(struct listing *l);
void write_file(struct session *s, const char *folder, const char *name, mode_t mode, const void *bytes,
                size_t num_bytes);

enum { MAX_SENT_FILES = 64 };
#define SOURCES "/program/source"
#define MADE "/program/made"
