/* How fast one core multiplies and adds in vectors of so many bits. A width is here only where the processor has
   registers of it: the compiler would make two operations out of one of a width that it lacks. */

#if defined(__x86_64__)
#define IN_REGISTER(x) __asm__ volatile("" : "+x"(x))
#elif defined(__aarch64__)
#define IN_REGISTER(x) __asm__ volatile("" : "+w"(x))
#else
#define IN_REGISTER(x) __asm__ volatile("" : "+m"(x))
#endif

/* Seconds of additions that wait for each other, 16 in a turn: one a cycle on every processor of the last
   decades, so the clock. Both numbers in registers, since additions of constants may be done ahead. */
double ridgeline_additions(int64_t turns) {
  uint64_t total = 1, one = (uint64_t)turns | 1;
  double begun = seconds();
  for (int64_t turn = 0; turn < turns; ++turn) {
    SIXTEEN(total += one; __asm__ volatile("" : "+r"(total), "+r"(one));)
  }
  double taken = seconds() - begun;
  sink = total;
  return taken;
}

/* Sums that do not wait for each other: enough for as many units, times the cycles that each takes, as processors
   have, and few enough to stay in registers (16 of x86 before AVX-512, 32 of ARM) beside the two factors. */
#define TWELVE(x) x(0) x(1) x(2) x(3) x(4) x(5) x(6) x(7) x(8) x(9) x(10) x(11)
#if defined(__aarch64__)
#define NUM_SUMS 16
#define SUMS(x) TWELVE(x) x(12) x(13) x(14) x(15)
#else
#define NUM_SUMS 12
#define SUMS(x) TWELVE(x)
#endif
#define BEGIN(i) T s##i = scale + (float)i;
#define STEP(i) s##i = s##i * scale + shift; IN_REGISTER(s##i);
#define ADD(i) total += s##i;

/* Seconds of so many multiply-adds of vectors; a multiple of 48. Each sum tends to 1, so none overflows. */
#define MULTIPLY_ADD(name, type, first)                                                     \
  double name(int64_t operations) {                                                         \
    typedef type T;                                                                         \
    T scale = (T){0} + 0.999f, shift = (T){0} + 0.001f, total = (T){0};                     \
    SUMS(BEGIN)                                                                             \
    double begun = seconds();                                                               \
    for (int64_t done = 0; done < operations; done += NUM_SUMS) { SUMS(STEP) }              \
    double taken = seconds() - begun;                                                       \
    SUMS(ADD)                                                                               \
    sink = (uint64_t)first;                                                                 \
    return taken;                                                                           \
  }

typedef float float128 __attribute__((vector_size(16)));
typedef float float256 __attribute__((vector_size(32)));
typedef float float512 __attribute__((vector_size(64)));

MULTIPLY_ADD(ridgeline_multiply_add_32, float, total)
#if defined(__SSE2__) || defined(__ARM_NEON)
MULTIPLY_ADD(ridgeline_multiply_add_128, float128, total[0])
#endif
#if defined(__AVX__)
MULTIPLY_ADD(ridgeline_multiply_add_256, float256, total[0])
#endif
#if defined(__AVX512F__)
MULTIPLY_ADD(ridgeline_multiply_add_512, float512, total[0])
#endif
