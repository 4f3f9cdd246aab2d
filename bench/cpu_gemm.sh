#!/usr/bin/env bash
# The CPU products at decode and prefill sizes, one JSON object per line.
#   bench/cpu_gemm.sh BUILD_DIR > bench/results/DATE-cpu-gemm.json
set -euo pipefail
for threads in 1 2; do
    for format in bf16 f32; do
        for tokens in 1 16 256 1024; do
            "$1/bin/cpu_gemm" 2048,768,128,8 "$tokens" "$threads" "$format"
        done
    done
done
for tokens in 1 256; do
    "$1/bin/cpu_gemm" 2048,768,32,8 "$tokens" 1 bf16_in
    "$1/bin/cpu_gemm" 2048,768,32,8 "$tokens" 1 bf16 avx2
    "$1/bin/cpu_gemm" 2048,768,32,8 "$tokens" 1 bf16 scalar
done
