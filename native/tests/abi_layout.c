/* Prints the layout of every struct of vcuda.h, one line each: `struct size` and
 * `struct.field offset size`. tests/contract/test_abi.py compares it with ctypes. Compiled as C11
 * with -Wall -Wextra -pedantic: the proof that the header is plain C. */
#include <stddef.h>
#include <stdio.h>

#include "vcuda.h"

#define STRUCT(type) printf(#type " %u\n", (unsigned)sizeof(type))
#define FIELD(type, field)                                               \
    printf(#type "." #field " %u %u\n", (unsigned)offsetof(type, field), \
           (unsigned)sizeof(((type *)0)->field))

int main(void) {
    printf("VCUDA_ABI_VERSION %d\n", VCUDA_ABI_VERSION);

    STRUCT(vcuda_device_info);
    FIELD(vcuda_device_info, struct_size);
    FIELD(vcuda_device_info, index);
    FIELD(vcuda_device_info, name);
    FIELD(vcuda_device_info, uuid);
    FIELD(vcuda_device_info, pci);
    FIELD(vcuda_device_info, cc_major);
    FIELD(vcuda_device_info, cc_minor);
    FIELD(vcuda_device_info, sm_count);
    FIELD(vcuda_device_info, sm_clock_khz);
    FIELD(vcuda_device_info, memory_clock_khz);
    FIELD(vcuda_device_info, memory_bus_bits);
    FIELD(vcuda_device_info, driver_version);
    FIELD(vcuda_device_info, runtime_version);
    FIELD(vcuda_device_info, kernel_arch);
    FIELD(vcuda_device_info, integrated);
    FIELD(vcuda_device_info, memory_total);
    FIELD(vcuda_device_info, memory_free);
    FIELD(vcuda_device_info, l2_bytes);
    FIELD(vcuda_device_info, shared_per_block);
    FIELD(vcuda_device_info, peak_bytes_per_second);

    STRUCT(vcuda_phase);
    FIELD(vcuda_phase, count);
    FIELD(vcuda_phase, ns);

    STRUCT(vcuda_prof);
    FIELD(vcuda_prof, struct_size);
    FIELD(vcuda_prof, reserved);
    FIELD(vcuda_prof, cache_probe);
    FIELD(vcuda_prof, upload);
    FIELD(vcuda_prof, h2d);
    FIELD(vcuda_prof, gemm);
    FIELD(vcuda_prof, reduce);
    FIELD(vcuda_prof, attention);
    FIELD(vcuda_prof, norm);
    FIELD(vcuda_prof, moe);
    FIELD(vcuda_prof, d2h_sync);
    FIELD(vcuda_prof, tokens);
    FIELD(vcuda_prof, launches);
    FIELD(vcuda_prof, h2d_copies);
    FIELD(vcuda_prof, h2d_bytes);
    FIELD(vcuda_prof, d2h_copies);
    FIELD(vcuda_prof, d2h_bytes);
    FIELD(vcuda_prof, upload_copies);
    FIELD(vcuda_prof, upload_bytes);

    STRUCT(vcuda_matrix);
    FIELD(vcuda_matrix, struct_size);
    FIELD(vcuda_matrix, kind);
    FIELD(vcuda_matrix, stack);
    FIELD(vcuda_matrix, n);
    FIELD(vcuda_matrix, k);

    STRUCT(vcuda_cache_info);
    FIELD(vcuda_cache_info, struct_size);
    FIELD(vcuda_cache_info, reserved);
    FIELD(vcuda_cache_info, budget);
    FIELD(vcuda_cache_info, bytes);
    FIELD(vcuda_cache_info, entries);
    FIELD(vcuda_cache_info, pinned_bytes);
    FIELD(vcuda_cache_info, hits);
    FIELD(vcuda_cache_info, misses);
    FIELD(vcuda_cache_info, uploads);
    FIELD(vcuda_cache_info, evictions);

    STRUCT(vcuda_product);
    FIELD(vcuda_product, struct_size);
    FIELD(vcuda_product, rows);
    FIELD(vcuda_product, wkey);
    FIELD(vcuda_product, index);
    FIELD(vcuda_product, first);
    FIELD(vcuda_product, y);
    FIELD(vcuda_product, stride);

    STRUCT(vcuda_layer);
    FIELD(vcuda_layer, struct_size);
    FIELD(vcuda_layer, moe);
    FIELD(vcuda_layer, window);
    FIELD(vcuda_layer, reserved);
    FIELD(vcuda_layer, input_norm);
    FIELD(vcuda_layer, post_norm);
    FIELD(vcuda_layer, q_norm);
    FIELD(vcuda_layer, k_norm);
    FIELD(vcuda_layer, qkv_bias);
    FIELD(vcuda_layer, o_bias);
    FIELD(vcuda_layer, gate_up_bias);
    FIELD(vcuda_layer, down_bias);

    STRUCT(vcuda_decode_config);
    FIELD(vcuda_decode_config, struct_size);
    FIELD(vcuda_decode_config, layers);
    FIELD(vcuda_decode_config, hidden);
    FIELD(vcuda_decode_config, heads);
    FIELD(vcuda_decode_config, kv_heads);
    FIELD(vcuda_decode_config, head_dim);
    FIELD(vcuda_decode_config, intermediate);
    FIELD(vcuda_decode_config, vocab);
    FIELD(vcuda_decode_config, ctx_size);
    FIELD(vcuda_decode_config, experts);
    FIELD(vcuda_decode_config, experts_per_token);
    FIELD(vcuda_decode_config, moe_intermediate);
    FIELD(vcuda_decode_config, norm_topk_prob);
    FIELD(vcuda_decode_config, group_size);
    FIELD(vcuda_decode_config, kv);
    FIELD(vcuda_decode_config, tied_head);
    FIELD(vcuda_decode_config, graph);
    FIELD(vcuda_decode_config, rms_norm_eps);
    FIELD(vcuda_decode_config, final_norm);
    FIELD(vcuda_decode_config, rope_cos);
    FIELD(vcuda_decode_config, rope_sin);
    FIELD(vcuda_decode_config, layer_params);
    FIELD(vcuda_decode_config, prefill_rows);
    FIELD(vcuda_decode_config, prefill_exact);
    FIELD(vcuda_decode_config, segment);
    FIELD(vcuda_decode_config, first_layer);

    STRUCT(vcuda_decode_step);
    FIELD(vcuda_decode_step, struct_size);
    FIELD(vcuda_decode_step, position);
    FIELD(vcuda_decode_step, count);
    FIELD(vcuda_decode_step, out);
    FIELD(vcuda_decode_step, vocab_limit);
    FIELD(vcuda_decode_step, top);
    FIELD(vcuda_decode_step, temperature);
    FIELD(vcuda_decode_step, id);
    FIELD(vcuda_decode_step, top_count);
    FIELD(vcuda_decode_step, nonfinite);
    FIELD(vcuda_decode_step, max_logit);
    FIELD(vcuda_decode_step, sum_exp);
    FIELD(vcuda_decode_step, ids);
    FIELD(vcuda_decode_step, logits);
    FIELD(vcuda_decode_step, top_ids);
    FIELD(vcuda_decode_step, top_logits);
    FIELD(vcuda_decode_step, trace);
    return 0;
}
