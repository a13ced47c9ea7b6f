/* What memory costs, one access and many: loops that Python is too slow for. Compiled when first used. */
#include <stdint.h>
#include <time.h>

static volatile uint64_t sink;

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

#define TWICE(x) x x
#define SIXTEEN(x) TWICE(TWICE(TWICE(TWICE(x))))

/* Seconds of `hops` loads, each from the address that the one before it brought; a multiple of 16. The walk
   goes on where it was: from the beginning it would find its first lines in a cache. */
double ridgeline_chase(void ***place, int64_t hops) {
  void **at = *place;
  double begun = seconds();
  for (int64_t hop = 0; hop < hops; hop += 16) {
    SIXTEEN(at = (void **)*at;)
  }
  double taken = seconds() - begun;
  *place = at;
  return taken;
}

/* Seconds of reading `count` words in order, `repeats` times. Integers, so that the sum may be vectorised. */
double ridgeline_read(const uint64_t *words, int64_t count, int64_t repeats) {
  uint64_t total = 0;
  double begun = seconds();
  for (int64_t repeat = 0; repeat < repeats; ++repeat) {
    for (int64_t index = 0; index < count; ++index) total += words[index];
    /* The next pass must not be computed from this one. */
    __asm__ volatile("" : "+r"(words), "+r"(total));
  }
  double taken = seconds() - begun;
  sink = total;
  return taken;
}

/* Seconds of reading one word out of every `stride`, `count` in all, each independent of the others. */
double ridgeline_stride(const uint64_t *words, int64_t count, int64_t stride, int64_t repeats) {
  uint64_t total = 0;
  double begun = seconds();
  for (int64_t repeat = 0; repeat < repeats; ++repeat) {
    for (int64_t index = 0; index < count * stride; index += stride) total += words[index];
    __asm__ volatile("" : "+r"(words), "+r"(total));
  }
  double taken = seconds() - begun;
  sink = total;
  return taken;
}
