/* What the loops beside this share: they are compiled together, this first. */
#include <stdint.h>
#include <time.h>

static volatile uint64_t sink;

static double read_clock(clockid_t clock) {
  struct timespec now;
  clock_gettime(clock, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Whether the time of a thread on its core advances by less than 10 us from one reading to another: some systems,
   such as gVisor, count it in ticks of 10 ms. */
static int is_thread_clock_fine(void) {
  double begun = read_clock(CLOCK_THREAD_CPUTIME_ID), now = begun;
  for (int reading = 0; reading < 100 && now == begun; ++reading) now = read_clock(CLOCK_THREAD_CPUTIME_ID);
  return now > begun && now < begun + 1e-5;
}

/* Seconds of this thread on its core, without those in which others have it; of the clock on the wall where the
   former are counted in ticks. */
static double seconds(void) {
  static int is_fine = -1;
  if (is_fine < 0) is_fine = is_thread_clock_fine();
  return read_clock(is_fine ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC);
}

#define TWICE(x) x x
#define SIXTEEN(x) TWICE(TWICE(TWICE(TWICE(x))))
