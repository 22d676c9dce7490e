/* embed - libvcuda in a program of its own, without Python: a small model of random weights, made
 * and decoded on the device.
 *
 *     cc -std=c11 embed.c -I native/include -L build -lvcuda -lm -o embed
 *     ./embed                     every combination of weights and K/V, dense and with experts
 *     ./embed q4 int8 moe 64      one of them, 64 tokens; "all" for any
 *     ./embed q4 int8 moe 64 33   prompts of at most 33 tokens
 *
 * For each it prints one line: the tokens a second, the copies a token, and a checksum of the ids.
 * The exit status is 0 when everything the program asserts is so: one copy to the device and one
 * from it a token, the same ids with and without CUDA graphs, the same ids again after a part of
 * the K/V was read out, forgotten and written back, and the logits of decoding for prompts that
 * were computed in chunks, of lengths that no kernel likes; likewise the hidden states of the
 * layers as a segment; and of products in one call the bits of a call each. It is also what runs
 * under compute-sanitizer, so it is small and touches nearly every kernel. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "vcuda.h"

/* Odd on purpose: no size here is a multiple of what a kernel likes. */
enum {
    LAYERS = 2,
    HIDDEN = 176,
    HEADS = 6,
    KV_HEADS = 2,
    HEAD_DIM = 48,
    INTERMEDIATE = 336,
    EXPERTS = 5,
    EXPERTS_PER_TOKEN = 3,
    VOCAB = 1003,
    CTX = 200,
    CHUNK = 72,
    Q_DIM = HEADS * HEAD_DIM,
    KV_DIM = KV_HEADS * HEAD_DIM
};

static int die(const char *what) {
    fprintf(stderr, "embed: %s: %s\n", what, vcuda_last_error());
    exit(1);
}

#define TRY(call)                                 \
    do {                                          \
        if ((call) != VCUDA_OK) (void)die(#call); \
    } while (0)

static double seconds(void) {
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void weight(vcuda_handle *handle, int32_t layer, int32_t projection, int32_t kind,
                   int64_t stack, int64_t n, int64_t k) {
    vcuda_matrix matrix = {.struct_size = sizeof matrix, .kind = kind};
    matrix.stack = stack;
    matrix.n = n;
    matrix.k = k;
    TRY(vcuda_cache_fill(handle, vcuda_wkey(layer, projection), &matrix, 1,
                         (uint64_t)(layer * 16 + projection)));
}

static void weights(vcuda_handle *handle, int32_t kind, int moe) {
    for (int32_t l = 0; l < LAYERS; ++l) {
        weight(handle, l, VCUDA_PROJ_FUSED_QKV, kind, 1, Q_DIM + 2 * KV_DIM, HIDDEN);
        weight(handle, l, VCUDA_PROJ_O, kind, 1, HIDDEN, Q_DIM);
        if (moe) {
            weight(handle, l, VCUDA_PROJ_ROUTER, VCUDA_F32, 1, EXPERTS, HIDDEN);
            weight(handle, l, VCUDA_PROJ_GATE, kind, EXPERTS, INTERMEDIATE, HIDDEN);
            weight(handle, l, VCUDA_PROJ_UP, kind, EXPERTS, INTERMEDIATE, HIDDEN);
            weight(handle, l, VCUDA_PROJ_DOWN, kind, EXPERTS, HIDDEN, INTERMEDIATE);
        } else {
            weight(handle, l, VCUDA_PROJ_FUSED_GU, kind, 2, INTERMEDIATE, HIDDEN);
            weight(handle, l, VCUDA_PROJ_DOWN, kind, 1, HIDDEN, INTERMEDIATE);
        }
    }
    weight(handle, VCUDA_HEAD_LAYER, VCUDA_PROJ_EMBED, kind, 1, VOCAB, HIDDEN);
    weight(handle, VCUDA_HEAD_LAYER, VCUDA_PROJ_HEAD, kind, 1, VOCAB, HIDDEN);
}

/* chosen: experts of a token. */
static void init(vcuda_handle *handle, int32_t kv, int moe, int graph, int exact, int segment,
                 int32_t chosen) {
    static float ones[2 * INTERMEDIATE];
    static float rope_cos[CTX * HEAD_DIM / 2];
    static float rope_sin[CTX * HEAD_DIM / 2];
    vcuda_layer layers[LAYERS];
    for (size_t i = 0; i < sizeof ones / sizeof *ones; ++i) ones[i] = 1.0f;
    for (int p = 0; p < CTX; ++p) {
        for (int i = 0; i < HEAD_DIM / 2; ++i) {
            const double angle = p * pow(1e4, -2.0 * i / HEAD_DIM);
            rope_cos[p * (HEAD_DIM / 2) + i] = (float)cos(angle);
            rope_sin[p * (HEAD_DIM / 2) + i] = (float)sin(angle);
        }
    }
    memset(layers, 0, sizeof layers);
    for (int l = 0; l < LAYERS; ++l) {
        layers[l].struct_size = sizeof layers[l];
        layers[l].moe = moe;
        layers[l].window = l == 1 ? 33 : 0;
        layers[l].input_norm = layers[l].post_norm = ones;
        layers[l].q_norm = layers[l].k_norm = ones;
    }
    vcuda_decode_config config = {.struct_size = sizeof config,
                                  .layers = LAYERS,
                                  .hidden = HIDDEN,
                                  .heads = HEADS,
                                  .kv_heads = KV_HEADS,
                                  .head_dim = HEAD_DIM,
                                  .intermediate = INTERMEDIATE,
                                  .vocab = VOCAB,
                                  .ctx_size = CTX,
                                  .group_size = 32,
                                  .kv = kv,
                                  .graph = graph,
                                  .rms_norm_eps = 1e-6f,
                                  .final_norm = ones,
                                  .rope_cos = rope_cos,
                                  .rope_sin = rope_sin,
                                  .layer_params = layers,
                                  .prefill_rows = CHUNK,
                                  .prefill_exact = exact,
                                  .segment = segment};
    if (moe) {
        config.experts = EXPERTS;
        config.experts_per_token = chosen;
        config.moe_intermediate = INTERMEDIATE;
        config.norm_topk_prob = 1;
    }
    TRY(vcuda_dev_decode_init(handle, &config));
}

/* Append one token; the most likely next one is the answer. `out`: VCUDA_OUT_*. */
static int32_t token(vcuda_handle *handle, int32_t id, int32_t position, int32_t out) {
    static float logits[VOCAB];
    static int32_t top_ids[40];
    static float top_logits[40];
    vcuda_decode_step step = {.struct_size = sizeof step,
                              .position = position,
                              .count = 1,
                              .out = out,
                              .top = 40,
                              .temperature = 0.7f,
                              .ids = &id,
                              .logits = logits,
                              .top_ids = top_ids,
                              .top_logits = top_logits};
    TRY(vcuda_dev_decode_run(handle, &step));
    if (out == VCUDA_OUT_LOGITS) {
        int32_t best = 0;
        for (int32_t i = 1; i < VOCAB; ++i) {
            if (logits[i] > logits[best]) best = i;
        }
        return best;
    }
    return out == VCUDA_OUT_TOP ? top_ids[0] : step.id;
}

/* Greedy decoding of `count` tokens from position `from` on; ids[from] is there already. */
static void decode(vcuda_handle *handle, int32_t *ids, int32_t from, int32_t count) {
    static const int32_t outs[] = {VCUDA_OUT_GREEDY, VCUDA_OUT_LOGITS, VCUDA_OUT_TOP};
    for (int32_t p = from; p < from + count; ++p) {
        ids[p + 1] = token(handle, ids[p], p, outs[p % 3]);
    }
}

static const char *const kv_names[] = {"int8", "f16", "f32"};
static int failures;

static void check(int good, const char *what) {
    if (good) return;
    failures += 1;
    printf("FAILED: %s\n", what);
}

/* Numbers between -1 and 1. */
static void draw(float *values, size_t count, uint32_t random) {
    for (size_t i = 0; i < count; ++i) {
        random = random * 1664525u + 1013904223u;
        values[i] = (float)(random >> 8) / 8388608.0f - 1.0f;
    }
}

/* Whether numbers differ by less than that share of the largest; a NaN differs. */
static int near(const float *one, const float *other, size_t count, float share) {
    float largest = 0.0f;
    for (size_t i = 0; i < count; ++i) largest = fmaxf(largest, fabsf(one[i]));
    for (size_t i = 0; i < count; ++i) {
        if (!(fabsf(one[i] - other[i]) < share * largest)) return 0;
    }
    return 1;
}

/* With int8 K/V a code may fall to its neighbour. */
static float rounding(int32_t kv) {
    return kv == VCUDA_KV_INT8 ? 0.05f : 0.01f;
}

/* Prompts in chunks give the logits that the same tokens give one after another: to a hundredth of
 * the largest, or with int8 K/V, where a code may fall to its neighbour, to a twentieth. */
static void prompts(vcuda_handle *handle, int32_t kv, int32_t longest) {
    static const int32_t lengths[] = {1, 2, 31, 33, CHUNK, CHUNK + 1, 2 * CHUNK + 15};
    static int32_t ids[CTX];
    static float single[VOCAB];
    static float whole[VOCAB];
    for (int32_t i = 0; i < CTX; ++i) ids[i] = (i * 379 + 11) % VOCAB;
    for (size_t l = 0; l < sizeof lengths / sizeof *lengths && lengths[l] <= longest; ++l) {
        vcuda_decode_step step = {.struct_size = sizeof step,
                                  .count = lengths[l],
                                  .out = VCUDA_OUT_LOGITS,
                                  .ids = ids,
                                  .logits = single};
        TRY(vcuda_kv_seek(handle, 0));
        TRY(vcuda_dev_decode_run(handle, &step));
        TRY(vcuda_kv_seek(handle, 0));
        step.logits = whole;
        TRY(vcuda_dev_prefill(handle, &step));
        check(near(single, whole, VOCAB, rounding(kv)),
              "a prompt in chunks gives the logits of its tokens one by one");
    }
}

/* The layers as a segment: hidden states of tokens at once are those of one after another. Where
 * int8 K/V round otherwise, and a router's third and fourth are nearer to each other than that, the
 * other expert would be right too: there every token takes all of them. Leaves the handle with a
 * segment. */
static void layers_alone(vcuda_handle *handle, int32_t kv, int moe, int32_t longest) {
    static const int32_t lengths[] = {1, 5, CHUNK + 1};
    static float rows[(CHUNK + 1) * HIDDEN];
    static float single[(CHUNK + 1) * HIDDEN];
    static float whole[(CHUNK + 1) * HIDDEN];
    init(handle, kv, moe, 1, 1, 1, kv == VCUDA_KV_INT8 ? EXPERTS : EXPERTS_PER_TOKEN);
    draw(rows, sizeof rows / sizeof *rows, 2);
    for (size_t l = 0; l < sizeof lengths / sizeof *lengths && lengths[l] <= longest; ++l) {
        memcpy(single, rows, sizeof rows);
        memcpy(whole, rows, sizeof rows);
        TRY(vcuda_kv_seek(handle, 0));
        for (int32_t i = 0; i < lengths[l]; ++i) {
            TRY(vcuda_dev_layers_run(handle, i, 1, single + i * HIDDEN));
        }
        TRY(vcuda_kv_seek(handle, 0));
        TRY(vcuda_dev_layers_run(handle, 0, lengths[l], whole));
        check(memcmp(rows, whole, sizeof *rows * HIDDEN) != 0, "layers change their rows");
        check(near(single, whole, (size_t)lengths[l] * HIDDEN, rounding(kv)),
              "layers at once give the hidden states of one token after another");
    }
}

static void combination(int32_t kind, int32_t kv, int moe, int32_t tokens, int32_t longest) {
    static const char *const kinds[] = {"f32", "bf16", "q8", "q4"};
    vcuda_handle *handle = NULL;
    int32_t plain[CTX + 1] = {7};
    int32_t ids[CTX + 1] = {7};
    const int exact = kind == VCUDA_BF16 || kv == VCUDA_KV_F32;
    vcuda_prof prof = {.struct_size = sizeof prof};
    TRY(vcuda_create(0, &handle));
    weights(handle, kind, moe);

    init(handle, kv, moe, 0, exact, 0, EXPERTS_PER_TOKEN);
    decode(handle, plain, 0, tokens);

    init(handle, kv, moe, 1, exact, 0, EXPERTS_PER_TOKEN);
    prompts(handle, kv, longest);
    TRY(vcuda_kv_seek(handle, 0));
    decode(handle, ids, 0, 1); /* the graphs are made */
    TRY(vcuda_kv_seek(handle, 0));
    TRY(vcuda_prof_reset(handle));
    const double start = seconds();
    decode(handle, ids, 0, tokens);
    const double spent = seconds() - start;
    TRY(vcuda_prof_read(handle, &prof));
    check(prof.tokens == (uint64_t)tokens, "every token is counted");
    check(prof.h2d_copies == (uint64_t)tokens, "one copy to the device a token");
    check(prof.d2h_copies == (uint64_t)tokens, "one copy from the device a token");
    check(memcmp(plain, ids, sizeof ids) == 0, "the same ids with and without graphs");

    /* Read the second half of the K/V, destroy it by decoding other tokens, write it back. */
    const int32_t half = tokens / 2;
    const size_t rows = (size_t)(tokens - half);
    const size_t width = kv == VCUDA_KV_INT8 ? 1 : kv == VCUDA_KV_F16 ? 2 : 4;
    char *k = malloc(LAYERS * rows * KV_DIM * width);
    char *v = malloc(LAYERS * rows * KV_DIM * width);
    float *scales = malloc(2 * LAYERS * rows * KV_HEADS * sizeof *scales);
    if (k == NULL || v == NULL || scales == NULL) exit(1);
    for (int write = 0; write < 2; ++write) {
        for (int32_t l = 0; l < LAYERS; ++l) {
            char *to_k = k + (size_t)l * rows * KV_DIM * width;
            char *to_v = v + (size_t)l * rows * KV_DIM * width;
            float *ks = kv == VCUDA_KV_INT8 ? scales + 2 * l * rows * KV_HEADS : NULL;
            float *vs = kv == VCUDA_KV_INT8 ? ks + rows * KV_HEADS : NULL;
            if (write) {
                TRY(vcuda_kv_write(handle, l, half, tokens, to_k, to_v, ks, vs));
            } else {
                TRY(vcuda_kv_read(handle, l, half, tokens, to_k, to_v, ks, vs));
            }
        }
        if (!write) {
            TRY(vcuda_kv_seek(handle, half));
            for (int32_t p = half; p < tokens; ++p) (void)token(handle, 3, p, VCUDA_OUT_NONE);
            TRY(vcuda_kv_seek(handle, half));
        }
    }
    TRY(vcuda_kv_seek(handle, tokens - 1));
    check(token(handle, ids[tokens - 1], tokens - 1, VCUDA_OUT_GREEDY) == ids[tokens],
          "the same id after K/V was read, overwritten and written back");
    free(k);
    free(v);
    free(scales);

    uint32_t sum = 0;
    for (int32_t i = 0; i <= tokens; ++i) sum = sum * 31u + (uint32_t)ids[i];
    printf("%-4s %-4s %-5s %4d tokens, %7.0f a second, %.0f + %.0f copies a token, ids %08x\n",
           kinds[kind], kv_names[kv], moe ? "moe" : "dense", (int)tokens, tokens / spent,
           (double)prof.h2d_copies / tokens, (double)prof.d2h_copies / tokens, (unsigned)sum);
    layers_alone(handle, kv, moe, longest > 0 ? longest : 1);
    TRY(vcuda_destroy(handle));
}

/* A float32 matrix is quantised on the device, read out, put back under another key: both give the
 * same product, bit by bit. */
static void round_trip(int32_t kind) {
    enum { N = 21, K = 80, GROUPS = 3 };
    static float w[N * K];
    static float x[K];
    static char codes[N * 4 * K];
    static uint16_t scales[N * GROUPS];
    float first[N];
    float second[N];
    vcuda_handle *handle = NULL;
    vcuda_matrix matrix = {.struct_size = sizeof matrix, .kind = kind, .stack = 1, .n = N, .k = K};
    const int scaled = kind == VCUDA_Q8 || kind == VCUDA_Q4;
    draw(w, sizeof w / sizeof *w, 1);
    draw(x, sizeof x / sizeof *x, 3);
    TRY(vcuda_create(0, &handle));
    TRY(vcuda_cache_begin(handle, 1, &matrix, 1));
    TRY(vcuda_cache_rows(handle, 1, 8, N - 8, VCUDA_F32, w + 8 * K, NULL));
    TRY(vcuda_cache_rows(handle, 1, 0, 8, VCUDA_F32, w, NULL));
    TRY(vcuda_cache_end(handle, 1));
    TRY(vcuda_cache_read(handle, 1, 0, N, codes, scaled ? scales : NULL));
    TRY(vcuda_cache_begin(handle, 2, &matrix, 0));
    TRY(vcuda_cache_rows(handle, 2, 0, N, kind, codes, scaled ? scales : NULL));
    TRY(vcuda_cache_end(handle, 2));
    TRY(vcuda_dev_gemm(handle, 1, 0, x, 1, first));
    TRY(vcuda_dev_gemm(handle, 2, 0, x, 1, second));
    check(memcmp(first, second, sizeof first) == 0, "the same product after a round trip");
    float far = 0.0f;
    for (int n = 0; n < N; ++n) {
        float want = 0.0f;
        for (int k = 0; k < K; ++k) want += w[n * K + k] * x[k];
        far = fmaxf(far, fabsf(want - first[n]));
    }
    check(far < (kind == VCUDA_Q4 ? 3.0f : 0.3f), "a product near that of the float32 weights");
    TRY(vcuda_destroy(handle));
}

/* Products in one call are those of a call each, bit by bit: of one row, of a few, and of many. */
static void together(int32_t kind) {
    enum { N = 75, STACK = 2, K = 80, ROWS = 48 };
    static const struct {
        int32_t rows, first, index;
    } of[] = {{1, 0, 0}, {3, 2, -1}, {40, 5, 1}, {2, 46, 1}};
    enum { COUNT = sizeof of / sizeof *of, STRIDE = STACK * N + 3 };
    static float x[ROWS * K];
    static float y[COUNT * ROWS * STRIDE];
    static float alone[ROWS * STRIDE];
    vcuda_handle *handle = NULL;
    vcuda_product products[COUNT] = {{0}};
    draw(x, sizeof x / sizeof *x, 4);
    TRY(vcuda_create(0, &handle));
    weight(handle, 0, VCUDA_PROJ_EXPERT_GU, kind, STACK, N, K);
    for (int i = 0; i < COUNT; ++i) {
        products[i].struct_size = sizeof products[i];
        products[i].rows = of[i].rows;
        products[i].wkey = vcuda_wkey(0, VCUDA_PROJ_EXPERT_GU);
        products[i].index = of[i].index;
        products[i].first = of[i].first;
        products[i].y = (int64_t)i * ROWS * STRIDE;
        products[i].stride = STRIDE;
    }
    TRY(vcuda_dev_gemm_fused(handle, products, COUNT, x, ROWS, K, y, sizeof y / sizeof *y));
    for (int i = 0; i < COUNT; ++i) {
        const size_t floats = (size_t)of[i].rows * STRIDE;
        memset(alone, 0, sizeof alone);
        products[i].y = 0;
        TRY(vcuda_dev_gemm_fused(handle, products + i, 1, x, ROWS, K, alone, (int64_t)floats));
        check(memcmp(y + (size_t)i * ROWS * STRIDE, alone, floats * sizeof *alone) == 0,
              "a product in a call of several has the bits of a call of its own");
        check(alone[0] != 0.0f, "a product is written");
    }
    TRY(vcuda_destroy(handle));
}

static int other(const char *wanted, const char *name) {
    return strcmp(wanted, "all") != 0 && strcmp(wanted, name) != 0;
}

int main(int argc, char **argv) {
    int32_t count = 0;
    if (vcuda_abi_version() != VCUDA_ABI_VERSION) {
        fprintf(stderr, "embed: the library has ABI %d and this program %d; build it again\n",
                vcuda_abi_version(), VCUDA_ABI_VERSION);
        return 1;
    }
    TRY(vcuda_dev_count(&count));
    if (count == 0) return die("no device");
    const int32_t tokens = argc > 4 ? atoi(argv[4]) : 40;
    const int32_t longest = argc > 5 ? atoi(argv[5]) : CTX;
    if (tokens < 4 || tokens >= CTX) {
        fprintf(stderr, "embed: %d tokens were asked for, 4 to %d are possible\n", (int)tokens,
                CTX - 1);
        return 2;
    }
    for (int32_t kind = VCUDA_BF16; kind <= VCUDA_Q4; ++kind) {
        for (int32_t kv = VCUDA_KV_INT8; kv <= VCUDA_KV_F32; ++kv) {
            for (int moe = 0; moe < 2; ++moe) {
                static const char *const kinds[] = {"f32", "bf16", "q8", "q4"};
                if (argc > 1 && other(argv[1], kinds[kind])) continue;
                if (argc > 2 && other(argv[2], kv_names[kv])) continue;
                if (argc > 3 && other(argv[3], moe ? "moe" : "dense")) continue;
                combination(kind, kv, moe, tokens, longest);
            }
        }
    }
    for (int32_t kind = VCUDA_BF16; kind <= VCUDA_Q4; ++kind) {
        round_trip(kind);
        together(kind);
    }
    return failures == 0 ? 0 : 1;
}
