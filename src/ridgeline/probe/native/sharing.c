/* Two cores that count at once, each by itself: what that costs is decided by where the counters lie. */

/* Seconds of counting to `increments`, begun when `threads` of them have arrived at `gate`; when that was, first
   and last, is in `span`, by the one clock that they share. Atomic as the counters of references and of queues are, and in no order with
   anything else. */
double ridgeline_count(uint64_t *counter, uint64_t *gate, uint64_t threads, int64_t increments, double *span) {
  __atomic_add_fetch(gate, 1, __ATOMIC_ACQ_REL);
  while (__atomic_load_n(gate, __ATOMIC_ACQUIRE) < threads) {}
  span[0] = read_clock(CLOCK_MONOTONIC);
  for (int64_t index = 0; index < increments; ++index) {
    __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
  }
  span[1] = read_clock(CLOCK_MONOTONIC);
  return span[1] - span[0];
}
