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
    return 0;
}
