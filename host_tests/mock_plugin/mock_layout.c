// The layout of abi.h as this library was compiled.

#include "host_tests/mock_plugin/mock.h"

#include <stddef.h>
#include <string.h>

#define MOVED(type, name)                                                                          \
    (TABLE_HAS_FAULT(FAULT_WRONG_LAYOUT) && offsetof(type, name) == offsetof(moxie_batch, stream)  \
         ? 8u                                                                                      \
         : 0u)
#define WHOLE(type)                                                                                \
    {                                                                                              \
        .struct_size = sizeof(moxie_field), .size = sizeof(type), .structure = #type, .field = ""  \
    }
#define FIELD(type, name)                                                                          \
    {                                                                                              \
        .struct_size = sizeof(moxie_field), .offset = offsetof(type, name) + MOVED(type, name),    \
        .size = sizeof(((type *)0)->name), .structure = #type, .field = #name                      \
    }

// clang-format off
const moxie_field layout_fields[] = {
    WHOLE(moxie_error),
    FIELD(moxie_error, struct_size), FIELD(moxie_error, code), FIELD(moxie_error, rank),
    FIELD(moxie_error, text_bytes), FIELD(moxie_error, text),
    WHOLE(moxie_device),
    FIELD(moxie_device, type), FIELD(moxie_device, id),
    WHOLE(moxie_dtype),
    FIELD(moxie_dtype, code), FIELD(moxie_dtype, bits), FIELD(moxie_dtype, lanes),
    WHOLE(moxie_tensor),
    FIELD(moxie_tensor, data), FIELD(moxie_tensor, device), FIELD(moxie_tensor, ndim),
    FIELD(moxie_tensor, dtype), FIELD(moxie_tensor, shape), FIELD(moxie_tensor, strides),
    FIELD(moxie_tensor, byte_offset),
    WHOLE(moxie_allocation),
    FIELD(moxie_allocation, struct_size), FIELD(moxie_allocation, kind),
    FIELD(moxie_allocation, bytes), FIELD(moxie_allocation, align), FIELD(moxie_allocation, name),
    WHOLE(moxie_host),
    FIELD(moxie_host, struct_size), FIELD(moxie_host, abi_version), FIELD(moxie_host, ctx),
    FIELD(moxie_host, name), FIELD(moxie_host, get_i64), FIELD(moxie_host, get_f64),
    FIELD(moxie_host, get_str), FIELD(moxie_host, allocate), FIELD(moxie_host, release),
    FIELD(moxie_host, log), FIELD(moxie_host, all_gather), FIELD(moxie_host, barrier),
    FIELD(moxie_host, register_runner), FIELD(moxie_host, register_dispatcher),
    FIELD(moxie_host, communicator), FIELD(moxie_host, parallel_for),
    FIELD(moxie_host, thread_check), FIELD(moxie_host, get_extension),
    WHOLE(moxie_traits),
    FIELD(moxie_traits, struct_size), FIELD(moxie_traits, layouts), FIELD(moxie_traits, id_spaces),
    FIELD(moxie_traits, no_expert_id), FIELD(moxie_traits, weights_applied_by),
    FIELD(moxie_traits, scaling_applied_by), FIELD(moxie_traits, output_is_reduced),
    FIELD(moxie_traits, reduction_group), FIELD(moxie_traits, formats), FIELD(moxie_traits, graph),
    FIELD(moxie_traits, row_align_bytes), FIELD(moxie_traits, reserved0),
    WHOLE(moxie_probe),
    FIELD(moxie_probe, struct_size), FIELD(moxie_probe, score), FIELD(moxie_probe, name),
    FIELD(moxie_probe, kind), FIELD(moxie_probe, device), FIELD(moxie_probe, reason),
    WHOLE(moxie_config_entry),
    FIELD(moxie_config_entry, struct_size), FIELD(moxie_config_entry, found),
    FIELD(moxie_config_entry, key), FIELD(moxie_config_entry, type),
    FIELD(moxie_config_entry, value), FIELD(moxie_config_entry, help),
    WHOLE(moxie_reason),
    FIELD(moxie_reason, struct_size), FIELD(moxie_reason, code), FIELD(moxie_reason, name),
    FIELD(moxie_reason, key), FIELD(moxie_reason, message),
    WHOLE(moxie_report),
    FIELD(moxie_report, struct_size), FIELD(moxie_report, reason_stride),
    FIELD(moxie_report, reasons_count), FIELD(moxie_report, reasons),
    FIELD(moxie_report, warnings_count), FIELD(moxie_report, warnings),
    WHOLE(moxie_bounds),
    FIELD(moxie_bounds, struct_size), FIELD(moxie_bounds, reserved0),
    FIELD(moxie_bounds, forward_tokens), FIELD(moxie_bounds, dominant),
    FIELD(moxie_bounds, prefill), FIELD(moxie_bounds, decode),
    FIELD(moxie_bounds, dispatch_required), FIELD(moxie_bounds, dispatch_tokens),
    FIELD(moxie_bounds, allgather_rows), FIELD(moxie_bounds, alltoall_rows),
    FIELD(moxie_bounds, capture_rows), FIELD(moxie_bounds, dispatch_call_tokens_max),
    FIELD(moxie_bounds, forward_call_tokens_max), FIELD(moxie_bounds, physical_experts),
    FIELD(moxie_bounds, expert_first), FIELD(moxie_bounds, experts_local),
    WHOLE(moxie_buffer),
    FIELD(moxie_buffer, struct_size), FIELD(moxie_buffer, kind), FIELD(moxie_buffer, name),
    FIELD(moxie_buffer, bytes), FIELD(moxie_buffer, bytes_mapped), FIELD(moxie_buffer, align),
    FIELD(moxie_buffer, why),
    WHOLE(moxie_plan),
    FIELD(moxie_plan, struct_size), FIELD(moxie_plan, buffer_stride), FIELD(moxie_plan, bounds),
    FIELD(moxie_plan, buffers_count), FIELD(moxie_plan, buffers), FIELD(moxie_plan, device_bytes),
    FIELD(moxie_plan, symmetric_bytes), FIELD(moxie_plan, pinned_bytes),
    FIELD(moxie_plan, host_bytes),
    WHOLE(moxie_matrix),
    FIELD(moxie_matrix, struct_size), FIELD(moxie_matrix, format), FIELD(moxie_matrix, order),
    FIELD(moxie_matrix, orientation), FIELD(moxie_matrix, values), FIELD(moxie_matrix, scales),
    FIELD(moxie_matrix, global_scales), FIELD(moxie_matrix, bias),
    FIELD(moxie_matrix, block_offset), FIELD(moxie_matrix, reserved0),
    WHOLE(moxie_weights),
    FIELD(moxie_weights, struct_size), FIELD(moxie_weights, reserved0), FIELD(moxie_weights, w1),
    FIELD(moxie_weights, w2),
    WHOLE(moxie_step),
    FIELD(moxie_step, struct_size), FIELD(moxie_step, slot), FIELD(moxie_step, tokens),
    FIELD(moxie_step, rank_tokens), FIELD(moxie_step, padding), FIELD(moxie_step, phase),
    FIELD(moxie_step, tokens_valid), FIELD(moxie_step, capture_row),
    WHOLE(moxie_batch),
    FIELD(moxie_batch, struct_size), FIELD(moxie_batch, slot), FIELD(moxie_batch, layer),
    FIELD(moxie_batch, id_space), FIELD(moxie_batch, x), FIELD(moxie_batch, ids),
    FIELD(moxie_batch, weights), FIELD(moxie_batch, y), FIELD(moxie_batch, expert_map),
    FIELD(moxie_batch, stream),
    WHOLE(moxie_slab),
    FIELD(moxie_slab, struct_size), FIELD(moxie_slab, reserved0), FIELD(moxie_slab, rows),
    FIELD(moxie_slab, scales), FIELD(moxie_slab, ids), FIELD(moxie_slab, weights),
    WHOLE(moxie_rows),
    FIELD(moxie_rows, struct_size), FIELD(moxie_rows, layout), FIELD(moxie_rows, id_space),
    FIELD(moxie_rows, slabs_count), FIELD(moxie_rows, slab_stride), FIELD(moxie_rows, reserved0),
    FIELD(moxie_rows, slabs), FIELD(moxie_rows, counts), FIELD(moxie_rows, expert_map),
    WHOLE(moxie_call),
    FIELD(moxie_call, struct_size), FIELD(moxie_call, slot), FIELD(moxie_call, layer),
    FIELD(moxie_call, reserved0), FIELD(moxie_call, stream),
    WHOLE(moxie_runner_api),
    FIELD(moxie_runner_api, struct_size), FIELD(moxie_runner_api, reserved0),
    FIELD(moxie_runner_api, create), FIELD(moxie_runner_api, run),
    FIELD(moxie_runner_api, weights_updated), FIELD(moxie_runner_api, destroy),
    WHOLE(moxie_runner_info),
    FIELD(moxie_runner_info, struct_size), FIELD(moxie_runner_info, reserved0),
    FIELD(moxie_runner_info, name), FIELD(moxie_runner_info, device),
    FIELD(moxie_runner_info, traits), FIELD(moxie_runner_info, api),
    WHOLE(moxie_dispatcher_api),
    FIELD(moxie_dispatcher_api, struct_size), FIELD(moxie_dispatcher_api, reserved0),
    FIELD(moxie_dispatcher_api, create), FIELD(moxie_dispatcher_api, begin_forward),
    FIELD(moxie_dispatcher_api, dispatch), FIELD(moxie_dispatcher_api, combine),
    FIELD(moxie_dispatcher_api, dispatch_send), FIELD(moxie_dispatcher_api, dispatch_recv),
    FIELD(moxie_dispatcher_api, combine_send), FIELD(moxie_dispatcher_api, combine_recv),
    FIELD(moxie_dispatcher_api, poll_error), FIELD(moxie_dispatcher_api, set_active_ranks),
    FIELD(moxie_dispatcher_api, destroy),
    WHOLE(moxie_dispatcher_info),
    FIELD(moxie_dispatcher_info, struct_size), FIELD(moxie_dispatcher_info, reserved0),
    FIELD(moxie_dispatcher_info, name), FIELD(moxie_dispatcher_info, device),
    FIELD(moxie_dispatcher_info, traits), FIELD(moxie_dispatcher_info, api),
    WHOLE(moxie_build),
    FIELD(moxie_build, struct_size), FIELD(moxie_build, abi_min), FIELD(moxie_build, abi_max),
    FIELD(moxie_build, reserved0), FIELD(moxie_build, version), FIELD(moxie_build, source_id),
    FIELD(moxie_build, compiler), FIELD(moxie_build, cuda), FIELD(moxie_build, layout_digest),
    WHOLE(moxie_field),
    FIELD(moxie_field, struct_size), FIELD(moxie_field, offset), FIELD(moxie_field, size),
    FIELD(moxie_field, reserved0), FIELD(moxie_field, structure), FIELD(moxie_field, field),
    WHOLE(moxie_stats),
    FIELD(moxie_stats, struct_size), FIELD(moxie_stats, reserved0), FIELD(moxie_stats, forwards),
    FIELD(moxie_stats, rounds), FIELD(moxie_stats, dispatches), FIELD(moxie_stats, combines),
    FIELD(moxie_stats, tokens), FIELD(moxie_stats, rows_sent), FIELD(moxie_stats, rows_received),
    FIELD(moxie_stats, refused), FIELD(moxie_stats, peer_failures),
    FIELD(moxie_stats, bytes_allocated),
    WHOLE(moxie_captured),
    FIELD(moxie_captured, struct_size), FIELD(moxie_captured, dp_rank), FIELD(moxie_captured, ids),
    FIELD(moxie_captured, load),
    WHOLE(moxie_api),
    FIELD(moxie_api, struct_size), FIELD(moxie_api, abi_version), FIELD(moxie_api, build),
    FIELD(moxie_api, layout), FIELD(moxie_api, get_extension), FIELD(moxie_api, probe),
    FIELD(moxie_api, open), FIELD(moxie_api, config), FIELD(moxie_api, validate),
    FIELD(moxie_api, plan), FIELD(moxie_api, forward), FIELD(moxie_api, captured),
    FIELD(moxie_api, stats), FIELD(moxie_api, suspend), FIELD(moxie_api, resume),
    FIELD(moxie_api, close),
    WHOLE(moxie_request),
    FIELD(moxie_request, struct_size), FIELD(moxie_request, abi_min), FIELD(moxie_request, abi_max),
    FIELD(moxie_request, reserved0), FIELD(moxie_request, host_build),
    WHOLE(moxie_routing),
    FIELD(moxie_routing, struct_size), FIELD(moxie_routing, scoring),
    FIELD(moxie_routing, renormalize), FIELD(moxie_routing, groups),
    FIELD(moxie_routing, groups_top), FIELD(moxie_routing, reserved0),
    FIELD(moxie_routing, renormalize_epsilon), FIELD(moxie_routing, scaling_factor),
    FIELD(moxie_routing, correction_bias),
    WHOLE(moxie_routing_api),
    FIELD(moxie_routing_api, struct_size), FIELD(moxie_routing_api, reserved0),
    FIELD(moxie_routing_api, route),
    WHOLE(moxie_expand_api),
    FIELD(moxie_expand_api, struct_size), FIELD(moxie_expand_api, reserved0),
    FIELD(moxie_expand_api, expand), FIELD(moxie_expand_api, fold),
};
// clang-format on

const uint64_t layout_fields_count = sizeof layout_fields / sizeof layout_fields[0];

static uint64_t digest_bytes(uint64_t digest, const void *bytes, size_t count)
{
    for (size_t i = 0; i < count; i++)
        digest = (digest ^ ((const unsigned char *)bytes)[i]) * 0x100000001b3u;
    return digest;
}

static uint64_t digest_number(uint64_t digest, uint32_t number)
{
    const unsigned char bytes[4] = {(unsigned char)number, (unsigned char)(number >> 8),
                                    (unsigned char)(number >> 16), (unsigned char)(number >> 24)};

    return digest_bytes(digest, bytes, sizeof bytes);
}

uint64_t layout_digest(void)
{
    uint64_t digest = 0xcbf29ce484222325u;

    for (uint64_t i = 0; i < layout_fields_count; i++) {
        const moxie_field *row = &layout_fields[i];

        digest = digest_bytes(digest, row->structure, strlen(row->structure) + 1);
        digest = digest_bytes(digest, row->field, strlen(row->field) + 1);
        digest = digest_number(digest_number(digest, row->offset), row->size);
    }
    return digest;
}
