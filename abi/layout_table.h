// The layout of abi.h on 64-bit machines.
// Generated from abi.h by `python3 abi/ledger`; do not edit.

#ifndef MOXIE_ABI_LAYOUT_TABLE_H
#define MOXIE_ABI_LAYOUT_TABLE_H

// clang-format off
// STRUCT(name, bytes when first published, bytes now)   FIELD(struct, name, offset, bytes)
#define LAYOUT_TABLE(STRUCT, FIELD)                                           \
    STRUCT(moxie_error, 24, 24)                                               \
    FIELD(moxie_error, struct_size, 0, 4)                                     \
    FIELD(moxie_error, code, 4, 4)                                            \
    FIELD(moxie_error, rank, 8, 4)                                            \
    FIELD(moxie_error, text_bytes, 12, 4)                                     \
    FIELD(moxie_error, text, 16, 8)                                           \
    STRUCT(moxie_device, 8, 8)                                                \
    FIELD(moxie_device, type, 0, 4)                                           \
    FIELD(moxie_device, id, 4, 4)                                             \
    STRUCT(moxie_dtype, 4, 4)                                                 \
    FIELD(moxie_dtype, code, 0, 1)                                            \
    FIELD(moxie_dtype, bits, 1, 1)                                            \
    FIELD(moxie_dtype, lanes, 2, 2)                                           \
    STRUCT(moxie_tensor, 48, 48)                                              \
    FIELD(moxie_tensor, data, 0, 8)                                           \
    FIELD(moxie_tensor, device, 8, 8)                                         \
    FIELD(moxie_tensor, ndim, 16, 4)                                          \
    FIELD(moxie_tensor, dtype, 20, 4)                                         \
    FIELD(moxie_tensor, shape, 24, 8)                                         \
    FIELD(moxie_tensor, strides, 32, 8)                                       \
    FIELD(moxie_tensor, byte_offset, 40, 8)                                   \
    STRUCT(moxie_allocation, 32, 32)                                          \
    FIELD(moxie_allocation, struct_size, 0, 4)                                \
    FIELD(moxie_allocation, kind, 4, 4)                                       \
    FIELD(moxie_allocation, bytes, 8, 8)                                      \
    FIELD(moxie_allocation, align, 16, 8)                                     \
    FIELD(moxie_allocation, name, 24, 8)                                      \
    STRUCT(moxie_host, 136, 136)                                              \
    FIELD(moxie_host, struct_size, 0, 4)                                      \
    FIELD(moxie_host, abi_version, 4, 4)                                      \
    FIELD(moxie_host, ctx, 8, 8)                                              \
    FIELD(moxie_host, name, 16, 8)                                            \
    FIELD(moxie_host, get_i64, 24, 8)                                         \
    FIELD(moxie_host, get_f64, 32, 8)                                         \
    FIELD(moxie_host, get_str, 40, 8)                                         \
    FIELD(moxie_host, allocate, 48, 8)                                        \
    FIELD(moxie_host, release, 56, 8)                                         \
    FIELD(moxie_host, log, 64, 8)                                             \
    FIELD(moxie_host, all_gather, 72, 8)                                      \
    FIELD(moxie_host, barrier, 80, 8)                                         \
    FIELD(moxie_host, register_runner, 88, 8)                                 \
    FIELD(moxie_host, register_dispatcher, 96, 8)                             \
    FIELD(moxie_host, communicator, 104, 8)                                   \
    FIELD(moxie_host, parallel_for, 112, 8)                                   \
    FIELD(moxie_host, thread_check, 120, 8)                                   \
    FIELD(moxie_host, get_extension, 128, 8)                                  \
    STRUCT(moxie_traits, 48, 48)                                              \
    FIELD(moxie_traits, struct_size, 0, 4)                                    \
    FIELD(moxie_traits, layouts, 4, 4)                                        \
    FIELD(moxie_traits, id_spaces, 8, 4)                                      \
    FIELD(moxie_traits, no_expert_id, 12, 4)                                  \
    FIELD(moxie_traits, weights_applied_by, 16, 4)                            \
    FIELD(moxie_traits, scaling_applied_by, 20, 4)                            \
    FIELD(moxie_traits, output_is_reduced, 24, 4)                             \
    FIELD(moxie_traits, reduction_group, 28, 4)                               \
    FIELD(moxie_traits, formats, 32, 4)                                       \
    FIELD(moxie_traits, graph, 36, 4)                                         \
    FIELD(moxie_traits, row_align_bytes, 40, 4)                               \
    FIELD(moxie_traits, reserved0, 44, 4)                                     \
    STRUCT(moxie_probe, 192, 192)                                             \
    FIELD(moxie_probe, struct_size, 0, 4)                                     \
    FIELD(moxie_probe, score, 4, 4)                                           \
    FIELD(moxie_probe, name, 8, 8)                                            \
    FIELD(moxie_probe, kind, 16, 8)                                           \
    FIELD(moxie_probe, device, 24, 8)                                         \
    FIELD(moxie_probe, reason, 32, 160)                                       \
    STRUCT(moxie_config_entry, 40, 40)                                        \
    FIELD(moxie_config_entry, struct_size, 0, 4)                              \
    FIELD(moxie_config_entry, found, 4, 4)                                    \
    FIELD(moxie_config_entry, key, 8, 8)                                      \
    FIELD(moxie_config_entry, type, 16, 8)                                    \
    FIELD(moxie_config_entry, value, 24, 8)                                   \
    FIELD(moxie_config_entry, help, 32, 8)                                    \
    STRUCT(moxie_reason, 32, 32)                                              \
    FIELD(moxie_reason, struct_size, 0, 4)                                    \
    FIELD(moxie_reason, code, 4, 4)                                           \
    FIELD(moxie_reason, name, 8, 8)                                           \
    FIELD(moxie_reason, key, 16, 8)                                           \
    FIELD(moxie_reason, message, 24, 8)                                       \
    STRUCT(moxie_report, 40, 40)                                              \
    FIELD(moxie_report, struct_size, 0, 4)                                    \
    FIELD(moxie_report, reason_stride, 4, 4)                                  \
    FIELD(moxie_report, reasons_count, 8, 8)                                  \
    FIELD(moxie_report, reasons, 16, 8)                                       \
    FIELD(moxie_report, warnings_count, 24, 8)                                \
    FIELD(moxie_report, warnings, 32, 8)                                      \
    STRUCT(moxie_bounds, 120, 120)                                            \
    FIELD(moxie_bounds, struct_size, 0, 4)                                    \
    FIELD(moxie_bounds, reserved0, 4, 4)                                      \
    FIELD(moxie_bounds, forward_tokens, 8, 8)                                 \
    FIELD(moxie_bounds, dominant, 16, 8)                                      \
    FIELD(moxie_bounds, prefill, 24, 8)                                       \
    FIELD(moxie_bounds, decode, 32, 8)                                        \
    FIELD(moxie_bounds, dispatch_required, 40, 8)                             \
    FIELD(moxie_bounds, dispatch_tokens, 48, 8)                               \
    FIELD(moxie_bounds, allgather_rows, 56, 8)                                \
    FIELD(moxie_bounds, alltoall_rows, 64, 8)                                 \
    FIELD(moxie_bounds, capture_rows, 72, 8)                                  \
    FIELD(moxie_bounds, dispatch_call_tokens_max, 80, 8)                      \
    FIELD(moxie_bounds, forward_call_tokens_max, 88, 8)                       \
    FIELD(moxie_bounds, physical_experts, 96, 8)                              \
    FIELD(moxie_bounds, expert_first, 104, 8)                                 \
    FIELD(moxie_bounds, experts_local, 112, 8)                                \
    STRUCT(moxie_buffer, 48, 48)                                              \
    FIELD(moxie_buffer, struct_size, 0, 4)                                    \
    FIELD(moxie_buffer, kind, 4, 4)                                           \
    FIELD(moxie_buffer, name, 8, 8)                                           \
    FIELD(moxie_buffer, bytes, 16, 8)                                         \
    FIELD(moxie_buffer, bytes_mapped, 24, 8)                                  \
    FIELD(moxie_buffer, align, 32, 8)                                         \
    FIELD(moxie_buffer, why, 40, 8)                                           \
    STRUCT(moxie_plan, 64, 64)                                                \
    FIELD(moxie_plan, struct_size, 0, 4)                                      \
    FIELD(moxie_plan, buffer_stride, 4, 4)                                    \
    FIELD(moxie_plan, bounds, 8, 8)                                           \
    FIELD(moxie_plan, buffers_count, 16, 8)                                   \
    FIELD(moxie_plan, buffers, 24, 8)                                         \
    FIELD(moxie_plan, device_bytes, 32, 8)                                    \
    FIELD(moxie_plan, symmetric_bytes, 40, 8)                                 \
    FIELD(moxie_plan, pinned_bytes, 48, 8)                                    \
    FIELD(moxie_plan, host_bytes, 56, 8)                                      \
    STRUCT(moxie_matrix, 216, 216)                                            \
    FIELD(moxie_matrix, struct_size, 0, 4)                                    \
    FIELD(moxie_matrix, format, 4, 4)                                         \
    FIELD(moxie_matrix, order, 8, 4)                                          \
    FIELD(moxie_matrix, orientation, 12, 4)                                   \
    FIELD(moxie_matrix, values, 16, 48)                                       \
    FIELD(moxie_matrix, scales, 64, 48)                                       \
    FIELD(moxie_matrix, global_scales, 112, 48)                               \
    FIELD(moxie_matrix, bias, 160, 48)                                        \
    FIELD(moxie_matrix, block_offset, 208, 4)                                 \
    FIELD(moxie_matrix, reserved0, 212, 4)                                    \
    STRUCT(moxie_weights, 24, 24)                                             \
    FIELD(moxie_weights, struct_size, 0, 4)                                   \
    FIELD(moxie_weights, reserved0, 4, 4)                                     \
    FIELD(moxie_weights, w1, 8, 8)                                            \
    FIELD(moxie_weights, w2, 16, 8)                                           \
    STRUCT(moxie_step, 48, 48)                                                \
    FIELD(moxie_step, struct_size, 0, 4)                                      \
    FIELD(moxie_step, slot, 4, 4)                                             \
    FIELD(moxie_step, tokens, 8, 8)                                           \
    FIELD(moxie_step, rank_tokens, 16, 8)                                     \
    FIELD(moxie_step, padding, 24, 4)                                         \
    FIELD(moxie_step, phase, 28, 4)                                           \
    FIELD(moxie_step, tokens_valid, 32, 8)                                    \
    FIELD(moxie_step, capture_row, 40, 8)                                     \
    STRUCT(moxie_batch, 264, 264)                                             \
    FIELD(moxie_batch, struct_size, 0, 4)                                     \
    FIELD(moxie_batch, slot, 4, 4)                                            \
    FIELD(moxie_batch, layer, 8, 4)                                           \
    FIELD(moxie_batch, id_space, 12, 4)                                       \
    FIELD(moxie_batch, x, 16, 48)                                             \
    FIELD(moxie_batch, ids, 64, 48)                                           \
    FIELD(moxie_batch, weights, 112, 48)                                      \
    FIELD(moxie_batch, y, 160, 48)                                            \
    FIELD(moxie_batch, expert_map, 208, 48)                                   \
    FIELD(moxie_batch, stream, 256, 8)                                        \
    STRUCT(moxie_slab, 200, 200)                                              \
    FIELD(moxie_slab, struct_size, 0, 4)                                      \
    FIELD(moxie_slab, reserved0, 4, 4)                                        \
    FIELD(moxie_slab, rows, 8, 48)                                            \
    FIELD(moxie_slab, scales, 56, 48)                                         \
    FIELD(moxie_slab, ids, 104, 48)                                           \
    FIELD(moxie_slab, weights, 152, 48)                                       \
    STRUCT(moxie_rows, 128, 128)                                              \
    FIELD(moxie_rows, struct_size, 0, 4)                                      \
    FIELD(moxie_rows, layout, 4, 4)                                           \
    FIELD(moxie_rows, id_space, 8, 4)                                         \
    FIELD(moxie_rows, slabs_count, 12, 4)                                     \
    FIELD(moxie_rows, slab_stride, 16, 4)                                     \
    FIELD(moxie_rows, reserved0, 20, 4)                                       \
    FIELD(moxie_rows, slabs, 24, 8)                                           \
    FIELD(moxie_rows, counts, 32, 48)                                         \
    FIELD(moxie_rows, expert_map, 80, 48)                                     \
    STRUCT(moxie_call, 24, 24)                                                \
    FIELD(moxie_call, struct_size, 0, 4)                                      \
    FIELD(moxie_call, slot, 4, 4)                                             \
    FIELD(moxie_call, layer, 8, 4)                                            \
    FIELD(moxie_call, reserved0, 12, 4)                                       \
    FIELD(moxie_call, stream, 16, 8)                                          \
    STRUCT(moxie_runner_api, 40, 40)                                          \
    FIELD(moxie_runner_api, struct_size, 0, 4)                                \
    FIELD(moxie_runner_api, reserved0, 4, 4)                                  \
    FIELD(moxie_runner_api, create, 8, 8)                                     \
    FIELD(moxie_runner_api, run, 16, 8)                                       \
    FIELD(moxie_runner_api, weights_updated, 24, 8)                           \
    FIELD(moxie_runner_api, destroy, 32, 8)                                   \
    STRUCT(moxie_runner_info, 40, 40)                                         \
    FIELD(moxie_runner_info, struct_size, 0, 4)                               \
    FIELD(moxie_runner_info, reserved0, 4, 4)                                 \
    FIELD(moxie_runner_info, name, 8, 8)                                      \
    FIELD(moxie_runner_info, device, 16, 8)                                   \
    FIELD(moxie_runner_info, traits, 24, 8)                                   \
    FIELD(moxie_runner_info, api, 32, 8)                                      \
    STRUCT(moxie_dispatcher_api, 96, 96)                                      \
    FIELD(moxie_dispatcher_api, struct_size, 0, 4)                            \
    FIELD(moxie_dispatcher_api, reserved0, 4, 4)                              \
    FIELD(moxie_dispatcher_api, create, 8, 8)                                 \
    FIELD(moxie_dispatcher_api, begin_forward, 16, 8)                         \
    FIELD(moxie_dispatcher_api, dispatch, 24, 8)                              \
    FIELD(moxie_dispatcher_api, combine, 32, 8)                               \
    FIELD(moxie_dispatcher_api, dispatch_send, 40, 8)                         \
    FIELD(moxie_dispatcher_api, dispatch_recv, 48, 8)                         \
    FIELD(moxie_dispatcher_api, combine_send, 56, 8)                          \
    FIELD(moxie_dispatcher_api, combine_recv, 64, 8)                          \
    FIELD(moxie_dispatcher_api, poll_error, 72, 8)                            \
    FIELD(moxie_dispatcher_api, set_active_ranks, 80, 8)                      \
    FIELD(moxie_dispatcher_api, destroy, 88, 8)                               \
    STRUCT(moxie_dispatcher_info, 40, 40)                                     \
    FIELD(moxie_dispatcher_info, struct_size, 0, 4)                           \
    FIELD(moxie_dispatcher_info, reserved0, 4, 4)                             \
    FIELD(moxie_dispatcher_info, name, 8, 8)                                  \
    FIELD(moxie_dispatcher_info, device, 16, 8)                               \
    FIELD(moxie_dispatcher_info, traits, 24, 8)                               \
    FIELD(moxie_dispatcher_info, api, 32, 8)                                  \
    STRUCT(moxie_build, 56, 56)                                               \
    FIELD(moxie_build, struct_size, 0, 4)                                     \
    FIELD(moxie_build, abi_min, 4, 4)                                         \
    FIELD(moxie_build, abi_max, 8, 4)                                         \
    FIELD(moxie_build, reserved0, 12, 4)                                      \
    FIELD(moxie_build, version, 16, 8)                                        \
    FIELD(moxie_build, source_id, 24, 8)                                      \
    FIELD(moxie_build, compiler, 32, 8)                                       \
    FIELD(moxie_build, cuda, 40, 8)                                           \
    FIELD(moxie_build, layout_digest, 48, 8)                                  \
    STRUCT(moxie_field, 32, 32)                                               \
    FIELD(moxie_field, struct_size, 0, 4)                                     \
    FIELD(moxie_field, offset, 4, 4)                                          \
    FIELD(moxie_field, size, 8, 4)                                            \
    FIELD(moxie_field, reserved0, 12, 4)                                      \
    FIELD(moxie_field, structure, 16, 8)                                      \
    FIELD(moxie_field, field, 24, 8)                                          \
    STRUCT(moxie_stats, 88, 88)                                               \
    FIELD(moxie_stats, struct_size, 0, 4)                                     \
    FIELD(moxie_stats, reserved0, 4, 4)                                       \
    FIELD(moxie_stats, forwards, 8, 8)                                        \
    FIELD(moxie_stats, rounds, 16, 8)                                         \
    FIELD(moxie_stats, dispatches, 24, 8)                                     \
    FIELD(moxie_stats, combines, 32, 8)                                       \
    FIELD(moxie_stats, tokens, 40, 8)                                         \
    FIELD(moxie_stats, rows_sent, 48, 8)                                      \
    FIELD(moxie_stats, rows_received, 56, 8)                                  \
    FIELD(moxie_stats, refused, 64, 8)                                        \
    FIELD(moxie_stats, peer_failures, 72, 8)                                  \
    FIELD(moxie_stats, bytes_allocated, 80, 8)                                \
    STRUCT(moxie_captured, 56, 104)                                           \
    FIELD(moxie_captured, struct_size, 0, 4)                                  \
    FIELD(moxie_captured, dp_rank, 4, 4)                                      \
    FIELD(moxie_captured, ids, 8, 48)                                         \
    FIELD(moxie_captured, load, 56, 48)                                       \
    STRUCT(moxie_api, 120, 120)                                               \
    FIELD(moxie_api, struct_size, 0, 4)                                       \
    FIELD(moxie_api, abi_version, 4, 4)                                       \
    FIELD(moxie_api, build, 8, 8)                                             \
    FIELD(moxie_api, layout, 16, 8)                                           \
    FIELD(moxie_api, get_extension, 24, 8)                                    \
    FIELD(moxie_api, probe, 32, 8)                                            \
    FIELD(moxie_api, open, 40, 8)                                             \
    FIELD(moxie_api, config, 48, 8)                                           \
    FIELD(moxie_api, validate, 56, 8)                                         \
    FIELD(moxie_api, plan, 64, 8)                                             \
    FIELD(moxie_api, forward, 72, 8)                                          \
    FIELD(moxie_api, captured, 80, 8)                                         \
    FIELD(moxie_api, stats, 88, 8)                                            \
    FIELD(moxie_api, suspend, 96, 8)                                          \
    FIELD(moxie_api, resume, 104, 8)                                          \
    FIELD(moxie_api, close, 112, 8)                                           \
    STRUCT(moxie_request, 24, 24)                                             \
    FIELD(moxie_request, struct_size, 0, 4)                                   \
    FIELD(moxie_request, abi_min, 4, 4)                                       \
    FIELD(moxie_request, abi_max, 8, 4)                                       \
    FIELD(moxie_request, reserved0, 12, 4)                                    \
    FIELD(moxie_request, host_build, 16, 8)                                   \
    STRUCT(moxie_routing, 88, 88)                                             \
    FIELD(moxie_routing, struct_size, 0, 4)                                   \
    FIELD(moxie_routing, scoring, 4, 4)                                       \
    FIELD(moxie_routing, renormalize, 8, 4)                                   \
    FIELD(moxie_routing, groups, 12, 4)                                       \
    FIELD(moxie_routing, groups_top, 16, 4)                                   \
    FIELD(moxie_routing, reserved0, 20, 4)                                    \
    FIELD(moxie_routing, renormalize_epsilon, 24, 8)                          \
    FIELD(moxie_routing, scaling_factor, 32, 8)                               \
    FIELD(moxie_routing, correction_bias, 40, 48)                             \
    STRUCT(moxie_routing_api, 16, 16)                                         \
    FIELD(moxie_routing_api, struct_size, 0, 4)                               \
    FIELD(moxie_routing_api, reserved0, 4, 4)                                 \
    FIELD(moxie_routing_api, route, 8, 8)                                     \
    STRUCT(moxie_expand_api, 24, 24)                                          \
    FIELD(moxie_expand_api, struct_size, 0, 4)                                \
    FIELD(moxie_expand_api, reserved0, 4, 4)                                  \
    FIELD(moxie_expand_api, expand, 8, 8)                                     \
    FIELD(moxie_expand_api, fold, 16, 8)
// clang-format on

// What layout_digest() of this table is; a constant, so that the build identity can be one.
#define LAYOUT_DIGEST 0x55f6a5a1ed59a425ull

#endif
