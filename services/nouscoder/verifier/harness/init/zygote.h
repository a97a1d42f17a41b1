/* The memory of the warm interpreter. */
#pragma once

#include "init.h"

int own_image(struct session *s);
void copy_at_forks(struct session *s);
uint64_t own_file_bytes(void); /* the pages of files that forks of the zygote hold as their own, which do not count */
void drop_interpreter(void);   /* no Python can run afterwards */
