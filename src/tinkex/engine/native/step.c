/* A step on a CPU: a token of every row through the whole model, by a team of threads. A row is a
 * sequence that gets one more token, or a position of a prompt.
 *
 * The sums of a row have an order that depends on that row alone: not on its neighbours, nor on the
 * number of threads, nor on the thread that computes them. Threads take work in small units, so
 * that a slow one delays little, and spin while they wait for each other, as long as that pays.
 *
 * Weights are in panels of PANEL outputs: [panel][input][PANEL], so that a product reads them once,
 * in order. Projections that share an input are parts of one linear layer; each part begins a
 * panel.
 *
 * Names: B rows, D hidden, H query heads, G key/value heads, C channels of a head, F mlp, R rank.
 */
#if defined(__linux__)
#define _GNU_SOURCE /* for the cores of threads */
#endif
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define PANEL 16
#define PARTS 3
#if defined(__AVX512F__)
#define LANES 16
#define ROWS 12 /* at most in a tile: with two panels they fill 24 of the 32 registers */
#elif defined(__AVX__)
#define LANES 8
#define ROWS 6
#elif defined(__aarch64__)
#define LANES 4
#define ROWS 5 /* they fill 20 of 32 registers; with a sixth, compilers leave some in memory */
#else
#define LANES 4
#define ROWS 6
#endif
#define VECTORS (PANEL / LANES)

/* Unroll a loop of known length fully. gcc needs a number that is not smaller than the length. With
 * a larger number, clang up to version 16 does not unroll, and leaves the sums of a tile in memory.
 */
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 12")
#endif

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef float loose __attribute__((vector_size(LANES * 4), aligned(4)));
typedef float quad __attribute__((vector_size(16)));
typedef int32_t ints __attribute__((vector_size(LANES * 4)));

static inline vec load(const float *from) { return *(const loose *)from; }
static inline void store(float *to, vec x) { *(loose *)to = x; }
static inline vec splat(float x) { return x - (vec){}; } /* 0 + x would make 0 of -0 */

/* a * b + c, rounded once where the processor can do that. The compiler must not choose: gcc splits
 * such a sum in some loops and not in others, depending on the processor, and the bits of a row
 * would then depend on the number of rows. Everywhere else a product is rounded before it is added
 * to: see the compiler's flags in library.py. */
static inline __attribute__((always_inline)) vec multiply_add(vec a, vec b, vec c) {
#if LANES == 16
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8 && defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FMA__)
    return (vec)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c);
#elif defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

static inline float total(vec x) {
    union {
        vec whole;
        quad part[LANES / 4];
    } split = {x};
    quad sum = split.part[0];
    for (int i = 1; i < LANES / 4; i++) sum += split.part[i];
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

/* e^x to about one unit in the last place: 2^n times a polynomial of the rest, within +-ln(2)/2.
 * Subnormal results are 0. */
static inline vec exponential(vec x) {
    const vec high = splat(88.0f), low = splat(-87.3f);
    ints above = x > high, below = x < low;
    x = (vec)((above & (ints)high) | (~above & (ints)x));
    x = (vec)((below & (ints)low) | (~below & (ints)x));
    const vec shift = splat(12582912.0f); /* rounds to the nearest whole number */
    vec n = multiply_add(x, splat(1.44269504088896341f), shift) - shift;
    vec r = multiply_add(n, splat(2.12194440e-4f), multiply_add(n, splat(-0.693359375f), x));
    vec p = multiply_add(splat(1.9875691500e-4f), r, splat(1.3981999507e-3f));
    p = multiply_add(p, r, splat(8.3334519073e-3f));
    p = multiply_add(p, r, splat(4.1665795894e-2f));
    p = multiply_add(p, r, splat(1.6666665459e-1f));
    p = multiply_add(p, r, splat(5.0000001201e-1f));
    p = multiply_add(p, r * r, r) + 1.0f;
    ints power = (__builtin_convertvector(n, ints) + 127) << 23;
    return (vec)((ints)(p * (vec)power) & ~below);
}

/* --- Inputs, as Python describes them (see bindings.py) --- */

typedef struct {
    const float *weight, *bias;
    int64_t inputs, parts, sizes[PARTS];
} Linear;

typedef struct {
    const float *input_norm, *mlp_norm, *q_norm, *k_norm, *post_attention_norm, *post_mlp_norm;
    Linear qkv, o, gate_up, down;
    int64_t rotary;       /* the kind of its rotary embedding; -1 if none */
    int64_t window;       /* 0: all */
    float scale, softcap; /* 0: none */
} Layer;

typedef struct {
    int64_t layers, hidden, heads, groups, channels, mlp, vocab, gelu;
    int64_t blocks, block; /* of the cache: how many, and positions in each */
    int64_t kinds;         /* of rotary embeddings */
    float eps, embed_scale, logit_cap;
    const float *embed, *norm, *frequencies; /* [kinds, C/2] */
    Linear head;
    const Layer *layer;
    float *cache; /* [layers, 2, blocks, G, block * C], see `keys_at` and `values_at` */
} Model;

/* The factors of a linear layer: A of all parts stacked, a scaled B for each; A is NULL if none. */
typedef struct {
    const float *a, *b[PARTS];
    int64_t rank;
} Factors;

/* Rows [start, stop) have an adapter: factors for qkv, o, gate_up and down of every layer, and for
 * the head. */
typedef struct {
    int64_t start, stop;
    const Factors *factors;
} Span;

typedef struct {
    int64_t rows, spans, width; /* width: of a row's table of blocks */
    const int64_t *tokens, *positions, *tables;
    const Span *span;
    float *hidden, *logits; /* the head's input [rows, D] and output [rows, vocab]; or NULL */
} Step;

/* --- The team --- */

#define SPINS 4000

typedef struct {
    int threads, active; /* active: those that take part in the current work */
    pthread_t *others;
    atomic_long next;         /* the next free unit of work */
    atomic_int arrived, turn; /* threads at the barrier; times it has opened */
    pthread_mutex_t lock;
    pthread_cond_t called;
    long calls; /* times there was work; under the lock */
    int leaving;
    void (*work)(int, void *);
    void *about;
    double rested; /* when the last work ended, in seconds */
#if defined(__linux__)
    int placed; /* called threads wake on other cores, and may then run anywhere */
    cpu_set_t anywhere;
#endif
} Team;

typedef struct {
    Team *team;
    int number;
} Member;

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb"); /* "yield" does nothing on most processors */
#endif
}

/* Wait until all threads are here. The last one prepares the next work. */
static void meet(Team *team) {
    int active = team->active; /* not to be read after arriving: the next call may have begun */
    if (active == 1) {
        atomic_store_explicit(&team->next, 0, memory_order_relaxed);
        return;
    }
    int turn = atomic_load_explicit(&team->turn, memory_order_acquire);
    if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) == active - 1) {
        atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&team->next, 0, memory_order_relaxed);
        atomic_fetch_add_explicit(&team->turn, 1, memory_order_release);
        return;
    }
    for (long spins = 0; atomic_load_explicit(&team->turn, memory_order_acquire) == turn; spins++) {
        if (spins < SPINS)
            relax();
        else
            sched_yield(); /* the thread we wait for may need this core */
    }
}

/* Return the next unit of this phase, or -1. */
static inline long take(Team *team, long units) {
    long unit = atomic_fetch_add_explicit(&team->next, 1, memory_order_relaxed);
    return unit < units ? unit : -1;
}

/* A thread that has slept for a while is likely to wake on the core of its caller, and shares it
 * until the system moves one of them, which takes milliseconds. So threads are called to other
 * cores. Once awake, they may run anywhere. */
#define RESTS 1e-3

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void place(Team *team, int active) {
#if defined(__linux__)
    team->placed = 0;
    if (seconds() - team->rested < RESTS) return;
    int here = sched_getcpu();
    if (here < 0 || here >= CPU_SETSIZE || sched_getaffinity(0, sizeof(cpu_set_t), &team->anywhere))
        return;
    cpu_set_t elsewhere = team->anywhere;
    CPU_CLR(here, &elsewhere);
    if (!CPU_COUNT(&elsewhere)) return;
    for (int i = 0; i < active - 1; i++)
        pthread_setaffinity_np(team->others[i], sizeof(cpu_set_t), &elsewhere);
    team->placed = 1;
#else
    (void)team, (void)active;
#endif
}

static void *member(void *given) {
    Member self = *(Member *)given;
    free(given);
    Team *team = self.team;
    for (long seen = 0;;) {
        pthread_mutex_lock(&team->lock);
        while (team->calls == seen && !team->leaving) pthread_cond_wait(&team->called, &team->lock);
        int leaving = team->leaving, takes_part = self.number < team->active;
        seen = team->calls;
#if defined(__linux__)
        int placed = takes_part && team->placed;
        cpu_set_t anywhere = team->anywhere;
#endif
        pthread_mutex_unlock(&team->lock);
        if (leaving) return NULL;
#if defined(__linux__)
        if (placed) pthread_setaffinity_np(pthread_self(), sizeof(cpu_set_t), &anywhere);
#endif
        if (takes_part) team->work(self.number, team->about);
    }
}

void team_free(Team *team) {
    pthread_mutex_lock(&team->lock);
    team->leaving = 1;
    pthread_cond_broadcast(&team->called);
    pthread_mutex_unlock(&team->lock);
    for (int i = 0; i < team->threads - 1; i++) pthread_join(team->others[i], NULL);
    free(team->others);
    free(team);
}

Team *team_new(int threads) {
    Team *team = calloc(1, sizeof(Team));
    if (!team) return NULL;
    pthread_mutex_init(&team->lock, NULL);
    pthread_cond_init(&team->called, NULL);
    team->others = calloc((size_t)threads, sizeof(pthread_t));
    team->threads = 1;
    for (int number = 1; team->others && number < threads; number++) {
        Member *about = malloc(sizeof(Member));
        if (!about) break;
        *about = (Member){team, number};
        if (pthread_create(&team->others[number - 1], NULL, member, about)) {
            free(about);
            break; /* fewer threads also work */
        }
        team->threads++;
    }
    return team;
}

/* Multiplications that are worth a thread: about a fifth of a millisecond. Threads with less work
 * wait longer for each other than they compute, above all on a busy machine. */
int64_t share = 4 << 20;

/* Run work on as many threads as it is worth, including the calling one. */
static void together(Team *team, void (*work)(int, void *), void *about, int64_t multiplications) {
    int64_t worth = multiplications / share;
    int active = worth < 1 ? 1 : worth < team->threads ? (int)worth : team->threads;
    pthread_mutex_lock(&team->lock);
    team->work = work;
    team->about = about;
    team->active = active;
    atomic_store(&team->next, 0);
    team->calls++;
    if (active > 1) {
        place(team, active);
        pthread_cond_broadcast(&team->called);
    }
    pthread_mutex_unlock(&team->lock);
    work(0, about);
    team->rested = seconds();
}

/* --- Products --- */

static inline int64_t panels_of(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }

/* A panel of a part: its weights and its outputs. */
typedef struct {
    int64_t part, first, at, width; /* first output in the part; in all; how many */
    const float *weight;
} Place;

static Place find(const Linear *linear, int64_t panel) {
    const float *weight = linear->weight + panel * linear->inputs * PANEL;
    int64_t at = 0;
    for (int64_t part = 0;; part++) {
        int64_t count = panels_of(linear->sizes[part]);
        if (panel < count) {
            int64_t first = panel * PANEL, left = linear->sizes[part] - first;
            return (Place){part, first, at + first, left < PANEL ? left : PANEL, weight};
        }
        panel -= count;
        at += linear->sizes[part];
    }
}

/* Return the rows of a tile: as few tiles as possible, of nearly equal size. */
static int64_t tile_of(int64_t rows) {
    int64_t tiles = (rows + ROWS - 1) / ROWS;
    return (rows + tiles - 1) / tiles;
}

/* Return the most panels of a tile of so many rows whose sums stay in registers. */
static inline int panels_for(int64_t rows) { return LANES == 16 || 2 * rows < ROWS ? 2 : 1; }

static int64_t size_of(const Linear *linear) {
    int64_t outputs = 0;
    for (int64_t part = 0; part < linear->parts; part++) outputs += linear->sizes[part];
    return outputs * linear->inputs;
}

static int64_t panels_in(const Linear *linear) {
    int64_t count = 0;
    for (int64_t part = 0; part < linear->parts; part++) count += panels_of(linear->sizes[part]);
    return count;
}

/* sums += x w for some rows and panels; the compiler knows both numbers. */
static inline __attribute__((always_inline)) void tile(
    const int rows, const int panels, const float *x, int64_t stride, const float *const *weight,
    int64_t inputs, vec sums[ROWS][2][VECTORS]) {
    vec kept[ROWS][2 * VECTORS], w[2 * VECTORS];
    const int vectors = panels * VECTORS;
    UNROLL
    for (int row = 0; row < rows; row++)
        UNROLL
        for (int v = 0; v < vectors; v++) kept[row][v] = sums[row][v / VECTORS][v % VECTORS];
    for (int64_t k = 0; k < inputs; k++) {
        UNROLL
        for (int v = 0; v < vectors; v++)
            w[v] = load(weight[v / VECTORS] + k * PANEL + v % VECTORS * LANES);
        UNROLL
        for (int row = 0; row < rows; row++) {
            const vec value = splat(x[row * stride + k]);
            UNROLL
            for (int v = 0; v < vectors; v++)
                kept[row][v] = multiply_add(value, w[v], kept[row][v]);
        }
    }
    UNROLL
    for (int row = 0; row < rows; row++)
        UNROLL
        for (int v = 0; v < vectors; v++) sums[row][v / VECTORS][v % VECTORS] = kept[row][v];
}

#define CASE(count)                                                                     \
    case count:                                                                         \
        if (panels == 1) tile(count, 1, x, stride, weight, inputs, sums);               \
        else tile(count, 2, x, stride, weight, inputs, sums);                           \
        break;

static void multiply(
    int64_t rows, int panels, const float *x, int64_t stride, const float *const *weight,
    int64_t inputs, vec sums[ROWS][2][VECTORS]) {
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5)
#if ROWS > 5
        CASE(6)
#endif
#if ROWS > 6
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
}

/* The bias of a panel's outputs, or zeros. */
static void begin(const Linear *linear, Place place, float *values) {
    for (int i = 0; i < PANEL; i++)
        values[i] = linear->bias && i < place.width ? linear->bias[place.at + i] : 0.0f;
}

/* One or two panels of outputs of some rows: weights, then the share of each row's adapter. */
static void outputs_of(const Linear *linear, const Place *places, int panels, const float *x,
    int64_t first, int64_t rows, const Step *step, int64_t which, const float *low,
    int64_t low_stride, vec sums[ROWS][2][VECTORS]) {
    float start[PANEL];
    const float *weight[2];
    for (int panel = 0; panel < panels; panel++) {
        begin(linear, places[panel], start);
        weight[panel] = places[panel].weight;
        for (int64_t row = 0; row < rows; row++)
            for (int v = 0; v < VECTORS; v++) sums[row][panel][v] = load(start + v * LANES);
    }
    multiply(
        rows, panels, x + first * linear->inputs, linear->inputs, weight, linear->inputs, sums);
    for (int64_t s = 0; s < step->spans; s++) {
        const Span *span = &step->span[s];
        const Factors *factors = &span->factors[which];
        int64_t from = span->start > first ? span->start : first;
        int64_t to = span->stop < first + rows ? span->stop : first + rows;
        if (from >= to || !factors->a) continue;
        for (int panel = 0; panel < panels; panel++) {
            int64_t rank = factors->rank;
            const float *b = factors->b[places[panel].part] + places[panel].first * rank;
            vec shares[ROWS][2][VECTORS];
            memset(shares, 0, sizeof(shares));
            multiply(to - from, 1, low + from * low_stride + places[panel].part * rank, low_stride,
                &b, rank, shares);
            for (int64_t row = from; row < to; row++)
                for (int v = 0; v < VECTORS; v++)
                    sums[row - first][panel][v] += shares[row - from][0][v];
        }
    }
}

static void put(float *to, const vec *values, int64_t width) {
    if (width == PANEL) {
        for (int v = 0; v < VECTORS; v++) store(to + v * LANES, values[v]);
        return;
    }
    float all[PANEL];
    for (int v = 0; v < VECTORS; v++) store(all + v * LANES, values[v]);
    memcpy(to, all, (size_t)width * sizeof(float));
}

typedef struct {
    const Model *model;
    const Step *step;
    Team *team;
    float *x, *normed, *wide, *mixed, *fed, *low;
    float *turns; /* cosines and sines, [B, kinds, C] */
    int64_t low_stride;
    int64_t *bunches, bunch_count; /* their begins, and the end of the last */
    float *room;                   /* of each thread, for attention: see `attend` */
    int64_t room_size, most_queries, most_keys;
} Run;

/* Multiply the rows by the A of their adapters, for one linear layer. */
static void lower(const Run *run, const Linear *linear, int64_t which, const float *x) {
    const Step *step = run->step;
    long units = 0;
    for (int64_t s = 0; s < step->spans; s++) {
        const Factors *factors = &step->span[s].factors[which];
        if (factors->a) units += panels_of(linear->parts * factors->rank);
    }
    if (!units) return; /* there is no barrier, so no thread may have begun */
    for (long unit; (unit = take(run->team, units)) >= 0;) {
        long rest = unit;
        int64_t s = 0, ranks = 0;
        for (;; s++) {
            const Factors *factors = &step->span[s].factors[which];
            if (!factors->a) continue;
            ranks = linear->parts * factors->rank;
            if (rest < panels_of(ranks)) break;
            rest -= panels_of(ranks);
        }
        const Span *span = &step->span[s];
        const float *weight = span->factors[which].a + rest * linear->inputs * PANEL;
        int64_t left = ranks - rest * PANEL;
        int64_t each = tile_of(span->stop - span->start);
        for (int64_t row = span->start; row < span->stop; row += each) {
            int64_t rows = span->stop - row < each ? span->stop - row : each;
            vec sums[ROWS][2][VECTORS];
            memset(sums, 0, sizeof(sums));
            multiply(
                rows, 1, x + row * linear->inputs, linear->inputs, &weight, linear->inputs, sums);
            for (int64_t r = 0; r < rows; r++)
                put(run->low + (row + r) * run->low_stride + rest * PANEL, sums[r][0],
                    left < PANEL ? left : PANEL);
        }
    }
    meet(run->team);
}

/* A linear layer: y [B, outputs] of x [B, inputs]. */
static void project(
    const Run *run, const Linear *linear, int64_t which, const float *x, float *y, int64_t stride) {
    lower(run, linear, which, x);
    int64_t count = panels_in(linear), rows = run->step->rows, each = tile_of(rows);
    int most = LANES == 16 && rows > 1 ? 2 : 1;
    for (long unit; (unit = take(run->team, (count + most - 1) / most)) >= 0;) {
        Place places[2];
        int panels = count - unit * most < most ? 1 : most;
        for (int p = 0; p < panels; p++) places[p] = find(linear, unit * most + p);
        for (int64_t row = 0; row < rows; row += each) {
            int64_t some = rows - row < each ? rows - row : each;
            vec sums[ROWS][2][VECTORS];
            outputs_of(linear, places, panels, x, row, some, run->step, which, run->low,
                run->low_stride, sums);
            for (int64_t r = 0; r < some; r++)
                for (int p = 0; p < panels; p++)
                    put(y + (row + r) * stride + places[p].at, sums[r][p], places[p].width);
        }
    }
    meet(run->team);
}

static inline vec activated(vec x, int64_t gelu) {
    if (!gelu) return x / (1.0f + exponential(-x));
    vec inner = 0.7978845608028654f * multiply_add(0.044715f * x * x, x, x);
    vec tanh = 1.0f - 2.0f / (exponential(2.0f * inner) + 1.0f);
    return 0.5f * x * (1.0f + tanh);
}

/* activation(gate) * up: a panel of each at a time. */
static void project_gated(
    const Run *run, const Linear *linear, int64_t which, const float *x, float *y) {
    lower(run, linear, which, x);
    int64_t count = panels_of(linear->sizes[0]), rows = run->step->rows, each = tile_of(rows),
            gelu = run->model->gelu;
    for (long unit; (unit = take(run->team, count)) >= 0;) {
        Place places[2] = {find(linear, unit), find(linear, count + unit)};
        for (int64_t row = 0; row < rows; row += each) {
            int64_t some = rows - row < each ? rows - row : each;
            vec sums[ROWS][2][VECTORS];
            if (LANES == 16) {
                outputs_of(linear, places, 2, x, row, some, run->step, which, run->low,
                    run->low_stride, sums);
            } else { /* one panel at a time: there are too few registers */
                vec up[ROWS][2][VECTORS];
                outputs_of(linear, places, 1, x, row, some, run->step, which, run->low,
                    run->low_stride, sums);
                outputs_of(linear, places + 1, 1, x, row, some, run->step, which, run->low,
                    run->low_stride, up);
                for (int64_t r = 0; r < some; r++) memcpy(sums[r][1], up[r][0], sizeof(sums[r][1]));
            }
            for (int64_t r = 0; r < some; r++) {
                vec fed[VECTORS];
                for (int v = 0; v < VECTORS; v++)
                    fed[v] = activated(sums[r][0][v], gelu) * sums[r][1][v];
                put(y + (row + r) * run->model->mlp + places[0].first, fed, places[0].width);
            }
        }
    }
    meet(run->team);
}

/* --- Between products --- */

/* Four sums at a time on any machine, so that a norm has the same bits everywhere. */
static float mean_square(const float *x, int64_t size) {
    double sums[4] = {0, 0, 0, 0};
    for (int64_t i = 0; i < size; i++) sums[i & 3] += (double)x[i] * x[i];
    return (float)((sums[0] + sums[1] + sums[2] + sums[3]) / (double)size);
}

static void norm(const float *x, const float *weight, float eps, int64_t size, float *out) {
    float scale = 1.0f / sqrtf(mean_square(x, size) + eps);
    for (int64_t i = 0; i < size; i++) out[i] = x[i] * scale * weight[i];
}

/* Add a layer's share to the rows, normed where the family does so, and compute the next norm. */
static void add(const Run *run, const float *share, const float *own_norm, const float *next_norm) {
    const Model *model = run->model;
    int64_t size = model->hidden;
    for (long row; (row = take(run->team, run->step->rows)) >= 0;) {
        float *x = run->x + row * size, *normed = run->normed + row * size;
        const float *added = share + row * size;
        if (own_norm) {
            norm(added, own_norm, model->eps, size, normed);
            added = normed;
        }
        for (int64_t i = 0; i < size; i++) x[i] += added[i];
        norm(x, next_norm, model->eps, size, normed);
    }
    meet(run->team);
}

static void start(const Run *run) {
    const Model *model = run->model;
    int64_t size = model->hidden;
    for (long row; (row = take(run->team, run->step->rows)) >= 0;) {
        float *x = run->x + row * size;
        const float *embed = model->embed + run->step->tokens[row] * size;
        for (int64_t i = 0; i < size; i++) x[i] = embed[i] * model->embed_scale;
        norm(x, model->layer[0].input_norm, model->eps, size, run->normed + row * size);
        int64_t half = model->channels / 2;
        for (int64_t kind = 0; kind < model->kinds; kind++) {
            float *cosines = run->turns + (row * model->kinds + kind) * 2 * half,
                  *sines = cosines + half;
            for (int64_t i = 0; i < half; i++) {
                float angle =
                    (float)run->step->positions[row] * model->frequencies[kind * half + i];
                cosines[i] = cosf(angle);
                sines[i] = sinf(angle);
            }
        }
    }
    meet(run->team);
}

/* Rotate channel c together with channel c + C/2. */
static void turn(float *head, const float *cosines, int64_t half) {
    const float *sines = cosines + half;
    for (int64_t i = 0; i < half; i++) {
        float first = head[i], second = head[i + half];
        head[i] = first * cosines[i] - second * sines[i];
        head[i + half] = second * cosines[i] + first * sines[i];
    }
}

/* --- Attention ---
 *
 * Rows that are neighbouring positions of one prompt read the same keys and values: a bunch of them
 * attends at a time. Scores and sums of values are products like any other, so the cache is in
 * panels, block by block: keys as [block / PANEL][C][PANEL], values as [C / PANEL][block][PANEL]
 * and then the channels that do not fill a panel. */

/* Return the keys of one group in one layer, for a block of a row's table. */
static inline float *keys_at(const Model *model, int64_t index, int64_t block, int64_t group) {
    int64_t own = model->block * model->channels;
    return model->cache + ((2 * index * model->blocks + block) * model->groups + group) * own;
}

static inline float *values_at(const Model *model, int64_t index, int64_t block, int64_t group) {
    return keys_at(model, index, block, group) +
           model->blocks * model->groups * model->block * model->channels;
}

static void place_key(const Model *model, float *keys, int64_t offset, const float *key) {
    float *to = keys + offset / PANEL * PANEL * model->channels + offset % PANEL;
    for (int64_t c = 0; c < model->channels; c++) to[c * PANEL] = key[c];
}

static void place_value(const Model *model, float *values, int64_t offset, const float *value) {
    int64_t C = model->channels, whole = C / PANEL * PANEL, rest = C - whole;
    for (int64_t c = 0; c < whole; c += PANEL)
        memcpy(values + c * model->block + offset * PANEL, value + c, PANEL * sizeof(float));
    memcpy(
        values + whole * model->block + offset * rest, value + whole, (size_t)rest * sizeof(float));
}

/* Norm and rotate the heads of one group of one row; its key and value go to the cache. */
static void keep(const Run *run, const Layer *layer, int64_t index, int64_t row, int64_t group) {
    const Model *model = run->model;
    const Step *step = run->step;
    int64_t C = model->channels, G = model->groups, H = model->heads, each = H / G;
    float *qkv = run->wide + row * (H + 2 * G) * C;
    float *q = qkv + group * each * C, *k = qkv + (H + group) * C, *v = qkv + (H + G + group) * C;
    if (layer->q_norm) {
        for (int64_t h = 0; h < each; h++) norm(q + h * C, layer->q_norm, model->eps, C, q + h * C);
        norm(k, layer->k_norm, model->eps, C, k);
    }
    if (layer->rotary >= 0) {
        const float *cosines = run->turns + (row * model->kinds + layer->rotary) * (C / 2 * 2);
        for (int64_t h = 0; h < each; h++) turn(q + h * C, cosines, C / 2);
        turn(k, cosines, C / 2);
    }
    int64_t position = step->positions[row], offset = position % model->block;
    int64_t block = step->tables[row * step->width + position / model->block];
    place_key(model, keys_at(model, index, block, group), offset, k);
    place_value(model, values_at(model, index, block, group), offset, v);
}

/* Return the first position that a position sees. */
static inline int64_t first_seen(const Layer *layer, int64_t position) {
    return layer->window && position >= layer->window ? position - layer->window + 1 : 0;
}

/* Turn the scores of keys [from, to) into weights, 0 for keys that are not seen; return their sum.
 * The weights are not divided by it. */
static float soften(const Layer *layer, float *scores, int64_t from, int64_t to, int64_t count) {
    float top = -INFINITY;
    for (int64_t s = from; s < to; s++) {
        float score = scores[s] * layer->scale;
        scores[s] = layer->softcap > 0 ? tanhf(score / layer->softcap) * layer->softcap : score;
    }
    for (int64_t s = from; s < to; s++) top = scores[s] > top ? scores[s] : top;
    vec sums = {};
    int64_t s = from;
    for (; s + LANES <= to; s += LANES) {
        vec weights = exponential(load(scores + s) - top);
        store(scores + s, weights);
        sums += weights;
    }
    float sum = total(sums);
    if (s < to) {
        float rest[LANES] = {0};
        memcpy(rest, scores + s, (size_t)(to - s) * sizeof(float));
        store(rest, exponential(load(rest) - top));
        for (int64_t i = 0; s < to; i++, s++) sum += scores[s] = rest[i];
    }
    memset(scores, 0, (size_t)from * sizeof(float));
    memset(scores + to, 0, (size_t)(count - to) * sizeof(float));
    return sum;
}

/* Attend: the query heads of one group of a bunch of rows. */
static void attend(
    const Run *run, const Layer *layer, int64_t index, int64_t bunch, int64_t group, int number) {
    const Model *model = run->model;
    const Step *step = run->step;
    int64_t C = model->channels, G = model->groups, H = model->heads, each = H / G,
            S = model->block;
    int64_t row = run->bunches[bunch], rows = run->bunches[bunch + 1] - row, count = rows * each;
    const int64_t *table = step->tables + row * step->width, *positions = step->positions + row;
    int64_t from = first_seen(layer, positions[0]) / PANEL * PANEL, to = positions[rows - 1] + 1;
    float *queries = run->room + number * run->room_size, *sums = queries + run->most_queries * C;
    float *scores = sums + run->most_queries; /* [count, stride] */
    int64_t stride = run->most_keys;
    for (int64_t r = 0; r < rows; r++) {
        const float *q = run->wide + ((row + r) * (H + 2 * G) + group * each) * C;
        memcpy(queries + r * each * C, q, (size_t)(each * C) * sizeof(float));
    }
    int most = panels_for(count);
    for (int64_t s = from; s < to; s += most * PANEL) {
        const float *keys[2];
        int panels = s + PANEL < to ? most : 1;
        for (int panel = 0; panel < panels; panel++) {
            int64_t at = s + panel * PANEL;
            keys[panel] = keys_at(model, index, table[at / S], group) + at % S * C;
        }
        for (int64_t first = 0; first < count; first += ROWS) {
            int64_t some = count - first < ROWS ? count - first : ROWS;
            vec out[ROWS][2][VECTORS];
            memset(out, 0, sizeof(out));
            multiply(some, panels, queries + first * C, C, keys, C, out);
            for (int64_t i = 0; i < some; i++)
                for (int panel = 0; panel < panels; panel++)
                    put(scores + (first + i) * stride + s - from + panel * PANEL, out[i][panel],
                        PANEL);
        }
    }
    for (int64_t i = 0; i < count; i++) {
        int64_t position = positions[i / each];
        sums[i] = soften(layer, scores + i * stride, first_seen(layer, position) - from,
            position + 1 - from, to - from);
    }
    float *mixed =
        run->mixed + (row * H + group * each) * C; /* of a row; the next is H * C further */
    int64_t whole = C / PANEL * PANEL, rest = C - whole;
    for (int64_t first = 0; first < count; first += ROWS) {
        int64_t some = count - first < ROWS ? count - first : ROWS;
        for (int64_t c = 0; c < whole; c += most * PANEL) {
            int panels = c + PANEL < whole ? most : 1;
            vec out[ROWS][2][VECTORS];
            memset(out, 0, sizeof(out));
            for (int64_t s = from, next; s < to; s = next) {
                next = s / S * S + S < to ? s / S * S + S : to;
                const float *block = values_at(model, index, table[s / S], group) + s % S * PANEL;
                const float *values[2] = {block + c * S, block + (c + PANEL) * S};
                multiply(some, panels, scores + first * stride + s - from, stride, values, next - s,
                    out);
            }
            for (int64_t i = first; i < first + some; i++)
                for (int panel = 0; panel < panels; panel++) {
                    for (int v = 0; v < VECTORS; v++) out[i - first][panel][v] /= sums[i];
                    float *own = mixed + i / each * H * C + i % each * C;
                    put(own + c + panel * PANEL, out[i - first][panel], PANEL);
                }
        }
    }
    for (int64_t i = 0; i < count && rest; i++) {
        float *own = mixed + i / each * H * C + i % each * C + whole;
        memset(own, 0, (size_t)rest * sizeof(float));
        for (int64_t s = from; s < to; s++) {
            const float *value =
                values_at(model, index, table[s / S], group) + whole * S + s % S * rest;
            for (int64_t c = 0; c < rest; c++) own[c] += scores[i * stride + s - from] * value[c];
        }
        for (int64_t c = 0; c < rest; c++) own[c] /= sums[i];
    }
}

/* Cut the rows into bunches of neighbouring positions of one prompt, as many as a product takes. */
static void bunch(Run *run) {
    const Step *step = run->step;
    int64_t each = run->model->heads / run->model->groups, most = each < ROWS ? ROWS / each : 1,
            begun = 0;
    size_t table = (size_t)step->width * sizeof(int64_t);
    run->bunch_count = 0;
    for (int64_t row = 0; row < step->rows; row++) {
        const int64_t *own = step->tables + row * step->width, *positions = step->positions + row;
        if (row == 0 || row - begun == most || positions[0] != positions[-1] + 1 ||
            memcmp(own, own - step->width, table))
            run->bunches[run->bunch_count++] = begun = row;
        if (positions[0] + 1 > run->most_keys) run->most_keys = positions[0] + 1;
    }
    run->bunches[run->bunch_count] = step->rows;
    run->most_keys = (run->most_keys + PANEL - 1) / PANEL * PANEL;
    run->most_queries = most * each;
}

static void cap(const Run *run) {
    float bound = run->model->logit_cap;
    if (bound <= 0) return;
    int64_t size = run->model->vocab;
    for (long row; (row = take(run->team, run->step->rows)) >= 0;) {
        float *logits = run->step->logits + row * size;
        for (int64_t i = 0; i < size; i++) logits[i] = tanhf(logits[i] / bound) * bound;
    }
    meet(run->team);
}

static void work(int number, void *about) {
    const Run *run = about;
    const Model *model = run->model;
    int64_t inner = model->heads * model->channels,
            wide = inner + 2 * model->groups * model->channels;
    start(run);
    for (int64_t index = 0; index < model->layers; index++) {
        const Layer *layer = &model->layer[index];
        const float *next = index + 1 < model->layers ? layer[1].input_norm : model->norm;
        project(run, &layer->qkv, 4 * index, run->normed, run->wide, wide);
        int64_t rows = run->step->rows; /* rows may see others of this step: keep all first */
        for (long unit; (unit = take(run->team, rows * model->groups)) >= 0;)
            keep(run, layer, index, unit % rows, unit / rows);
        meet(run->team);
        int64_t bunches = run->bunch_count;
        for (long unit; (unit = take(run->team, bunches * model->groups)) >= 0;)
            attend(run, layer, index, unit % bunches, unit / bunches, number);
        meet(run->team);
        project(run, &layer->o, 4 * index + 1, run->mixed, run->wide, model->hidden);
        add(run, run->wide, layer->post_attention_norm, layer->mlp_norm);
        project_gated(run, &layer->gate_up, 4 * index + 2, run->normed, run->fed);
        project(run, &layer->down, 4 * index + 3, run->fed, run->wide, model->hidden);
        add(run, run->wide, layer->post_mlp_norm, next);
    }
    if (run->step->logits) {
        project(run, &model->head, 4 * model->layers, run->normed, run->step->logits, model->vocab);
        cap(run);
    }
    meet(run->team); /* the caller frees what all threads read */
}

/* Run the token of every row at its position; return 0, or -1 without memory. Rows may be positions
 * of one prompt. */
int run_rows(const Model *model, const Step *step, Team *team) {
    int64_t inner = model->heads * model->channels,
            wide = inner + 2 * model->groups * model->channels;
    int64_t widest = wide > model->hidden ? wide : model->hidden, ranks = 0;
    for (int64_t s = 0; s < step->spans; s++)
        for (int64_t which = 0; which <= 4 * model->layers; which++)
            if (step->span[s].factors[which].rank > ranks)
                ranks = step->span[s].factors[which].rank;
    Run run = {.model = model, .step = step, .team = team};
    run.low_stride = PARTS * ranks;
    run.bunches = malloc((size_t)(step->rows + 1) * sizeof(int64_t));
    if (!run.bunches) return -1;
    bunch(&run);
    run.room_size = run.most_queries * (model->channels + 1 + run.most_keys);
    int64_t turns = model->kinds * model->channels;
    int64_t sizes[] = {
        model->hidden, model->hidden, widest, inner, model->mlp, run.low_stride, turns};
    float **parts[] = {&run.x, &run.normed, &run.wide, &run.mixed, &run.fed, &run.low, &run.turns};
    int64_t floats = team->threads * run.room_size;
    for (int i = 0; i < 7; i++) floats += step->rows * sizes[i];
    float *memory = malloc((size_t)floats * sizeof(float));
    if (!memory) {
        free(run.bunches);
        return -1;
    }
    float *at = memory;
    for (int i = 0; i < 7; i++) {
        *parts[i] = at;
        at += step->rows * sizes[i];
    }
    run.room = at;
    if (step->hidden) run.normed = step->hidden;
    int64_t weights = size_of(&model->head);
    for (int64_t index = 0; index < model->layers; index++) {
        const Layer *layer = &model->layer[index];
        weights += size_of(&layer->qkv) + size_of(&layer->o) + size_of(&layer->gate_up) +
                   size_of(&layer->down);
    }
    together(team, work, &run, step->rows * weights);
    free(memory);
    free(run.bunches);
    return 0;
}

/* --- Drawing tokens --- */

#define SPAN 256 /* weights are summed by spans; only the span that is hit is searched */

typedef struct {
    Team *team;
    int64_t rows, vocab;
    const float *logits;
    const double *numbers, *temperatures;
    int64_t *tokens;
    double *logprobs, *sums; /* sums: [threads, spans] */
} Draw;

/* Compute the weights of up to SPAN logits; return their sum. */
static double weigh(const float *logits, int64_t count, float top, float coldness, float *weights) {
    vec sums = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        vec some = exponential((load(logits + i) - top) * coldness);
        if (weights) store(weights + i, some);
        sums += some;
    }
    double sum = total(sums);
    if (i < count) {
        float rest[LANES] = {0};
        memcpy(rest, logits + i, (size_t)(count - i) * sizeof(float));
        store(rest, exponential((load(rest) - top) * coldness));
        for (int64_t at = 0; i + at < count; at++) {
            sum += rest[at];
            if (weights) weights[i + at] = rest[at];
        }
    }
    return sum;
}

/* Return the first place where the cumulated weight exceeds what is wanted; if rounding prevents
 * that, the place of the largest weight. */
static int64_t first_above(
    const double *sums, const float *weights, int64_t count, double wanted, double *before) {
    double cumulated = 0, largest = -1;
    int64_t best = 0;
    for (int64_t i = 0; i < count; i++) {
        double weight = sums ? sums[i] : weights[i];
        if (cumulated + weight > wanted) {
            *before = cumulated;
            return i;
        }
        cumulated += weight;
        if (weight > largest) {
            largest = weight;
            best = i;
        }
    }
    *before = 0;
    return best;
}

static void draw_row(const Draw *draw, long row, double *sums) {
    const float *logits = draw->logits + row * draw->vocab;
    int64_t vocab = draw->vocab, spans = (vocab + SPAN - 1) / SPAN;
    int greedy = draw->temperatures[row] <= 0;
    float coldness = greedy ? 1.0f : (float)(1 / draw->temperatures[row]);
    float tops[LANES], top = logits[0];
    int64_t i = 0;
    if (vocab >= LANES) {
        vec most = load(logits);
        for (; i + LANES <= vocab; i += LANES) {
            vec some = load(logits + i);
            ints more = some > most;
            most = (vec)((more & (ints)some) | (~more & (ints)most));
        }
        store(tops, most);
        for (int lane = 0; lane < LANES; lane++) top = tops[lane] > top ? tops[lane] : top;
    }
    for (; i < vocab; i++) top = logits[i] > top ? logits[i] : top;
    double sum = 0, before;
    for (int64_t span = 0; span < spans; span++) {
        int64_t count = vocab - span * SPAN < SPAN ? vocab - span * SPAN : SPAN;
        sum += sums[span] = weigh(logits + span * SPAN, count, top, coldness, NULL);
    }
    int64_t token = 0;
    if (greedy) {
        while (token < vocab - 1 && logits[token] != top) token++;
    } else {
        float weights[SPAN];
        double wanted = draw->numbers[row] * sum;
        int64_t span = first_above(sums, NULL, spans, wanted, &before);
        int64_t count = vocab - span * SPAN < SPAN ? vocab - span * SPAN : SPAN;
        weigh(logits + span * SPAN, count, top, coldness, weights);
        token = span * SPAN + first_above(NULL, weights, count, wanted - before, &before);
    }
    draw->tokens[row] = token;
    draw->logprobs[row] = ((double)logits[token] - top) * coldness - log(sum);
}

static void draw_rows(int number, void *about) {
    const Draw *draw = about;
    double *sums = draw->sums + number * ((draw->vocab + SPAN - 1) / SPAN);
    for (long row; (row = take(draw->team, draw->rows)) >= 0;) draw_row(draw, row, sums);
    meet(draw->team);
}

/* Draw a token for each row among all, by the row's number in [0, 1), and its log-probability. A
 * temperature of 0 takes the likeliest. Return 0, or -1 without memory. */
int draw(const float *logits, int64_t rows, int64_t vocab, const double *numbers,
    const double *temperatures, int64_t *tokens, double *logprobs, Team *team) {
    double *sums = malloc((size_t)(team->threads * ((vocab + SPAN - 1) / SPAN)) * sizeof(double));
    if (!sums) return -1;
    Draw about = {team, rows, vocab, logits, numbers, temperatures, tokens, logprobs, sums};
    together(team, draw_rows, &about, 16 * rows * vocab); /* an exponential costs so many */
    free(sums);
    return 0;
}

typedef struct {
    Run run;
    const Linear *linear;
    const float *x;
    float *y;
} Product;

static void multiply_all(int number, void *about) {
    (void)number;
    const Product *product = about;
    int64_t outputs = 0;
    for (int64_t part = 0; part < product->linear->parts; part++)
        outputs += product->linear->sizes[part];
    project(&product->run, product->linear, 0, product->x, product->y, outputs);
}

/* y [rows, outputs] of x [rows, inputs], without adapters. */
void product(const Linear *linear, const float *x, int64_t rows, float *y, Team *team) {
    Step step = {.rows = rows};
    Product about = {{.step = &step, .team = team}, linear, x, y};
    together(team, multiply_all, &about, rows * size_of(linear));
}

/* --- Products of any matrices --- */

#define DEPTH 512 /* inputs packed at a time */
#define WIDTH 8   /* panels packed at a time: they fit a core's second cache */
#define BATCH 384 /* rows that are worth packing weights again */

/* y [rows, outputs] = x [rows, inputs] times w, which is read at w[i * w_input + o * w_output] and
 * scaled, plus y itself, or a bias, or nothing. The rows of x and y are contiguous. */
typedef struct {
    const float *x, *w, *bias;
    float *y;
    int64_t rows, inputs, outputs, x_row, w_input, w_output, y_row;
    double scale;
    int64_t onto;
} Matrices;

typedef struct {
    const Matrices *given;
    Team *team;
    float *packed;        /* of each thread: [WIDTH, DEPTH, PANEL] */
    int64_t width, batch; /* panels and rows of a unit of work */
} Multiplication;

static void pack(
    const Matrices *m, int64_t first, int64_t width, int64_t from, int64_t depth, float *to) {
    const float *w = m->w + first * m->w_output + from * m->w_input;
    const float scale = (float)m->scale;
    if (width < PANEL) memset(to, 0, (size_t)(depth * PANEL) * sizeof(float));
    if (m->w_output == 1 && width == PANEL) {
        for (int64_t k = 0; k < depth; k++)
            for (int64_t o = 0; o < PANEL; o++) to[k * PANEL + o] = w[k * m->w_input + o] * scale;
    } else if (m->w_output == 1) {
        for (int64_t k = 0; k < depth; k++)
            for (int64_t o = 0; o < width; o++) to[k * PANEL + o] = w[k * m->w_input + o] * scale;
    } else { /* some inputs of every output at a time: they share a cache line */
        for (int64_t k = 0; k < depth; k += PANEL) {
            int64_t stop = depth - k < PANEL ? depth : k + PANEL;
            for (int64_t o = 0; o < width; o++)
                for (int64_t i = k; i < stop; i++)
                    to[i * PANEL + o] = w[i * m->w_input + o * m->w_output] * scale;
        }
    }
}

/* Load the start of the sums of one panel of a row. */
static void resume(
    const Matrices *m, int64_t row, int64_t first, int64_t width, int goes_on, vec *sums) {
    float all[PANEL] = {0};
    const float *from = goes_on || m->onto ? m->y + row * m->y_row + first
                        : m->bias          ? m->bias + first
                                           : NULL;
    if (from && width == PANEL) {
        for (int v = 0; v < VECTORS; v++) sums[v] = load(from + v * LANES);
        return;
    }
    if (from) memcpy(all, from, (size_t)width * sizeof(float));
    for (int v = 0; v < VECTORS; v++) sums[v] = load(all + v * LANES);
}

/* Up to WIDTH panels of some rows. */
static void multiply_group(
    const Matrices *m, int64_t begin, int64_t end, int64_t top, int64_t bottom, float *packed) {
    int64_t each = tile_of(bottom - top), count = panels_of(end - begin), widths[WIDTH];
    int most = panels_for(each);
    for (int64_t k = 0; k < m->inputs || k == 0; k += DEPTH) {
        int64_t depth = m->inputs - k < DEPTH ? m->inputs - k : DEPTH;
        for (int64_t p = 0; p < count; p++) {
            int64_t left = end - begin - p * PANEL;
            widths[p] = left < PANEL ? left : PANEL;
            pack(m, begin + p * PANEL, widths[p], k, depth, packed + p * DEPTH * PANEL);
        }
        for (int64_t row = top; row < bottom; row += each) {
            int64_t some = bottom - row < each ? bottom - row : each;
            for (int64_t p = 0; p < count; p += most) {
                int panels = count - p < most ? 1 : most;
                const float *weight[2] = {
                    packed + p * DEPTH * PANEL, packed + (p + 1) * DEPTH * PANEL};
                vec sums[ROWS][2][VECTORS];
                for (int64_t r = 0; r < some; r++)
                    for (int i = 0; i < panels; i++)
                        resume(
                            m, row + r, begin + (p + i) * PANEL, widths[p + i], k > 0, sums[r][i]);
                multiply(some, panels, m->x + row * m->x_row + k, m->x_row, weight, depth, sums);
                for (int64_t r = 0; r < some; r++)
                    for (int i = 0; i < panels; i++)
                        put(m->y + (row + r) * m->y_row + begin + (p + i) * PANEL, sums[r][i],
                            widths[p + i]);
            }
        }
    }
}

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static void multiply_matrices(int number, void *about) {
    const Multiplication *given = about;
    const Matrices *m = given->given;
    int64_t outputs = given->width * PANEL, groups = (m->outputs + outputs - 1) / outputs;
    int64_t batches = (m->rows + given->batch - 1) / given->batch;
    float *packed = given->packed + (int64_t)number * WIDTH * DEPTH * PANEL;
    for (long unit; (unit = take(given->team, groups * batches)) >= 0;) {
        int64_t begin = unit % groups * outputs, top = unit / groups * given->batch;
        multiply_group(m, begin, least(begin + outputs, m->outputs), top,
            least(top + given->batch, m->rows), packed);
    }
    meet(given->team);
}

/* Return 0, or -1 without memory. The result of a row depends on that row alone. */
int matrices(const Matrices *given, Team *team) {
    if (given->rows <= 0 || given->outputs <= 0) return 0;
    size_t size = (size_t)(team->threads * WIDTH * DEPTH * PANEL) * sizeof(float);
    char *memory = malloc(size + 64);
    if (!memory) return -1;
    float *packed = (float *)(memory + (64 - (uintptr_t)memory % 64)); /* from a cache line on */
    Multiplication about = {given, team, packed, WIDTH, given->rows};
    int64_t panels = panels_of(given->outputs), units = team->threads > 1 ? 3 * team->threads : 1;
    while (about.width > 2 && (panels + about.width - 1) / about.width < units) about.width /= 2;
    int64_t groups = (panels + about.width - 1) / about.width,
            batches = (units + groups - 1) / groups;
    batches = least(batches, given->rows / BATCH);
    if (batches > 1) about.batch = (given->rows + batches - 1) / batches;
    together(team, multiply_matrices, &about, given->rows * given->inputs * given->outputs);
    free(memory);
    return 0;
}
