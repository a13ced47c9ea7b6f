/* What memory costs, one access and many: loops that Python is too slow for. Compiled when first used. */

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

/* As many words as a register holds: wider ones the compiler keeps in memory. */
#if defined(__AVX512F__)
#define REGISTER_BYTES 64
#elif defined(__AVX2__)
#define REGISTER_BYTES 32
#else
#define REGISTER_BYTES 16
#endif
typedef uint64_t lanes __attribute__((vector_size(REGISTER_BYTES), aligned(8)));
#define NUM_LANES (REGISTER_BYTES / 8)
#define FOUR(x) x(0) x(1) x(2) x(3)
#define NO_SUM(i) lanes sum##i = {0};
#define ADD_LANES(i) sum##i += at[i];

/* Seconds of reading `count` words in order, `repeats` times. Into four sums, of which each waits for itself alone:
   a processor loads two or three registers while it makes one addition. */
double ridgeline_read(const uint64_t *words, int64_t count, int64_t repeats) {
  FOUR(NO_SUM)
  uint64_t total = 0;
  int64_t whole = count - count % (4 * NUM_LANES);
  double begun = seconds();
  for (int64_t repeat = 0; repeat < repeats; ++repeat) {
    for (int64_t index = 0; index < whole; index += 4 * NUM_LANES) {
      const lanes *at = (const lanes *)(words + index);
      FOUR(ADD_LANES)
    }
    for (int64_t index = whole; index < count; ++index) total += words[index];
    /* The next pass must not be computed from this one. */
    __asm__ volatile("" : "+r"(words), "+r"(total));
  }
  double taken = seconds() - begun;
  sum0 += sum1 + sum2 + sum3;
  for (int lane = 0; lane < NUM_LANES; ++lane) total += sum0[lane];
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

/* Seconds of `loads` of words that lie whole strides apart, drawn from the first `count` (a power of two) of
   them, each independent of the others. `state` goes on from call to call.
   Source: the generator is Knuth's, MMIX; the upper bits, since its lower ones repeat soon. */
double ridgeline_draw(const uint64_t *words, int64_t count, int64_t stride, int64_t loads, uint64_t *state) {
  uint64_t total = 0, drawn = *state;
  double begun = seconds();
  for (int64_t load = 0; load < loads; ++load) {
    drawn = drawn * 6364136223846793005u + 1442695040888963407u;
    total += words[(int64_t)((drawn >> 33) & (uint64_t)(count - 1)) * stride];
  }
  double taken = seconds() - begun;
  *state = drawn;
  sink = total;
  return taken;
}
