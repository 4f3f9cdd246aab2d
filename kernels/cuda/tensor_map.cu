// Tensor maps.

#include "kernels/cuda/tensor_map.cuh"

namespace {

typedef CUresult (*encode_tiled)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                                 const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's encoder, looked up through the runtime so that libcuda is not linked.
cudaError_t find_encoder(encode_tiled *encoder)
{
    cudaDriverEntryPointQueryResult found;
    void *function = nullptr;
    cudaError_t st = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);

    if (st == cudaSuccess && found != cudaDriverEntryPointSuccess) st = cudaErrorSymbolNotFound;
    *encoder = reinterpret_cast<encode_tiled>(function);
    return st;
}

} // namespace

cudaError_t tensor_maps_make(const tensor_map_request *requests, int32_t count)
{
    static const cuuint32_t ones[5] = {1, 1, 1, 1, 1};
    encode_tiled encode;
    cudaError_t st = find_encoder(&encode);

    for (int32_t i = 0; i < count && st == cudaSuccess; i++) {
        const tensor_map_request &r = requests[i];
        bool is_scales = r.numbers == CU_TENSOR_MAP_DATA_TYPE_FLOAT32;

        if (encode(r.map, r.numbers, r.shape.rank, const_cast<void *>(r.base), r.shape.extents, r.shape.strides, r.shape.box, ones,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, is_scales ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B,
                   CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
            st = cudaErrorInvalidValue;
    }
    return st;
}
