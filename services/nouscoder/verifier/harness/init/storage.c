/* What init keeps: frames, names, reports. Small things are in buffers of this library, not in the C heap.
 *
 * INVARIANT: a buffer is zero when it is given out and after it has been given back.
 *
 * After a fork, gVisor copies up to 2 MiB of the heap at the first write. The data of this library is far smaller.
 */
#include "init.h"

#include <stdlib.h>
#include <string.h>

enum { NUM_BUFFERS = 8, BUFFER_BYTES = 8192 };

static char buffers[NUM_BUFFERS][BUFFER_BYTES] __attribute__((aligned(16)));
static bool is_taken[NUM_BUFFERS];

/* Zeroed memory. Fails when there is none. */
void *room_for(size_t num_bytes) {
    for (int i = 0; num_bytes <= BUFFER_BYTES && i < NUM_BUFFERS; i++) {
        if (is_taken[i]) continue;
        is_taken[i] = true;
        return buffers[i];
    }
    return allocated(calloc(1, num_bytes ? num_bytes : 1));
}

/* Overwrite the first `num_bytes`, all that were used, and free the memory. */
void give_back(void *memory, size_t num_bytes) {
    if (!memory) return;
    explicit_bzero(memory, num_bytes);
    char *at = memory;
    if (at < buffers[0] || at >= buffers[NUM_BUFFERS])
        free(memory);
    else
        is_taken[(size_t)(at - buffers[0]) / BUFFER_BYTES] = false;
}

/* The same contents with room for twice as many bytes. */
void *doubled(void *memory, size_t num_bytes) {
    void *wider = room_for(2 * num_bytes);
    memcpy(wider, memory, num_bytes);
    give_back(memory, num_bytes);
    return wider;
}
