/* Blocks of a file, one after another, without an interpreter between them: many threads of Python that read
   at once would wait for each other more than for the drive. Compiled when first used. */
#include <errno.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Reads blocks at `count` places until `limit_s` is over, but the first in any case; begin and end of each go
   to `times`. Gives their number, or the negative number of the error. */
int64_t ridgeline_read_blocks(int file, void *block, int64_t num_bytes, const int64_t *places, int64_t count,
                              double limit_s, double *times) {
  double end = seconds() + limit_s;
  for (int64_t index = 0; index < count; ++index) {
    double begun = seconds();
    if (index > 0 && begun > end) return index;
    ssize_t moved = pread(file, block, (size_t)num_bytes, (off_t)places[index]);
    if (moved != num_bytes) return moved < 0 ? -errno : -EIO;
    times[2 * index] = begun;
    times[2 * index + 1] = seconds();
  }
  return count;
}
