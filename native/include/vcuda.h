/* vcuda.h - run a language model on one NVIDIA GPU, from any program.
 *
 * This header is the whole interface of libvcuda: plain C99, fixed-width types, opaque handles, no
 * callbacks. It compiles as C and as C++ and needs no CUDA header. The library knows shapes, bytes
 * and pointers; it has never heard of a file, a tokenizer or a model's name. It prints nothing,
 * never ends the process, and keeps no state outside its handles. Nothing touches CUDA when the
 * library is loaded: the first call that takes or asks for a device does.
 *
 * In ten lines:
 *
 *     if (vcuda_abi_version() != VCUDA_ABI_VERSION) return 1;
 *     int32_t n = 0;
 *     vcuda_dev_count(&n);
 *     if (n == 0) { puts(vcuda_last_error()); return 1; }
 *     vcuda_handle *h = NULL;
 *     if (vcuda_create(0, &h) != VCUDA_OK) { puts(vcuda_last_error()); return 1; }
 *     if (vcuda_dev_selftest(h) != VCUDA_OK) puts(vcuda_last_error());
 *     vcuda_prof prof = {.struct_size = sizeof prof};
 *     vcuda_prof_read(h, &prof);
 *     vcuda_destroy(h);
 *
 * Answers. Every function that can fail returns int:
 *      0  VCUDA_OK        done.
 *     -1  VCUDA_NOT_DONE  not done, and nothing changed: no state, no memory of the caller's, no
 *                         counter of positions. The caller may go on without the library.
 *   < -1  VCUDA_LOST      the device is lost (an illegal address, a hung kernel, a memory error).
 *                         CUDA cannot recover inside the process: the handle answers VCUDA_LOST to
 *                         everything but vcuda_destroy.
 * vcuda_last_error() then holds the reason in one sentence, with the numbers in it.
 *
 * Structs. Each begins with struct_size. The caller sets it to sizeof the struct it was compiled
 * with; fields are only ever appended, so an older caller gets the fields it knows, and a caller
 * newer than the library is told so (-1). No struct has hidden padding.
 *
 * Threads. A handle may be used from any thread; calls on one handle are serialised inside.
 * Different handles are independent. After fork() the child must not use the parent's handles:
 * they answer -1 there, and vcuda_destroy only frees host memory.
 *
 * The rules by which this interface may change are in docs/abi.md.
 */
#ifndef VCUDA_H
#define VCUDA_H

#include <stdint.h>

#if defined(_WIN32)
#if defined(VCUDA_BUILDING)
#define VCUDA_API __declspec(dllexport)
#else
#define VCUDA_API __declspec(dllimport)
#endif
#elif defined(__GNUC__)
#define VCUDA_API __attribute__((visibility("default")))
#else
#define VCUDA_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* One integer; it grows with every incompatible change. A caller compares it with what
 * vcuda_abi_version() answers before it calls anything else. */
#define VCUDA_ABI_VERSION 1

#define VCUDA_OK 0
#define VCUDA_NOT_DONE (-1)
#define VCUDA_LOST (-2)

/* ---- the library itself ------------------------------------------------------------------- */

/* The ABI version that the library was built with. Never fails, touches no device. */
VCUDA_API int vcuda_abi_version(void);

/* How the library was built: one JSON object (ASCII, static storage) with the keys version, abi,
 * cuda_toolkit, archs, host_compiler, build_type. */
VCUDA_API const char *vcuda_build_info(void);

/* Why the calling thread's last unsuccessful call did not do its work: one sentence in UTF-8, ""
 * before the first. The text belongs to the library and stays until this thread's next
 * unsuccessful call; a successful one does not clear it (vcuda_dev_count alone explains a 0). */
VCUDA_API const char *vcuda_last_error(void);

/* ---- devices ------------------------------------------------------------------------------ */

/* What one device is, and how much of its memory is free now. */
typedef struct vcuda_device_info {
    uint32_t struct_size; /* set by the caller: sizeof(vcuda_device_info) */
    int32_t index;        /* as CUDA_VISIBLE_DEVICES leaves them numbered */
    char name[256];       /* "NVIDIA H200", zero-terminated */
    char uuid[48];        /* "GPU-8-4-4-4-12" in hexadecimal, zero-terminated */
    char pci[16];         /* "0000:65:00.0", zero-terminated */
    int32_t cc_major;     /* compute capability: 9 and 0 for 9.0 */
    int32_t cc_minor;
    int32_t sm_count;               /* streaming multiprocessors */
    int32_t sm_clock_khz;           /* peak; 0 where the driver does not tell */
    int32_t memory_clock_khz;       /* peak; 0 where the driver does not tell */
    int32_t memory_bus_bits;        /* width of the memory bus */
    int32_t driver_version;         /* CUDA version that the driver supports: 13000 is 13.0 */
    int32_t runtime_version;        /* CUDA runtime inside this library: 13000 is 13.0 */
    int32_t kernel_arch;            /* compute capability of the machine code that would run here,
                                       90 for 9.0; 0: this library has no code for the device */
    int32_t integrated;             /* 1: shares memory with the processor */
    uint64_t memory_total;          /* bytes */
    uint64_t memory_free;           /* bytes, now */
    uint64_t l2_bytes;              /* L2 cache */
    uint64_t shared_per_block;      /* bytes of shared memory a block may opt in to */
    uint64_t peak_bytes_per_second; /* 2 * memory clock * bus width; 0 where one is not told */
} vcuda_device_info;

/* How many devices there are. Without a driver, with one that is too old, or without a device the
 * answer is 0 (and VCUDA_OK), and vcuda_last_error() says which of the three it is. */
VCUDA_API int vcuda_dev_count(int32_t *count);

/* The CUDA version the driver supports and the one this library carries, 13000 for 13.0. Driver 0:
 * there is no NVIDIA driver. Creates no context. */
VCUDA_API int vcuda_driver_version(int32_t *driver, int32_t *runtime);

/* Fill *info for the device `index`. Reading the free memory creates the device's CUDA context
 * (some hundred MB of it), as any later use would. */
VCUDA_API int vcuda_dev_query(int32_t index, vcuda_device_info *info);

/* ---- handles ------------------------------------------------------------------------------ */

/* Everything one model needs on one device. */
typedef struct vcuda_handle vcuda_handle;

/* Take the device `device` into use; *out is the handle, or NULL when the answer is not 0. */
VCUDA_API int vcuda_create(int32_t device, vcuda_handle **out);

/* Give everything back; NULL is done at once. Also right for a handle whose device is lost. No
 * other call on the handle may be going on, and none may follow. */
VCUDA_API int vcuda_destroy(vcuda_handle *handle);

/* Send 256 integers to the device, let one small kernel transform them, read them back and compare:
 * shows in a millisecond that copies and launches work. PROF counts 1 launch, 1 copy each way. */
VCUDA_API int vcuda_dev_selftest(vcuda_handle *handle);

/* ---- PROF: what was done, and how long it took --------------------------------------------- */

/* One phase of the work. Host phases are timed by the host's clock, device phases (gemm, reduce,
 * attention, norm, moe) by device events; the second kind is 0 unless timing was asked for. */
typedef struct vcuda_phase {
    uint64_t count; /* how often */
    uint64_t ns;    /* nanoseconds, added up */
} vcuda_phase;

/* Counters since the handle was created or vcuda_prof_reset. All zero at first. */
typedef struct vcuda_prof {
    uint32_t struct_size;    /* set by the caller: sizeof(vcuda_prof) */
    uint32_t reserved;       /* 0 */
    vcuda_phase cache_probe; /* looking a weight up in the device's weight cache */
    vcuda_phase upload;      /* putting a weight there (conversion, staging, copy) */
    vcuda_phase h2d;         /* copies to the device other than uploads: position, ids */
    vcuda_phase gemm;        /* matrix products, with the norm before and the addition after them */
    vcuda_phase reduce;      /* from logits to the largest ones */
    vcuda_phase attention;   /* q/k norm, RoPE, K/V append and attention */
    vcuda_phase norm;        /* the embedding, which begins the residual stream */
    vcuda_phase moe;         /* routing and experts */
    vcuda_phase d2h_sync;    /* waiting for the device and copying the logits or the id back */
    uint64_t tokens;         /* tokens decoded or prefilled */
    uint64_t launches;       /* kernels launched; a graph launch counts 1 */
    uint64_t h2d_copies;     /* host-to-device copies, uploads not among them */
    uint64_t h2d_bytes;
    uint64_t d2h_copies; /* device-to-host copies */
    uint64_t d2h_bytes;
    uint64_t upload_copies; /* host-to-device copies of weights */
    uint64_t upload_bytes;
} vcuda_prof;

/* Copy the counters of this handle into *prof. */
VCUDA_API int vcuda_prof_read(vcuda_handle *handle, vcuda_prof *prof);

/* Set all counters of this handle to zero. */
VCUDA_API int vcuda_prof_reset(vcuda_handle *handle);

/* on != 0: from now on vcuda_dev_decode_run submits kernel by kernel instead of through its graph,
 * and times every device phase with events. It is slower so; its results are the same bits. */
VCUDA_API int vcuda_prof_timing(vcuda_handle *handle, int32_t on);

/* ---- weights ------------------------------------------------------------------------------- */

/* Kinds of numbers. q8 and q4 have groups of 32 along K, symmetric, one float16 scale a group;
 * their canonical bytes, which every function here takes and gives, are (G = ceil(k / 32)):
 *   q8  codes int8  [rows][32 G]
 *   q4  codes uint8 [rows][16 G]; byte j of a group: low nibble = code of k = j, plus 8,
 *                                 high nibble = code of k = j + 16, plus 8
 *       scales float16 [rows][G], both kinds; never zero
 * Inside, a matrix lies as the kernels read it best; nobody but the library sees that layout. */
#define VCUDA_F32 0
#define VCUDA_BF16 1
#define VCUDA_Q8 2
#define VCUDA_Q4 3

/* What a weight is in its layer. The stacks hold one matrix an expert. */
#define VCUDA_PROJ_Q 0
#define VCUDA_PROJ_K 1
#define VCUDA_PROJ_V 2
#define VCUDA_PROJ_O 3         /* [hidden, q_dim] */
#define VCUDA_PROJ_GATE 4      /* [F, hidden]; of a layer with experts a stack */
#define VCUDA_PROJ_UP 5        /* [F, hidden]; likewise */
#define VCUDA_PROJ_DOWN 6      /* [hidden, F]; likewise */
#define VCUDA_PROJ_FUSED_QKV 7 /* [q_dim + 2 kv_dim, hidden]: rows of q, then k, then v */
#define VCUDA_PROJ_FUSED_GU 8  /* stack of 2 [F, hidden]: gate, then up; dense layers only */
#define VCUDA_PROJ_ROUTER 9    /* [experts, hidden], VCUDA_F32 */
#define VCUDA_PROJ_EMBED 10    /* [vocab, hidden], under VCUDA_HEAD_LAYER */
#define VCUDA_PROJ_HEAD 11     /* [vocab, hidden], under VCUDA_HEAD_LAYER; absent when tied */
/* Of single experts: plus the expert's number, 0 to 4095. For products; decoding has the stacks. */
#define VCUDA_PROJ_EXPERT_GU 0x1000   /* stack of 2 [F, hidden]: gate, then up */
#define VCUDA_PROJ_EXPERT_DOWN 0x2000 /* [hidden, F] */
#define VCUDA_HEAD_LAYER 0x7FFFFFF0

/* The key of a weight. */
VCUDA_API uint64_t vcuda_wkey(int32_t layer, int32_t projection);

/* What a weight is. */
typedef struct vcuda_matrix {
    uint32_t struct_size; /* set by the caller: sizeof(vcuda_matrix) */
    int32_t kind;         /* VCUDA_F32, _BF16, _Q8 or _Q4: as it lies on the device */
    int64_t stack;        /* matrices: experts, 2 for FUSED_GU and EXPERT_GU, else 1 */
    int64_t n;            /* output features of one matrix */
    int64_t k;            /* input features */
} vcuda_matrix;

/* The device's weight cache. */
typedef struct vcuda_cache_info {
    uint32_t struct_size; /* set by the caller: sizeof(vcuda_cache_info) */
    uint32_t reserved;    /* 0 */
    uint64_t budget;      /* bytes; 0: no limit but the device's memory */
    uint64_t bytes;       /* of device memory that the entries take, padding included */
    uint64_t entries;
    uint64_t pinned_bytes;
    uint64_t hits; /* lookups, those of vcuda_dev_decode_run's check among them */
    uint64_t misses;
    uint64_t uploads;   /* entries completed by vcuda_cache_end or vcuda_cache_fill */
    uint64_t evictions; /* entries dropped to make room */
} vcuda_cache_info;

/* Device bytes that a matrix takes in the cache, padding included. */
VCUDA_API int vcuda_cache_size(const vcuda_matrix *matrix, uint64_t *bytes);

/* Set the budget and evict, least recently used first, what is over it. -1 when the pinned entries
 * alone are over it. 0: no limit. */
VCUDA_API int vcuda_cache_budget(vcuda_handle *handle, uint64_t bytes);

/* What the cache holds, and how it was used since the handle was created. */
VCUDA_API int vcuda_cache_stats(vcuda_handle *handle, vcuda_cache_info *info);

/* Begin an entry: memory is taken, entries that are not pinned are evicted for it if they must.
 * The entry is found by nobody before vcuda_cache_end. An entry of the same key stays until then
 * and is replaced. -1 when the budget or the device has no room, with both numbers (entries that
 * were evicted in the attempt are not brought back), and when the key has been begun and not
 * ended. */
VCUDA_API int vcuda_cache_begin(vcuda_handle *handle, uint64_t wkey, const vcuda_matrix *matrix,
                                int32_t pinned);

/* Give the rows [row, row + rows) of a begun entry; the stack counts as stack * n rows. `source` is
 * the kind of what is given: the entry's own kind (canonical bytes; scales is NULL for F32 and
 * BF16), or VCUDA_BF16 or VCUDA_F32 [rows][k] for a q8 or q4 entry, which is then quantised on the
 * device to the same bytes that pykestrel/quant.py makes, and F32 for a BF16 entry (rounded to
 * nearest even). Each row is given once, in any order. The bytes are copied through pinned buffers
 * and converted while the caller prepares the next ones: when this returns the caller's memory is
 * its own again. */
VCUDA_API int vcuda_cache_rows(vcuda_handle *handle, uint64_t wkey, int64_t row, int64_t rows,
                               int32_t source, const void *codes, const void *scales);

/* Complete a begun entry. -1, and the entry is dropped, when rows are missing or were given twice,
 * or when a weight that was converted was not finite or too large for its kind. Rows in the entry's
 * own kind are taken as they are: a NaN or an infinity among them shows in the logits. */
VCUDA_API int vcuda_cache_end(vcuda_handle *handle, uint64_t wkey);

/* Make a whole entry of random weights on the device, for measurements: every row has
 * root-mean-square 1 / sqrt(k). */
VCUDA_API int vcuda_cache_fill(vcuda_handle *handle, uint64_t wkey, const vcuda_matrix *matrix,
                               int32_t pinned, uint64_t seed);

/* Read rows back in the entry's own kind, canonical bytes (F32 and BF16: scales is NULL). */
VCUDA_API int vcuda_cache_read(vcuda_handle *handle, uint64_t wkey, int64_t row, int64_t rows,
                               void *codes, void *scales);

/* Look an entry up: *matrix is what it is. -1 when it is not there. Counts a hit or a miss. */
VCUDA_API int vcuda_cache_find(vcuda_handle *handle, uint64_t wkey, vcuda_matrix *matrix);

/* A pinned entry is never evicted. -1 when it is not there. */
VCUDA_API int vcuda_cache_pin(vcuda_handle *handle, uint64_t wkey, int32_t pinned);

/* Drop what there is of a key, complete or begun. -1 when there is nothing. */
VCUDA_API int vcuda_cache_drop(vcuda_handle *handle, uint64_t wkey);

/* y [m][n] = x [m][k] * W^T with matrix `index` of an entry's stack; x and y are the caller's. One
 * product of vcuda_dev_gemm_fused. */
VCUDA_API int vcuda_dev_gemm(vcuda_handle *handle, uint64_t wkey, int64_t index, const float *x,
                             int32_t m, float *y);

/* One product: rows [first, first + rows) of x times the transpose of one matrix. */
typedef struct vcuda_product {
    uint32_t struct_size; /* set by the caller: sizeof(vcuda_product) */
    int32_t rows;         /* 1 or more */
    uint64_t wkey;        /* an entry of kind VCUDA_BF16, _Q8 or _Q4 */
    int64_t index;        /* of its stack; -1: all of it, matrix i in the columns from i * n on */
    int64_t first;        /* first row of x */
    int64_t y;            /* where its [0][0] lies in y, in floats */
    int64_t stride;       /* floats from one row of its result to the next, at least its columns */
} vcuda_product;

/* `count` products with rows of x, float32 [x_rows][k] of the caller's, into y, float32 [y_floats]
 * of the caller's, where nothing but the results is written; they must not overlap. All or nothing:
 * every key, shape and range is checked before anything is sent. One copy to the device, one from
 * it and one wait a call, counted by PROF; the buffers grow with the largest call and stay.
 *
 * A product of at most 4 rows multiplies each of them as decoding does, up to 32 rows of such
 * products of one kind with one launch. More rows go to the tensor cores, as float16 (q8, q4) or
 * bfloat16 (bf16) in two parts each, with the rounding of config.prefill_exact, 2048 rows at a
 * time: where these have a number that float16 cannot hold, they are multiplied as decoding does
 * after all, which costs another copy and another wait. Either way a result does not depend on what
 * else is in the call, and one that is not finite is given as it is. */
VCUDA_API int vcuda_dev_gemm_fused(vcuda_handle *handle, const vcuda_product *products,
                                   int32_t count, const float *x, int64_t x_rows, int64_t k,
                                   float *y, int64_t y_floats);

/* ---- decoding ------------------------------------------------------------------------------ */

#define VCUDA_KV_INT8 0 /* int8 with one float32 scale a position and KV head */
#define VCUDA_KV_F16 1
#define VCUDA_KV_F32 2

/* The small weights of one layer, float32 in the caller's memory; copied by decode_init. A NULL
 * norm or bias: the model has none. */
typedef struct vcuda_layer {
    uint32_t struct_size;      /* set by the caller: sizeof(vcuda_layer) */
    int32_t moe;               /* 1: routed experts; 0: a dense MLP */
    int32_t window;            /* positions that are seen, the own one included; 0: all */
    int32_t reserved;          /* 0 */
    const float *input_norm;   /* [hidden], required */
    const float *post_norm;    /* [hidden], required */
    const float *q_norm;       /* [head_dim] */
    const float *k_norm;       /* [head_dim] */
    const float *qkv_bias;     /* [q_dim + 2 kv_dim] */
    const float *o_bias;       /* [hidden] */
    const float *gate_up_bias; /* [2 F], dense layers only */
    const float *down_bias;    /* [hidden], dense layers only */
} vcuda_layer;

/* Shapes and switches of a model. q_dim = heads * head_dim, kv_dim = kv_heads * head_dim. */
typedef struct vcuda_decode_config {
    uint32_t struct_size; /* set by the caller: sizeof(vcuda_decode_config) */
    int32_t layers;
    int32_t hidden; /* a multiple of 4 */
    int32_t heads;  /* a multiple of kv_heads */
    int32_t kv_heads;
    int32_t head_dim;     /* a multiple of 16, at most 256 */
    int32_t intermediate; /* F of the dense layers */
    int32_t vocab;
    int32_t ctx_size;          /* positions of K/V */
    int32_t experts;           /* 0: no layer is moe; at most 1024 */
    int32_t experts_per_token; /* at most 32 */
    int32_t moe_intermediate;  /* F of the experts */
    int32_t norm_topk_prob;    /* 1: the weights of the chosen experts are made to add up to 1 */
    int32_t group_size;        /* of q8 and q4 weights: 32 */
    int32_t kv;                /* VCUDA_KV_* */
    int32_t tied_head;         /* 1: logits come from EMBED */
    int32_t graph;             /* 1: submit through CUDA graphs; 0: kernel by kernel */
    float rms_norm_eps;
    const float *final_norm;         /* [hidden] */
    const float *rope_cos;           /* [ctx_size][head_dim / 2], half-split pairs */
    const float *rope_sin;           /* [ctx_size][head_dim / 2] */
    const vcuda_layer *layer_params; /* [layers] */
    int32_t prefill_rows;            /* tokens that vcuda_dev_prefill (of a segment:
                                        vcuda_dev_layers_run) takes at a time, 0 to 65536; 0: it is
                                        not used, and costs no memory */
    int32_t prefill_exact;           /* how it holds activations for the tensor cores: 0: in 16
                                        bits (float16 for q8 and q4 weights, bfloat16 for bf16),
                                        1: as two such parts, at half the speed; queries and K/V
                                        likewise, always as float16. Two float16 parts are exact to
                                        2^-21 of a number and not below 2^-25; a q8 or q4 weight is
                                        code times scale, rounded to float16 in either case */
    int32_t segment;     /* 1: the layers are a part of a larger model, for vcuda_dev_layers_run: no
                            embedding, no final norm, no head; vocab, tied_head and final_norm
                            (which may be NULL) are not looked at */
    int32_t first_layer; /* of a segment: its layer i has the weights vcuda_wkey(first_layer + i,
                            ..), 0 to 1048576; 0 unless segment is 1 */
} vcuda_decode_config;

/* Device bytes that decode_init will take with this config: K/V, tables, buffers. */
VCUDA_API int vcuda_decode_size(const vcuda_decode_config *config, uint64_t *bytes);

/* Allocate everything that decoding will ever need; the position becomes 0. An earlier one on this
 * handle is freed first, once the config is found to be supported and memory to suffice. -1 when it
 * is not, with both numbers. The weights need not be in the cache yet. */
VCUDA_API int vcuda_dev_decode_init(vcuda_handle *handle, const vcuda_decode_config *config);

/* Free what decode_init allocated. The weights stay. */
VCUDA_API int vcuda_dev_decode_free(vcuda_handle *handle);

/* What decode_run is to give back. */
#define VCUDA_OUT_NONE 0       /* nothing: tokens of a prompt before its last */
#define VCUDA_OUT_LOGITS 1     /* logits of the last token */
#define VCUDA_OUT_ALL_LOGITS 2 /* logits of every token */
#define VCUDA_OUT_GREEDY 3     /* the id of the largest logit, the lowest id on a tie */
#define VCUDA_OUT_TOP 4        /* the largest logits with their ids, for a sampler on the host */

#define VCUDA_TOP_MAX 1024

/* One call of decode_run: what it is given and what it answers. */
typedef struct vcuda_decode_step {
    uint32_t struct_size; /* set by the caller: sizeof(vcuda_decode_step) */
    int32_t position;     /* in: the position of ids[0], which the handle must be at */
    int32_t count;        /* in: tokens, 1 or more */
    int32_t out;          /* in: VCUDA_OUT_* */
    int32_t vocab_limit;  /* in: GREEDY and TOP look at ids below it only; 0: vocab */
    int32_t top;          /* in: TOP: how many are wanted, 1 to VCUDA_TOP_MAX */
    float temperature;    /* in: TOP: of sum_exp, above 0 */
    int32_t id;           /* out: GREEDY and TOP: the id of the largest logit */
    int32_t top_count;    /* out: TOP: how many were written: `top`, or fewer when there are fewer;
                             more than VCUDA_TOP_MAX tie: 0, and the caller takes the logits */
    int32_t nonfinite;    /* out: 1: the answer is -1 because a logit was NaN or infinite */
    float max_logit;      /* out: GREEDY and TOP */
    float sum_exp;        /* out: TOP: sum over ids < vocab_limit of
                             exp((logit - max_logit) / temperature) */
    const int32_t *ids;   /* in: [count] */
    float *logits;        /* out: LOGITS [vocab], ALL_LOGITS [count][vocab], else unused */
    int32_t *top_ids;     /* out: TOP [top], by falling logit, equal ones by rising id */
    float *top_logits;    /* out: TOP [top] */
    float *trace;         /* out: NULL, or [count][vcuda_trace_size floats]; see there */
} vcuda_decode_step;

/* Append `count` tokens. All or nothing: before the first launch every weight and every shape is
 * checked, and after -1 the position and every K/V row before it are as they were. One copy to the
 * device and one from it a call, counted by PROF. */
VCUDA_API int vcuda_dev_decode_run(vcuda_handle *handle, vcuda_decode_step *step);

/* The same for many tokens, prefill_rows of them at a time, at many times the speed; `trace` must
 * be NULL. What differs is rounding (prefill_exact), and that every chunk reads all weights. Should
 * a number be too large for float16, or a logit not finite, the tokens are run as decode_run does.
 * After ALL_LOGITS vcuda_dev_decode_logits gives the last row to within rounding. */
VCUDA_API int vcuda_dev_prefill(vcuda_handle *handle, vcuda_decode_step *step);

/* Fetch the logits of the last token of the last decode_run or prefill, float32 [vocab], whatever
 * `out` was, as long as it was not NONE: for a sampler that needs more than TOP gave. */
VCUDA_API int vcuda_dev_decode_logits(vcuda_handle *handle, float *logits);

/* The layers of a segment (config.segment 1) over `count` tokens at `position`, where the handle
 * must be. hidden: float32 [count][config.hidden], the residual stream of each token: in: before
 * the segment's first layer, out: after its last. All or nothing as decode_run: after -1 `hidden`,
 * the position and the K/V before it are as they were.
 *
 * Token by token as decode_run when count is 1 or config.prefill_rows is 0, one copy each way a
 * token; else in chunks of prefill_rows as vcuda_dev_prefill, one copy each way a chunk, and once
 * more token by token when a number is too large for float16 or comes out as NaN or infinite. What
 * is not finite even so is given as it is: the caller looks. decode_run, prefill, decode_logits and
 * trace_size are -1 on a segment, and this is -1 on a whole model; K/V calls count a segment's
 * layers from 0. */
VCUDA_API int vcuda_dev_layers_run(vcuda_handle *handle, int32_t position, int32_t count,
                                   float *hidden);

/* How many floats a token's trace has: for finding the first difference between two engines. A
 * trace holds, layer after layer (F is the layer's, times experts_per_token in a moe layer):
 *   qkv [q_dim + 2 kv_dim]  the product with its bias, before q/k norm and RoPE
 *   attended [q_dim]        what attention gives
 *   after_attention [hidden]  the residual stream
 *   router [experts]        moe layers only: the logits
 *   hidden [F]              silu(gate) * up
 *   after_mlp [hidden]      the residual stream
 * A step with a trace is submitted kernel by kernel and costs extra copies. */
VCUDA_API int vcuda_trace_size(vcuda_handle *handle, uint64_t *floats);

/* ---- K/V ----------------------------------------------------------------------------------- */

/* How many positions the K/V holds. */
VCUDA_API int vcuda_kv_position(vcuda_handle *handle, int32_t *position);

/* Set it: down forgets rows; up (at most ctx_size) is for rows that vcuda_kv_write has put there.
 */
VCUDA_API int vcuda_kv_seek(vcuda_handle *handle, int32_t position);

/* Copy the rows of the positions [lo, hi) of one layer out or in: k and v are int8, float16
 * or float32 [hi - lo][kv_dim], k_scales and v_scales float32 [hi - lo][kv_heads] (NULL unless
 * int8). Keys are stored after RoPE. A value of int8 is code * scale. Only positions that do not
 * count can be written (lo is the position or more): seek down, write, seek up. */
VCUDA_API int vcuda_kv_read(vcuda_handle *handle, int32_t layer, int32_t lo, int32_t hi, void *k,
                            void *v, float *k_scales, float *v_scales);
VCUDA_API int vcuda_kv_write(vcuda_handle *handle, int32_t layer, int32_t lo, int32_t hi,
                             const void *k, const void *v, const float *k_scales,
                             const float *v_scales);

/* ---- measuring ----------------------------------------------------------------------------- */

/* Read `bytes` of device memory (at least 1 << 28; more than the L2 holds), `repeats` times, and
 * give the median rate: what a decode could reach at best on this device. The memory is taken and
 * given back. */
VCUDA_API int vcuda_dev_bandwidth(vcuda_handle *handle, uint64_t bytes, int32_t repeats,
                                  double *bytes_per_second);

#ifdef __cplusplus
}
#endif

#endif /* VCUDA_H */
